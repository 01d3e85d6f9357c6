"""The parts of a model that reads media: which of its parameters belong to vision, audio, projector and language model.

Called by `TorchBackend` and `trained`. Every parameter belongs to exactly one part: what no pattern of the family names is the
language model's.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from relax.core.error import UserError
from relax.model.family import Family
from relax.training.config import PartConfig

LANGUAGE = "language"
_FIRST = "projector"
"""Asked first: it lies within the encoders, whose patterns may hold it."""


def freeze_parts(model: Any, family: Family | None, parts: Mapping[str, PartConfig]) -> None:
    """Take the parts that are not trained out of training. Raises UserError for a part that the model has not."""
    owners = parameter_parts(model, family)
    known = sorted(set(owners.values()))
    for name, part in parts.items():
        if family is None:
            raise UserError(
                f"training.backend.parts names {name!r}, but the model reads text only and has no parts; leave it out"
            )
        if name not in known:
            raise UserError(
                f"training.backend.parts names {name!r}, which is no part of the model; it has {', '.join(known)}"
            )
        if not part.train:
            for parameter in [one for one, owner in owners.items() if owner == name]:
                parameter.requires_grad_(False)


def parameter_parts(model: Any, family: Family | None) -> dict[nn.Parameter, str]:
    """The part that each parameter belongs to; one that is tied to another belongs where its first name does."""
    patterns = {} if family is None else family.parts()
    order = sorted(patterns, key=lambda part: (part != _FIRST, part))
    owners: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters():
        found = (part for part in order if any(fnmatchcase(name, pattern) for pattern in patterns[part]))
        owners[parameter] = next(found, LANGUAGE)
    return owners


def set_rates(optimizer: torch.optim.Optimizer, rates: Mapping[nn.Parameter, float]) -> None:
    """Give parameters a learning rate of their own: each of the optimizer's groups is divided by rate. Call it before any step."""
    if not rates:
        return
    groups, optimizer.param_groups = list(optimizer.param_groups), []
    for group in groups:
        divided: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            divided.setdefault(rates.get(parameter, group["lr"]), []).append(parameter)
        for rate, parameters in divided.items():
            optimizer.add_param_group({**group, "params": parameters, "lr": rate})


def own_rates(
    owners: Mapping[nn.Parameter, str], trained: Iterable[nn.Parameter], parts: Mapping[str, PartConfig]
) -> dict[nn.Parameter, float]:
    """The learning rate of each trained parameter whose part has one of its own."""
    given = {name: part.lr for name, part in parts.items() if part.lr is not None}
    return {one: given[owners[one]] for one in trained if owners[one] in given}
