"""Low-rank adapters beside a frozen model (Hu et al. 2021), by `peft`: put in, merged for publication, written and read.

Called by training backends and by `load`, which turns a folder that holds an adapter into a plain model. Invariant: what
leaves this file as a version has the names and shapes of the model without adapter, so engines need not know of it.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from relax.core.error import UserError
from relax.model.name import published_tensors
from relax.model.source import ModelOrigin

CONFIG_FILE, WEIGHTS_FILE, BASE_FILE = "adapter_config.json", "adapter_model.safetensors", "base.json"
ALL_LINEAR = "all-linear"
"""The target that means every linear layer but the output layer."""
_ADAPTER = "default"
_PREFIX = "base_model.model."
"""Before every module name in an adapter file of peft."""


def add_adapter(model: Any, rank: int, alpha: float, targets: Sequence[str], seed: int) -> Any:
    """A model that shares every tensor with `model` and has an adapter of zero effect beside the linear layers in `targets`.

    Only the adapter needs gradients; `model` itself keeps its modules. Equal seeds give equal adapters, and the global random
    state stays as it was. Raises UserError when peft is missing or a target is not there.
    """
    peft = import_peft()
    names = _chosen_layers(model, targets)
    adapted = share_tensors(model)
    # A suffix that peft matches must not match more than was chosen, so layers are named in full.
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, lora_dropout=0.0, bias="none")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, adapted, adapter_name=_ADAPTER)
    return adapted.train(False)


def import_peft() -> Any:
    """The `peft` package. Raises UserError when it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise UserError(
            "LoRA needs the package 'peft', which is not installed; run: pip install 'relax[lora]'"
        ) from error
    return peft


def share_tensors(model: Any) -> Any:
    """A copy of the modules of `model` around the same memory; its parameters need no gradient, those of `model` stay as they are."""
    parameters = {id(one): nn.Parameter(one.detach(), requires_grad=False) for one in model.parameters()}
    return copy.deepcopy(model, {**parameters, **{id(buffer): buffer for buffer in model.buffers()}})


@torch.no_grad()
def merged_tensors(adapted: Any) -> dict[str, Tensor]:
    """What is published: weights plus B A alpha / rank under the base model's sorted names; new tensors where layers are adapted."""
    layers = _adapted_layers(adapted)
    merged: dict[str, Tensor] = {}
    for name, tensor in published_tensors(adapted).items():
        if not _is_adapter(name):
            layer = layers.get(name.removesuffix(".base_layer.weight")) if name.endswith(".base_layer.weight") else None
            delta = None if layer is None else layer.get_delta_weight(_ADAPTER)
            merged[name.replace(".base_layer.", ".")] = tensor if delta is None else tensor + delta
    return {name: merged[name] for name in sorted(merged)}


def adapted_names(adapted: Any) -> list[str]:
    """The published names that the adapter changes."""
    return sorted(f"{name}.weight" for name in _adapted_layers(adapted))


def adapter_tensors(adapted: Any) -> dict[str, Tensor]:
    """The adapter's own tensors, live, under the names of peft's file format."""
    suffix = f".{_ADAPTER}.weight"
    named = adapted.named_parameters()
    return {
        f"{_PREFIX}{name.removesuffix(suffix)}.weight": value.detach() for name, value in named if _is_adapter(name)
    }


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names and bytes: tells one base model from another."""
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def base_fingerprint(adapted: Any) -> str:
    """The fingerprint of what an adapter stands beside."""
    tensors = published_tensors(adapted)
    return fingerprint({n.replace(".base_layer.", "."): t for n, t in tensors.items() if not _is_adapter(n)})


def adapter_config(rank: int, alpha: float, targets: Sequence[str], base: ModelOrigin) -> dict[str, Any]:
    """peft's description of the adapter, as JSON: other tools load it by this."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": ALL_LINEAR if list(targets) == [ALL_LINEAR] else list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
    }


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], base: ModelOrigin, base_digest: str
) -> None:
    """The adapter's files, and what it stands beside. Raises OSError when the disk does not take them."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_file(dict(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:  # how a full disk looks from there
        raise OSError(f"cannot write the adapter into {folder}: {error}") from error
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1))
    (folder / BASE_FILE).write_text(json.dumps({**asdict(base), "digest": base_digest}, indent=1))


def holds_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter instead of a whole model."""
    return (folder / CONFIG_FILE).is_file()


def read_base(folder: Path) -> tuple[ModelOrigin, str]:
    """What the adapter in `folder` stands beside, and its fingerprint. Raises UserError when that is not told."""
    try:
        document = json.loads((folder / BASE_FILE).read_bytes())
        digest = document.pop("digest")
        return ModelOrigin(**document), digest
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder} holds an adapter, but its {BASE_FILE} does not say beside which model ({type(error).__name__}); only "
            "adapters that relax wrote can be loaded"
        ) from error


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter file. Raises UserError when it is missing or damaged."""
    try:
        tensors: dict[str, Tensor] = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} holds no usable adapter: {error}; use another checkpoint") from error
    return tensors


@torch.no_grad()
def copy_adapter(adapted: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Copy read tensors into the adapter. Raises UserError, with nothing changed, when names or shapes differ."""
    own = adapter_tensors(adapted)
    problems = [f"{name} is only in one of them" for name in sorted(set(own) ^ set(tensors))]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, expected {tuple(own[name].shape)}"
        for name in sorted(set(own) & set(tensors))
        if own[name].shape != tensors[name].shape
    ]
    if problems:
        raise UserError(f"the adapter in {folder} has another rank or other targets: {'; '.join(problems[:3])}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


@torch.no_grad()
def merge_adapter(model: Any, folder: Path) -> Any:
    """`model` with the adapter in `folder` merged into its weights. Raises UserError when they do not belong together."""
    found = fingerprint(published_tensors(model))
    origin, digest = read_base(folder)
    if found != digest:
        raise UserError(f"the adapter in {folder} was trained beside {origin.path!r}, whose weights have changed since")
    config = json.loads((folder / CONFIG_FILE).read_bytes())
    chosen = config["target_modules"]
    targets = [chosen] if isinstance(chosen, str) else chosen
    adapted = add_adapter(model, config["r"], config["lora_alpha"], targets, seed=0)
    copy_adapter(adapted, read_adapter(folder), folder)
    own = published_tensors(model)
    for name, tensor in merged_tensors(adapted).items():
        own[name].copy_(tensor)
    return model


def _chosen_layers(model: Any, targets: Sequence[str]) -> list[str]:
    """Full names of the linear layers, of the language model alone, whose name ends with one of `targets`."""
    head, language = model.get_output_embeddings(), {id(module) for module in model.get_decoder().modules()}
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and id(module) in language
    ]
    if list(targets) == [ALL_LINEAR]:
        return linear
    for target in targets:
        if not any(_ends_with(name, target) for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise UserError(
                f"lora target {target!r} is no linear layer of the language model; it has {known}, or {ALL_LINEAR!r}"
            )
    return [name for name in linear if any(_ends_with(name, target) for target in targets)]


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _adapted_layers(adapted: Any) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in adapted.named_modules() if isinstance(module, LoraLayer)}


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
