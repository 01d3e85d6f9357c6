"""Loss and gradient equal those of TRL's own loss code, to 1e-5, where TRL has the loss.

TRL's methods are called unbound on an object that holds what they read, and a model that returns given logprobs; nothing of
them is retyped here. TRL is an optional peer: without it these tests are skipped.
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from relax.core.algorithm import Algorithm, StepTrajectory
from relax.core.completion import frozen
from relax.core.id import group_id
from relax.core.protocol import LossInput
from tests.algorithms.step import build

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pytest makes errors of them; they are TRL's and its dependencies'
        from trl.trainer.dpo_trainer import DPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer
        from trl.trainer.rloo_trainer import RLOOTrainer
except ImportError as error:
    pytest.skip(f"TRL is not installed here: {error}; pip install --no-deps trl==1.16.0", allow_module_level=True)

TOLERANCE = 1e-5
LENGTHS = (5, 2, 4, 1)


class Accelerator:
    """One process."""

    num_processes, device, sync_gradients = 1, torch.device("cpu"), True

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value


class Case:
    """A batch of four completions with made-up logprobs, in float64, and what both sides need of it."""

    def __init__(self, spread: float = 0.3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        shape = (len(LENGTHS), max(LENGTHS))
        self.mask_BT = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
        self.logprobs_BT = (normal(*shape) * 0.5 - 2).requires_grad_()
        fixed = self.logprobs_BT.detach()
        self.old_BT, self.behaviour_BT, self.reference_BT = (fixed + spread * normal(*shape) for _ in range(3))
        self.advantages_B = normal(shape[0])

    def relax(self, algorithm: Algorithm, **columns: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient of an algorithm, normalised as the trainer role does."""
        lengths = np.array(LENGTHS)
        weights = torch.tensor(algorithm.aggregate.token_weights(lengths))
        numbers = torch.arange(len(LENGTHS))[:, None].expand_as(self.mask_BT)
        known = {
            "advantages": self.advantages_B[:, None].expand_as(self.mask_BT),
            "behaviour_logprobs": self.behaviour_BT,
            "old_logprobs": self.old_BT,
            "reference_logprobs": self.reference_BT,
            "trajectory_number": numbers,
        }
        batch = LossInput(
            self.logprobs_BT, self.mask_BT, weights[:, None].expand_as(self.mask_BT), {**known, **columns}
        )
        loss = algorithm.loss(batch).loss / algorithm.aggregate.normalizer([lengths])
        return loss, torch.autograd.grad(loss, self.logprobs_BT)[0]

    def trl(self, old_BT: Tensor | None = None, ratio: Tensor | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
        """Loss and gradient of `GRPOTrainer`."""
        empty = torch.zeros(len(LENGTHS), 0, dtype=torch.long)
        inputs = {
            "prompt_ids": empty,
            "prompt_mask": empty,
            "completion_ids": torch.zeros_like(self.mask_BT, dtype=torch.long),
            "completion_mask": self.mask_BT.long(),
            "advantages": self.advantages_B,
            "old_per_token_logps": old_BT,
            "ref_per_token_logps": self.reference_BT,
            "num_items_in_batch": self.mask_BT.sum(),
            "importance_sampling_ratio": ratio,
        }
        loss = GRPOTrainer._compute_loss(
            grpo_self(self.logprobs_BT, use_vllm=ratio is not None, **settings), None, inputs
        )
        return loss, torch.autograd.grad(loss, self.logprobs_BT)[0]

    def step_weights(self, algorithm: Algorithm) -> Tensor:
        """What the algorithm's correction makes of the batch, each row a trajectory."""
        names = {"old_logprobs": self.old_BT, "behaviour_logprobs": self.behaviour_BT}
        told = [
            StepTrajectory(
                group_id(0),
                row,
                frozen(self.mask_BT[row].numpy()),
                {name: values[row].numpy() for name, values in names.items()},
            )
            for row in range(len(LENGTHS))
        ]
        values = algorithm.step_functions[0](told)
        return torch.tensor(np.stack(values.columns["importance_weights"]))


def grpo_self(logprobs_BT: Tensor, **settings: Any) -> SimpleNamespace:
    """What `GRPOTrainer._compute_loss` reads of its trainer."""
    names = ("delta", "sapo_temperature_pos", "sapo_temperature_neg")
    arguments = {name: settings.pop(name, default) for name, default in zip(names, (None, 1.0, 1.05), strict=True)}
    fields: dict[str, Any] = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "max_completion_length": 16,
        **settings,
    }
    return SimpleNamespace(
        **fields,
        args=SimpleNamespace(**arguments, steps_per_generation=1, use_bias_correction_kl=False),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs_BT, torch.zeros_like(logprobs_BT), None),
    )


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Loss and gradient, each to 1e-5 of its largest entry."""
    for one, other in zip(found, expected, strict=True):
        largest = float(other.detach().abs().max())
        assert largest > 1e-6, "nothing agrees with everything"
        assert float((one - other).detach().abs().max()) <= TOLERANCE * largest


RATIO: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {"aggregate": "trajectory"}, {}),
    "bnpo": ("grpo", {"aggregate": "token"}, {"loss_type": "bnpo"}),
    "dr_grpo": ("grpo", {"aggregate": "constant", "constant_tokens": 16}, {"loss_type": "dr_grpo"}),
    "dapo": ("dapo", {}, {"loss_type": "dapo"}),
    "dual clip": ("grpo", {"clip_ratio_negative": 1.3, "aggregate": "token"}, {"delta": 1.3, "loss_type": "bnpo"}),
    "kl": ("grpo", {"kl_weight": 0.3, "aggregate": "trajectory"}, {"beta": 0.3}),
    "gspo": (
        "gspo",
        {"clip_low": 0.05, "clip_high": 0.07},
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.07},
    ),
    "sapo": ("sapo", {}, {"loss_type": "sapo"}),
    "sapo, other temperatures": (
        "sapo",
        {"temperature_positive": 2.0, "temperature_negative": 5.0},
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 5.0},
    ),
    "cispo": ("cispo", {"weight_max": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "settings"), RATIO.values(), ids=RATIO)
@pytest.mark.parametrize("seed", range(3))
def test_losses_with_a_ratio(name: str, fields: dict[str, Any], settings: dict[str, Any], seed: int) -> None:
    case = Case(seed=seed)
    assert_same(case.relax(build(name, **fields)), case.trl(case.behaviour_BT, **settings))


def test_gspo_with_the_clip_of_the_paper() -> None:
    case = Case(spread=4e-4)
    settings = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
    assert_same(case.relax(build("gspo")), case.trl(case.behaviour_BT, **settings))


def test_a_ratio_against_itself() -> None:
    case = Case()
    assert_same(case.relax(build("grpo", old_logprobs="current", aggregate="token")), case.trl(None, loss_type="bnpo"))


@pytest.mark.parametrize("seed", range(3))
def test_decoupled_ppo_is_a_ratio_to_the_proximal_policy_times_a_truncated_weight(seed: int) -> None:
    case = Case(seed=seed)
    ratio = torch.exp(case.old_BT - case.behaviour_BT).clamp(max=1.2)
    correction = {"type": "token_truncated", "cap": 1.2}
    algorithm = build("decoupled_ppo", clip_high=0.28, correction=correction, aggregate="trajectory")
    assert_same(case.relax(algorithm), case.trl(case.old_BT, ratio))


@pytest.mark.parametrize("type_", ["sequence_truncated", "masked"])
def test_corrections_of_a_trajectory_weigh_as_in_trl(type_: str) -> None:
    """TRL keeps a masked token in its denominators: compared before that difference, with the weights of the correction."""
    case = Case()
    limits = {"cap": 1.1} if type_ == "sequence_truncated" else {"low": 0.8, "high": 1.3}
    algorithm = build("grpo", old_logprobs="recomputed", correction={"type": type_, **limits}, aggregate="trajectory")
    log_ratio = torch.where(case.mask_BT, case.old_BT - case.behaviour_BT, 0.0)
    if type_ == "sequence_truncated":
        ratio = torch.exp(log_ratio.sum(-1, keepdim=True)).clamp(max=1.1)
    else:
        ratio = torch.exp(log_ratio)
        ratio = ratio.masked_fill((ratio < 0.8) | (ratio > 1.3), 0.0)
    assert_same(case.relax(algorithm, importance_weights=case.step_weights(algorithm)), case.trl(case.old_BT, ratio))


def test_rloo() -> None:
    case = Case()
    empty = torch.zeros(len(LENGTHS), 0, dtype=torch.long)
    trainer = grpo_self(case.logprobs_BT)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros_like(case.mask_BT, dtype=torch.long),
        "completion_mask": case.mask_BT.long(),
        "advantages": case.advantages_B,
        "old_logps": (case.logprobs_BT.detach() * case.mask_BT).sum(1),
    }
    loss = RLOOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, case.logprobs_BT)
    # Against itself TRL's value is minus the mean advantage, ours the same per token: only the gradients are one thing.
    _, found = case.relax(build("rloo"))
    assert_same((found,) * 2, (gradient,) * 2)
    assert float(loss.detach()) == pytest.approx(-float(case.advantages_B.mean()))


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpo(beta: float) -> None:
    """Rows 0 and 1 are chosen, 2 and 3 rejected."""
    case = Case(spread=1.0)
    width = case.mask_BT.shape[1]
    shifted = torch.cat([torch.zeros(len(LENGTHS), 1, dtype=torch.long), case.mask_BT.long()], dim=1)
    masked = torch.where(case.mask_BT, case.logprobs_BT, 0.0)
    reference_B = torch.where(case.mask_BT, case.reference_BT, 0.0).sum(1)
    zeros = torch.zeros(len(LENGTHS), width, dtype=torch.float64)
    outputs = SimpleNamespace(log_probs=masked, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=beta,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "input_ids": torch.zeros_like(shifted),
        "attention_mask": torch.ones_like(shifted),
        "completion_mask": shifted,
        "ref_chosen_logps": reference_B[:2],
        "ref_rejected_logps": reference_B[2:],
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    (gradient,) = torch.autograd.grad(loss, case.logprobs_BT)
    algorithm = build("dpo", beta=beta)
    found, measures = relax_dpo(algorithm, case)
    assert_same(found, (loss, gradient))
    for name, theirs in (("margin", "rewards/margins"), ("accuracy", "rewards/accuracies")):
        measure = measures[f"preference/{name}"]
        assert measure.value / measure.weight == pytest.approx(trainer._metrics["train"][theirs][0], rel=1e-6)


def relax_dpo(algorithm: Algorithm, case: Case) -> tuple[tuple[Tensor, Tensor], Any]:
    """Loss and gradient through the step-scope function and the loss, and what the function measured."""
    pairs = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    told = [
        StepTrajectory(
            group_id(group),
            sibling,
            frozen(case.mask_BT[row].numpy()),
            {
                "old_logprobs": case.logprobs_BT.detach()[row].numpy(),
                "reference_logprobs": case.reference_BT[row].numpy(),
            },
        )
        for row, group, sibling in pairs
    ]
    values = algorithm.step_functions[0](told)
    columns = {name: torch.tensor(np.stack(arrays)) for name, arrays in values.columns.items()}
    normalizer = algorithm.aggregate.normalizer([np.array([5, 4]), np.array([2, 1])])
    weights_BT = torch.ones_like(case.mask_BT, dtype=torch.float64)
    loss = algorithm.loss(LossInput(case.logprobs_BT, case.mask_BT, weights_BT, columns)).loss / normalizer
    return (loss, torch.autograd.grad(loss, case.logprobs_BT)[0]), values.measures
