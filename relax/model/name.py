"""Parameter names: what of a model is published, and how published tensors are put into another copy of it.

Called by training backends (`published_tensors`), engines (`bind_tensors`) and services (`copy_tensors`). Each storage has
one published name: tied names are left out and restored on binding. Non-persistent buffers (rotary frequencies) belong to a
model, not to a version.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from relax.core.error import TransportError
from relax.core.weight import TensorSpec
from relax.model.dtype import dtype_name

Slot = tuple[nn.Module, str]
"""A module and the attribute that holds a parameter or buffer."""


def published_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under sorted names, each storage once; live, detached views of the model's own."""
    return {name: _value(slots[0]).detach() for name, slots in sorted(_published_slots(model).items())}


def tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Shape and dtype of each tensor, under sorted names."""
    return {name: TensorSpec(tuple(tensors[name].shape), dtype_name(tensors[name].dtype)) for name in sorted(tensors)}


def bind_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make the model's parameters and persistent buffers *be* the given tensors, without copying; ties are restored.

    Bound parameters need no gradient: an engine shares them with the weight store and never writes to them.
    Raises TransportError when a name, shape, dtype or device does not fit; the model is then as it was.
    """
    published = _published_slots(model)
    _check_fit({name: _value(slots[0]) for name, slots in published.items()}, tensors)
    for name, slots in published.items():
        if isinstance(_value(slots[0]), nn.Parameter):
            # A parameter made here shares the tensor's version counter, so a write through the model is seen by the store.
            parameter = nn.Parameter(tensors[name], requires_grad=False)
            for module, attribute in slots:
                module._parameters[attribute] = parameter
        else:
            for module, attribute in slots:
                module._buffers[attribute] = tensors[name]


@torch.no_grad()
def copy_tensors(source: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copy published tensors into a model of its own; names that the model has not are left out (an emulated backend's)."""
    for name, tensor in published_tensors(model).items():
        if name in source:
            tensor.copy_(source[name])


def _check_fit(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    problems = [f"{name} is missing" for name in sorted(set(expected) - set(given))]
    problems += [f"{name} is not a tensor of the model" for name in sorted(set(given) - set(expected))]
    for name in sorted(set(expected) & set(given)):
        for word, want, have in (
            ("shape", tuple(expected[name].shape), tuple(given[name].shape)),
            ("dtype", expected[name].dtype, given[name].dtype),
            ("device", expected[name].device, given[name].device),
        ):
            if want != have:
                problems.append(f"{name} has {word} {have}, expected {want}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise TransportError(
            f"weights do not fit the model: {'; '.join(problems[:5])}{more};"
            " trainer and engine must load the same model.path, in the dtype the store publishes"
        )


def _published_slots(model: nn.Module) -> dict[str, list[Slot]]:
    """Published name -> every place that holds the tensor; the name is that of the first place in module order."""
    found: dict[object, tuple[str, list[Slot]]] = {}
    for name, slot in _slots(model):
        found.setdefault(_storage_key(_value(slot)), (name, []))[1].append(slot)
    return dict(found.values())


def _slots(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    for prefix, module in model.named_modules():
        held = {**module._parameters, **module._buffers}
        for attribute, value in held.items():
            if value is not None and attribute not in module._non_persistent_buffers_set:
                yield f"{prefix}.{attribute}" if prefix else attribute, (module, attribute)


def _value(slot: Slot) -> Tensor:
    module, attribute = slot
    held = module._parameters.get(attribute)
    value = held if held is not None else module._buffers[attribute]
    assert value is not None
    return value


def _storage_key(value: Tensor) -> object:
    """Equal for two names of one tensor. Parameters that merely share a storage (slices of a fused one) differ in place or shape."""
    if value.device.type == "meta" or value.numel() == 0:
        return id(value)
    return (value.device, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
