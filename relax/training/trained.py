"""What a torch backend trains: a whole model, or an adapter beside a frozen one. Each knows how it is published, written and read.

Built by `TorchBackend`; the rest of the backend sees a module, its trainable parameters and these four verbs. What is captured
is a copy in CPU memory, so it can be written on another thread while training goes on.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from relax.core.error import InvariantError, UserError
from relax.model import lora
from relax.model.family import Family
from relax.model.load import load_model
from relax.model.name import published_tensors
from relax.model.source import ModelOrigin
from relax.training.config import LoraConfig, TorchConfig
from relax.training.file import quiet_saving
from relax.training.part import freeze_parts

EMBEDDINGS = "embeddings"
"""The pattern of `freeze` that means the input and output embeddings."""


class CapturedModel(Protocol):
    """A copy of what is trained."""

    def write(self, folder: Path) -> None: ...


class Trained(Protocol):
    """`model` is what forward passes go through."""

    model: Any

    def export(self) -> Mapping[str, Tensor]: ...

    def applied(self) -> None:
        """An optimizer step with a gradient was applied."""
        ...

    def capture(self) -> CapturedModel: ...

    def load(self, folder: Path) -> None: ...


def build_trained(config: TorchConfig, model: Any, base: ModelOrigin, family: Family | None = None) -> Trained:
    """What `config` says to train of `model`. Raises UserError for layers, parameters or parts that it has not."""
    if config.lora is not None:
        return TrainedAdapter(model, config.lora, base)
    freeze(model, config.freeze)
    freeze_parts(model, family, config.parts)
    return WholeModel(model)


class WholeModel:
    """Every parameter that is not frozen, trained in place."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def export(self) -> Mapping[str, Tensor]:
        """The live tensors; they change with the next step."""
        return published_tensors(self.model)

    def applied(self) -> None:
        """Nothing to check: what is published is what is trained."""

    def capture(self) -> "CapturedWhole":
        return CapturedWhole(copy_to_cpu(self.model))

    def load(self, folder: Path) -> None:
        """Copy the weights in `folder` into the tensors that the model already has, so that every binding to them stays.

        Raises UserError when they are of another architecture, or names, shapes or dtypes differ.
        """
        _check_kind(self.model, folder)
        if lora.holds_adapter(folder):
            raise UserError(
                f"{folder} holds an adapter, this run trains the whole model; set training.backend.lora as it was, or start a "
                f"new run with model.path: {folder}"
            )
        # Through the model's own loader, because names on disk need not be names in memory (fused experts).
        loaded = published_tensors(load_model(folder, "pretrained", "float32"))
        own = published_tensors(self.model)
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


@dataclass(frozen=True, slots=True)
class CapturedWhole:
    """`model` is a private copy."""

    model: Any

    def write(self, folder: Path) -> None:
        """As `save_pretrained`. Raises OSError when the disk does not take it."""
        with quiet_saving("the model", folder):
            self.model.save_pretrained(folder)


class TrainedAdapter:
    """An adapter; the base is shared with `model`, which keeps its modules and never changes."""

    def __init__(self, model: Any, config: LoraConfig, base: ModelOrigin) -> None:
        self.model = lora.add_adapter(model, config.rank, config.alpha, config.targets, base.seed)
        self._base = base
        self._describe = lora.adapter_config(config.rank, config.alpha, config.targets, base)
        self._base_digest: str | None = None
        self._published: dict[str, int] = {}
        self._steps_since = 0

    def export(self) -> Mapping[str, Tensor]:
        """Merged weights under the base model's names, new tensors where a layer is adapted.

        Raises InvariantError when a step was applied and not one adapted tensor differs from what was exported before it.
        """
        merged = lora.merged_tensors(self.model)
        found = {
            name: int(torch.hash_tensor(merged[name]).view(torch.int64)) for name in lora.adapted_names(self.model)
        }
        if self._steps_since and found == self._published:
            raise InvariantError(
                "ST7",
                f"{self._steps_since} steps of LoRA training changed none of the {len(found)} adapted tensors that are "
                "published: the engines would go on with the old policy. A learning rate too small for float32 does that; raise it",
            )
        self._published, self._steps_since = found, 0
        return merged

    def applied(self) -> None:
        self._steps_since += 1

    def capture(self) -> "CapturedAdapter":
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in lora.adapter_tensors(self.model).items()}
        config = copy.deepcopy(self.model.config)
        return CapturedAdapter(tensors, self._describe, self._base, self._digest(), config)

    def load(self, folder: Path) -> None:
        """Copy the adapter in `folder` into this one. Raises UserError when it is another's, or there is none."""
        _check_kind(self.model, folder)
        if not lora.holds_adapter(folder):
            raise UserError(
                f"{folder} holds a whole model, this run trains an adapter; leave training.backend.lora out, or start a new run "
                f"with model.path: {folder}"
            )
        base, digest = lora.read_base(folder)
        if digest != self._digest():
            raise UserError(
                f"the adapter in {folder} stands beside {base.path!r} as it was then; the weights of this run's model "
                f"({self._base.path!r}) are others: give that model, unchanged"
            )
        theirs = json.loads((folder / lora.CONFIG_FILE).read_bytes())
        if theirs["lora_alpha"] != self._describe["lora_alpha"]:
            raise UserError(
                f"the adapter in {folder} has alpha {theirs['lora_alpha']}, this run {self._describe['lora_alpha']}; "
                "set training.backend.lora.alpha as it was"
            )
        lora.copy_adapter(self.model, lora.read_adapter(folder), folder)
        self._published, self._steps_since = {}, 0

    def _digest(self) -> str:
        """Of the base, which never changes; computed when it is first needed, because it reads every weight."""
        if self._base_digest is None:
            self._base_digest = lora.base_fingerprint(self.model)
        return self._base_digest


@dataclass(frozen=True, slots=True)
class CapturedAdapter:
    """`tensors` are private copies; `model_config` is that of the base."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    base: ModelOrigin
    base_digest: str
    model_config: Any

    def write(self, folder: Path) -> None:
        """The adapter's files and the model's configuration. Raises OSError when the disk does not take them."""
        lora.write_adapter(folder, self.tensors, self.config, self.base, self.base_digest)
        self.model_config.save_pretrained(folder)


def copy_to_cpu(model: Any) -> Any:
    """A copy of a model in CPU memory: modules, parameters and buffers; ties stay ties."""
    copies: dict[int, Tensor] = {
        id(one): nn.Parameter(one.detach().to("cpu", copy=True), requires_grad=False) for one in model.parameters()
    }
    copies |= {id(buffer): buffer.detach().to("cpu", copy=True) for buffer in model.buffers()}
    return copy.deepcopy(model, copies)


def freeze(model: Any, patterns: Sequence[str]) -> None:
    """Take parameters out of training. Raises UserError for a pattern that names none."""
    for pattern in patterns:
        chosen = _embeddings(model) if pattern == EMBEDDINGS else _matching(model, pattern)
        if not chosen:
            some = ", ".join(name for name, _ in list(model.named_parameters())[:3])
            raise UserError(
                f"training.backend.freeze names {pattern!r}, which is no parameter of the model; give {EMBEDDINGS!r} or a pattern "
                f"of names such as {some}"
            )
        for parameter in chosen:
            parameter.requires_grad_(False)


def _embeddings(model: Any) -> list[nn.Parameter]:
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    return [parameter for layer in layers if layer is not None for parameter in layer.parameters()]


def _matching(model: Any, pattern: str) -> list[nn.Parameter]:
    named = model.named_parameters(remove_duplicate=False)
    return [parameter for name, parameter in named if fnmatchcase(name, pattern)]


def _check_kind(model: Any, folder: Path) -> None:
    config_path = folder / "config.json"
    kind = json.loads(config_path.read_text()).get("model_type") if config_path.is_file() else None
    if kind != model.config.model_type:
        raise UserError(f"{folder} holds a model of type {kind!r}, this run has {model.config.model_type!r}")
