"""How a version reads for an engine with other names: rules that say which tensors are joined, split, stacked or tied there.

Called by adapters of engines that do not run relax's own modules. A rule is data and has a way back, so that what such an engine holds can
be compared with what was published, by digest (C1). Names hold places in braces: `layers.{layer}.q_proj.weight`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from relax.core.error import TransportError
from relax.core.weight import TensorSpec

Holes: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Several tensors of ours are one of theirs, one behind the other along `dim`: a fused qkv or gate_up projection."""

    ours: tuple[str, ...]
    theirs: str
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Stack:
    """One tensor of ours for each number in `{place}` is a slice of one of theirs, along a new first dimension: experts."""

    ours: str
    theirs: str
    place: str = "expert"


@dataclass(frozen=True, slots=True)
class Unstack:
    """The other way round: one tensor of ours holds what they keep by number."""

    ours: str
    theirs: str
    place: str = "expert"


@dataclass(frozen=True, slots=True)
class Rename:
    """The same tensor under another name."""

    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class Tie:
    """A second name of theirs for a tensor that has one already: a head that is the embedding."""

    theirs: str
    of: str


Rule: TypeAlias = Join | Stack | Unstack | Rename | Tie


@dataclass(frozen=True, slots=True)
class NameMap:
    """What no rule names keeps its name. Rules are tried in order; a name belongs to the first that fits."""

    rules: tuple[Rule, ...] = ()

    def to_engine(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A published set under the engine's names. Raises TransportError when a part of a joined tensor is missing."""
        found: dict[str, Tensor] = {}
        for rule, holes, names in self._groups(sorted(tensors)):
            for name, tensor in _forward(rule, holes, [tensors[name] for name in names]):
                if name in found:
                    raise TransportError(f"two tensors became {name!r} for the engine; its name map is wrong")
                found[name] = tensor
        for rule in self.rules:
            if isinstance(rule, Tie):
                if rule.of not in found:
                    raise TransportError(f"{rule.theirs!r} is tied to {rule.of!r}, which was not published")
                found[rule.theirs] = found[rule.of]
        return dict(sorted(found.items()))

    def to_trainer(self, tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """What an engine holds under the published names, whose shapes `specs` say; for comparing digests.

        Raises TransportError for a tensor that it has not, or that has another shape there, and for a tie that was broken.
        """
        found: dict[str, Tensor] = {}
        for rule, holes, names in self._groups(sorted(specs)):
            parts = _backward(rule, holes, [specs[name].shape for name in names], tensors)
            found.update(zip(names, parts, strict=True))
        for rule in self.rules:
            if isinstance(rule, Tie) and not torch.equal(_named(tensors, rule.theirs), _named(tensors, rule.of)):
                raise TransportError(
                    f"the engine's {rule.theirs!r} is not its {rule.of!r} any more, to which it is tied"
                )
        return dict(sorted(found.items()))

    def _groups(self, names: Sequence[str]) -> Iterator[tuple[Rule, Holes, list[str]]]:
        """Each rule with the published names that it takes together, in its order; what is left keeps its name."""
        left = dict.fromkeys(names)
        for rule in self.rules:
            if isinstance(rule, Tie):
                continue
            groups: dict[Holes, dict[int, str]] = {}
            for name in list(left):
                match = _place_of(rule, name)
                if match is not None:
                    holes, index = match
                    groups.setdefault(holes, {})[index] = name
                    del left[name]
            for holes, parts in groups.items():
                expected = len(rule.ours) if isinstance(rule, Join) else max(parts) + 1
                missing = sorted(set(range(expected)) - parts.keys())
                if missing:
                    raise TransportError(
                        f"{rule.theirs!r} needs {expected} published tensors at {dict(holes)}, number {missing[0]} is missing"
                    )
                yield rule, holes, [parts[index] for index in range(expected)]
        for name in left:
            yield Rename(name, name), (), [name]


def _place_of(rule: Rule, name: str) -> tuple[Holes, int] | None:
    """Where a published name stands in a rule: the holes that its group shares, and its number in the group."""
    patterns = rule.ours if isinstance(rule, Join) else () if isinstance(rule, Tie) else (rule.ours,)
    for index, pattern in enumerate(patterns):
        match = _pattern(pattern).fullmatch(name)
        if match is not None:
            holes = match.groupdict()
            if isinstance(rule, Stack):
                index = int(holes.pop(rule.place))
            return tuple(sorted(holes.items())), index
    return None


def _forward(rule: Rule, holes: Holes, parts: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    values = dict(holes)
    match rule:
        case Join(theirs=theirs, dim=dim):
            yield theirs.format(**values), torch.cat(parts, dim)
        case Stack(theirs=theirs):
            yield theirs.format(**values), torch.stack(parts)
        case Unstack(theirs=theirs, place=place):
            for index, part in enumerate(parts[0]):
                yield theirs.format(**values, **{place: index}), part
        case Rename(theirs=theirs):
            yield theirs.format(**values), parts[0]


def _backward(
    rule: Rule, holes: Holes, shapes: list[tuple[int, ...]], tensors: Mapping[str, Tensor]
) -> Sequence[Tensor]:
    values = dict(holes)
    match rule:
        case Join(theirs=theirs, dim=dim):
            whole = _named(tensors, theirs.format(**values))
            parts: Sequence[Tensor] = torch.split(whole, [shape[dim] for shape in shapes], dim)
        case Stack(theirs=theirs):
            parts = _named(tensors, theirs.format(**values)).unbind()
        case Unstack(theirs=theirs, place=place):
            names = [theirs.format(**values, **{place: index}) for index in range(shapes[0][0])]
            parts = [torch.stack([_named(tensors, name) for name in names])]
        case Rename(theirs=theirs):
            parts = [_named(tensors, theirs.format(**values))]
        case _:
            parts = []
    found = [tuple(part.shape) for part in parts]
    if found != [tuple(shape) for shape in shapes]:
        raise TransportError(f"the engine's tensors of {rule} have shapes {found} at {values}, published are {shapes}")
    return parts


def _named(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise TransportError(f"the engine has no tensor {name!r}")
    return tensors[name]


@cache
def _pattern(text: str) -> re.Pattern[str]:
    """`{layer}` stands for one part of a name, between dots."""
    pieces = re.split(r"\{(\w+)\}", text)
    return re.compile(
        "".join(re.escape(one) if index % 2 == 0 else f"(?P<{one}>[^.]+)" for index, one in enumerate(pieces))
    )


FUSED = NameMap(
    (
        *(
            Join(
                tuple(f"model.layers.{{layer}}.self_attn.{name}_proj.{kind}" for name in "qkv"),
                f"model.layers.{{layer}}.self_attn.qkv_proj.{kind}",
            )
            for kind in ("weight", "bias")
        ),
        Join(
            tuple(f"model.layers.{{layer}}.mlp.{name}_proj.weight" for name in ("gate", "up")),
            "model.layers.{layer}.mlp.gate_up_proj.weight",
        ),
    )
)
"""Decoders of the Llama and Qwen kind as serving engines hold them."""
