"""What a torch backend writes and reads back: model, optimizer, counters, random state (RR3, RR4).

Called by `TorchBackend.capture` and `load`. Capturing copies to CPU memory between two steps; writing happens at leisure, on any
thread. Only JSON and safetensors, no pickle (SE2). Everything is read and checked before anything is changed, so a refused
load leaves the backend as it was.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from relax.core.error import UserError
from relax.training.file import quiet_saving
from relax.training.trained import CapturedModel

FORMAT = 1
PROCESSOR_FILES = ("*processor_config.json",)
TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", *PROCESSOR_FILES,
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
class TrainingState:
    """Everything but the model. `values` are an optimizer's plain numbers by parameter; `tensors` its tensors, by parameter."""

    settings: StageSettings
    counters: Counters
    values: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Mapping[str, Tensor]]
    random: Mapping[str, Tensor]

    def restore(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Put state and random generators back; torch places each tensor where this optimizer wants it."""
        order = {parameter: index for index, parameter in enumerate(_listed(optimizer))}
        state = {order[parameters[name]]: {**self.values[name], **self.tensors.get(name, {})} for name in self.values}
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(self.random["cpu"])
        if "cuda" in self.random and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.random["cuda"])

    def write(self, folder: Path) -> None:
        """Into `folder/training`. Raises OSError when the disk does not take it."""
        home = folder / "training"
        home.mkdir(parents=True, exist_ok=True)
        document = {
            "format": FORMAT,
            "settings": asdict(self.settings),
            "counters": asdict(self.counters),
            "optimizer": {name: dict(values) for name, values in self.values.items()},
        }
        (home / "state.json").write_text(json.dumps(document, indent=1))
        flat = {f"random/{name}": value for name, value in self.random.items()}
        flat |= {f"optimizer/{key}/{name}": value for name, held in self.tensors.items() for key, value in held.items()}
        with quiet_saving("the optimizer", home):
            save_file(flat, home / "state.safetensors")


@dataclass(frozen=True, slots=True)
class CapturedBackend:
    """Core's `Captured`: a private copy of all that a torch backend needs to go on."""

    model: CapturedModel
    training: TrainingState
    companions: tuple[Path, ...]
    """Files that make the model a whole: those of its tokenizer and of its processor."""

    def write(self, path: str) -> None:
        """Into folder `path`: the model as other tools read it, its companions, and `training/` with everything else.

        May run on any thread. Raises OSError when the disk does not take it.
        """
        folder = Path(path)
        self.model.write(folder)
        self.training.write(folder)
        for source in self.companions:
            shutil.copyfile(source, folder / source.name)


def move_training(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """Weights, gradients and the optimizer's tensors, the parameters staying the objects they are. Counters stay on the CPU."""
    model.to(device)
    for parameter, held in (optimizer.state if optimizer is not None else {}).items():
        for name, value in held.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                held[name] = value.to(device)


def companion_files(tokenizer_path: Path | None, processor_path: Path | None) -> tuple[Path, ...]:
    """The files of a tokenizer's folder, and the processor's settings of the model's own, which go before a tokenizer's."""
    found: dict[str, Path] = {}
    for folder, patterns in ((tokenizer_path, TOKENIZER_FILES), (processor_path, PROCESSOR_FILES)):
        for pattern in patterns if folder is not None else ():
            found |= {file.name: file for file in folder.glob(pattern)}  # type: ignore[union-attr]
    return tuple(found[name] for name in sorted(found))


def capture_training(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    settings: StageSettings,
    counters: Counters,
) -> TrainingState:
    """A copy of optimizer, schedule position, counters and random state in CPU memory."""
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        if parameter not in optimizer.state:
            continue
        held = optimizer.state[parameter]
        values[name] = {key: value for key, value in held.items() if not isinstance(value, Tensor)}
        copies = {key: value.detach().to("cpu", copy=True) for key, value in held.items() if isinstance(value, Tensor)}
        tensors[name] = {key: value.contiguous() for key, value in copies.items()}
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["cuda"] = torch.cuda.get_rng_state()
    return TrainingState(settings, Counters(**asdict(counters)), values, tensors, random)


def read_training(folder: Path, settings: StageSettings, parameters: Mapping[str, nn.Parameter]) -> TrainingState:
    """What `TrainingState.write` wrote. Raises UserError when it is missing, damaged, or of another optimizer or model."""
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
    _check_parameters(folder, set(document["optimizer"]), set(parameters))
    tensors: dict[str, dict[str, Tensor]] = {}
    for path, value in flat.items():
        if path.startswith("optimizer/"):
            _, key, name = path.split("/", 2)
            tensors.setdefault(name, {})[key] = value
    random = {path.removeprefix("random/"): value for path, value in flat.items() if path.startswith("random/")}
    return TrainingState(
        StageSettings(**document["settings"]), Counters(**document["counters"]), document["optimizer"], tensors, random
    )


def _check_parameters(folder: Path, saved: set[str], trained: set[str]) -> None:
    """An optimizer that has made a step holds a state for every parameter that it trains."""
    if not saved or saved == trained:
        return
    only = sorted(saved ^ trained)
    raise UserError(
        f"the optimizer in {folder} belongs to another model: {len(only)} parameters are trained in only one of them "
        f"({', '.join(only[:3])}); give the model and freeze, parts and lora of training.backend as they were, or start a new run "
        f"with model.path: {folder}"
    )


def _listed(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's parameters in the order by which its state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
