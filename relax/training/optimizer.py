"""Optimizers: functions from a configuration node and a model's parameters to a torch optimizer.

Built by `TorchBackend.begin`. Parameters keep their order, so state is matched by name when it is saved and loaded.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from relax.training.config import AdamWConfig, SgdConfig


def build_adamw(config: AdamWConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay; fused, which does the same arithmetic in one pass over the weights."""
    return torch.optim.AdamW(
        decay_groups(parameters, config.weight_decay), lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def build_sgd(config: SgdConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Stochastic gradient descent; its weight decay is the L2 term of the gradient."""
    return torch.optim.SGD(decay_groups(parameters, config.weight_decay), lr=config.lr, momentum=config.momentum)


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, which decay, and vectors (norms, biases), which do not. Empty groups are left out."""
    listed = list(parameters)
    groups = [
        {"params": [one for one in listed if one.ndim >= 2], "weight_decay": weight_decay},
        {"params": [one for one in listed if one.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
