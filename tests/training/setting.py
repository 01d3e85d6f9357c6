"""Rows, a loss and backends that the tests of training share, its contract suite and its cases included."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax.core.batch import Measure, TrainRow
from relax.core.completion import frozen
from relax.core.id import group_id, sample_id, trajectory_id
from relax.core.protocol import LossInput, LossOutput
from relax.model.load import load_model, load_tokenizer
from relax.model.vocabulary import Vocabulary, read_vocabulary
from relax.training.config import AdamWConfig, ConstantConfig, LoraConfig, OptimizerConfig, ScheduleConfig, TorchConfig
from relax.training.torch_backend import TorchBackend

MODEL_PATH = Path(__file__).resolve().parents[2] / "recipes" / "models" / "qwen3-char"
LORA = TorchConfig(device="cpu", lora=LoraConfig(rank=4, alpha=8.0))
FROZEN = TorchConfig(device="cpu", freeze=("embeddings",))
ADAMW = AdamWConfig(lr=1e-3)
CONSTANT = ConstantConfig()


@dataclass(frozen=True)
class PolicyGradient:
    """-sum of weight * advantage * logprob, as plain as a loss can be."""

    columns: tuple[str, ...] = ("advantages",)
    needs_entropy: bool = False

    def __call__(self, batch: LossInput) -> LossOutput:
        gain_BT = batch.weights_BT * batch.columns["advantages"] * batch.logprobs_BT
        lowest = batch.logprobs_BT.detach().min().item()
        return LossOutput(-gain_BT.sum(), {"loss/logprob/min": Measure(lowest, 1.0, "min")})


LOSS = PolicyGradient()


def make_row(index: int, prompt: int, sampled: int, **changes: Any) -> TrainRow:
    """A row of random printable tokens: `prompt` of them unmasked, then `sampled` masked in; every array read-only."""
    rng = np.random.default_rng(index)
    length = prompt + sampled
    mask = np.arange(length) >= prompt
    values: dict[str, Any] = {
        "token_ids": rng.integers(0, 95, length).astype(np.int32),
        "mask": mask,
        "weights": (mask * rng.uniform(0.5, 2.0)).astype(np.float32),
        "columns": {"advantages": (mask * rng.normal()).astype(np.float32)},
    } | changes
    for array in (values["token_ids"], values["mask"], values["weights"], *values["columns"].values()):
        frozen(array)
    return TrainRow(sample_id(trajectory_id(group_id(index // 4), index % 4), 0), **values)


def make_rows() -> list[TrainRow]:
    """Twelve ragged rows, among them one of a single token and one with nothing masked in."""
    shapes = [(5, 7), (3, 1), (1, 9), (8, 2), (2, 4), (6, 6), (1, 0), (4, 0), (7, 3), (2, 12), (5, 5), (3, 8)]
    return [make_row(index, prompt, sampled) for index, (prompt, sampled) in enumerate(shapes)]


def total_weight(rows: list[TrainRow]) -> float:
    """The denominator of token-level aggregation."""
    return float(sum(row.weights.sum() for row in rows))


@cache
def vocabulary() -> Vocabulary:
    return read_vocabulary(load_tokenizer(MODEL_PATH), make_model().config)


def make_model(seed: int = 0) -> Any:
    return load_model(MODEL_PATH, "random", "float32", seed)


def make_backend(
    seed: int = 0,
    model: Any = None,
    optimizer: OptimizerConfig = ADAMW,
    schedule: ScheduleConfig = CONSTANT,
    total_steps: int = 100,
    config: TorchConfig | None = None,
    **arguments: Any,
) -> TorchBackend:
    """A torch backend over a fresh tiny model, its stage begun."""
    arguments = {"vocabulary": vocabulary(), **arguments}
    backend = TorchBackend(config or TorchConfig(device="cpu"), model or make_model(seed), **arguments)
    backend.begin(optimizer, schedule, total_steps)
    return backend


def train_steps(backend: TorchBackend, rows: list[TrainRow], steps: int, first: int = 0) -> None:
    """Steps over four rows each, a different four every time."""
    for step in range(first, first + steps):
        chosen = tuple(rows[(4 * step + offset) % len(rows)] for offset in range(4))
        backend.forward_backward([[chosen]], LOSS)
        backend.optim_step(total_weight(list(chosen)))


def weights_of(backend: Any) -> dict[str, torch.Tensor]:
    """Copies of the exported tensors."""
    return {name: tensor.clone() for name, tensor in backend.export().items()}


def gradients_of(backend: TorchBackend) -> dict[str, torch.Tensor]:
    """Copies of the accumulated gradients."""
    return {name: one.grad.clone() for name, one in backend._parameters.items() if one.grad is not None}


def gradient_gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """max|dg| / max|g| over all parameters (LO1)."""
    assert first.keys() == second.keys()
    largest = max(float(one.abs().max()) for one in first.values())
    return max(float((first[name] - second[name]).abs().max()) for name in first) / largest


def weight_gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """||dw|| / ||w|| over all tensors (LO1)."""
    assert first.keys() == second.keys()
    difference = sum(float(((first[name] - second[name]).double() ** 2).sum()) for name in first)
    return float((difference / sum(float((one.double() ** 2).sum()) for one in first.values())) ** 0.5)


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
