"""What a torch backend writes and reads back: model, optimizer, counters, random state (RR3, RR4).

Called by `TorchBackend.save` and `load`. Only JSON and safetensors, no pickle (SE2). Everything is read and checked before
anything is changed, so a refused load leaves the backend as it was.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from relax.core.error import UserError
from relax.model.load import load_model
from relax.model.name import published_tensors

FORMAT = 1
TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "*processor_config.json",
)  # fmt: skip


@dataclass(slots=True)
class Counters:
    """Optimizer steps of a stage by outcome: `applied`, `empty` (nothing to train, LO4), `nonfinite` (LO6)."""

    applied: int = 0
    empty: int = 0
    nonfinite: int = 0

    def count(self, applied: bool, finite: bool) -> None:
        if applied:
            self.applied += 1
        elif finite:
            self.empty += 1
        else:
            self.nonfinite += 1


@dataclass(frozen=True, slots=True)
class StageSettings:
    """The nodes that a stage began with, as JSON."""

    optimizer: Mapping[str, Any]
    schedule: Mapping[str, Any]
    total_steps: int


@dataclass(frozen=True, slots=True)
class SavedTraining:
    """Everything but the model. `values` are an optimizer's plain numbers by parameter; `tensors` its tensors, by parameter."""

    counters: Counters
    values: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Mapping[str, Tensor]]
    random: Mapping[str, Tensor] = field(default_factory=dict)

    def restore(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Put state and random generators back; torch places each tensor where this optimizer wants it."""
        order = {parameter: index for index, parameter in enumerate(_listed(optimizer))}
        state = {order[parameters[name]]: {**self.values[name], **self.tensors.get(name, {})} for name in self.values}
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(self.random["cpu"])
        if "cuda" in self.random and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.random["cuda"])


def save_model(model: Any, tokenizer_path: Path | None, folder: Path) -> None:
    """`save_pretrained` plus the tokenizer's files. Raises OSError when the disk does not take them."""
    _silence_progress_bars()
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # how a full disk looks from there
        raise OSError(f"cannot write the model into {folder}: {error}") from error
    if tokenizer_path is None:
        return
    for source in sorted(file for pattern in TOKENIZER_FILES for file in tokenizer_path.glob(pattern)):
        shutil.copyfile(source, folder / source.name)


def save_training(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    settings: StageSettings,
    counters: Counters,
    folder: Path,
) -> None:
    """Optimizer, schedule position, counters and random state. Raises OSError when the disk does not take them."""
    tensors = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if parameter not in optimizer.state:
            continue
        held = optimizer.state[parameter]
        values[name] = {key: value for key, value in held.items() if not isinstance(value, Tensor)}
        for key, value in held.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{key}/{name}"] = value.detach().contiguous()
    home = folder / "training"
    home.mkdir(parents=True, exist_ok=True)
    document = {"format": FORMAT, "settings": asdict(settings), "counters": asdict(counters), "optimizer": values}
    (home / "state.json").write_text(json.dumps(document, indent=1))
    try:
        save_file(tensors, home / "state.safetensors")
    except SafetensorError as error:
        raise OSError(f"cannot write the optimizer into {home}: {error}") from error


def read_training(folder: Path, settings: StageSettings, parameters: Mapping[str, nn.Parameter]) -> SavedTraining:
    """What `save_training` wrote. Raises UserError when it is missing, damaged, or of another optimizer or model."""
    home = folder / "training"
    try:
        document = json.loads((home / "state.json").read_text())
        flat = load_file(home / "state.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder} holds no usable training state: {error}; resume from another checkpoint") from error
    if document["format"] != FORMAT:
        raise UserError(f"{home} has format {document['format']}, this version reads {FORMAT}")
    have, want = document["settings"]["optimizer"].get("type"), settings.optimizer.get("type")
    if have != want:
        raise UserError(
            f"{folder} was saved with optimizer {have!r}, this run has {want!r}; set training.optimizer.type: {have}, "
            f"or start a new run with model.path: {folder}"
        )
    strangers = sorted(set(document["optimizer"]) - set(parameters))
    if strangers or (document["optimizer"] and len(document["optimizer"]) != len(parameters)):
        raise UserError(f"the optimizer in {folder} belongs to another model: parameters differ ({strangers[:3]} ...)")
    tensors: dict[str, dict[str, Tensor]] = {}
    for path, value in flat.items():
        if path.startswith("optimizer/"):
            _, key, name = path.split("/", 2)
            tensors.setdefault(name, {})[key] = value
    random = {path.removeprefix("random/"): value for path, value in flat.items() if path.startswith("random/")}
    return SavedTraining(Counters(**document["counters"]), document["optimizer"], tensors, random)


def load_model_into(model: Any, folder: Path) -> None:
    """Copy the weights in `folder` into the tensors that the model already has, so that every binding to them stays.

    Raises UserError when they are of another architecture, or names, shapes or dtypes differ.
    """
    config_path = folder / "config.json"
    kind = json.loads(config_path.read_text()).get("model_type") if config_path.is_file() else None
    if kind != model.config.model_type:
        raise UserError(f"{folder} holds a model of type {kind!r}, this run has {model.config.model_type!r}")
    _silence_progress_bars()
    # Through the model's own loader, because names on disk need not be names in memory (fused experts).
    loaded = published_tensors(load_model(folder, "pretrained", "float32"))
    own = published_tensors(model)
    problems = [f"{name} is only in one of them" for name in sorted(set(loaded) ^ set(own))]
    problems += [
        f"{name} is {tuple(loaded[name].shape)}, expected {tuple(own[name].shape)}"
        for name in sorted(set(loaded) & set(own))
        if loaded[name].shape != own[name].shape
    ]
    if problems:
        raise UserError(f"the model in {folder} is not the one of this run: {'; '.join(problems[:3])}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(loaded[name])


def _silence_progress_bars() -> None:
    """A bar per checkpoint would run through the run's own progress display."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _listed(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's parameters in the order by which its state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
