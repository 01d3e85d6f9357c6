"""A published weight version as it crosses from trainer to engine (WS1, WS3, WS4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from relax.core.completion import Floats, Ints
from relax.core.version import Version

Tensor: TypeAlias = Any
"""A torch.Tensor; core does not import torch."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype (`float32`, `bfloat16`, ...) of one tensor of a version."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt whose logprobs prove a load (WS4): `token_ids` int32[T], the trainer's `logprobs` float32[T] (position 0 is 0).

    `tolerance` is the largest accepted absolute difference; `temperature` is that of the logprobs (TK5).
    """

    token_ids: Ints
    logprobs: Floats
    tolerance: float = 1e-4
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that describes a version but its bytes. `alias_of` names the version whose tensors it shares (ST7)."""

    version: Version
    specs: Mapping[str, TensorSpec]
    digest: str
    probe: Probe | None = None
    alias_of: Version | None = None


@dataclass(frozen=True, slots=True)
class WeightSet:
    """A version ready to load. The tensors are shared and must not be written to."""

    manifest: Manifest
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an engine did in `load`: the logprobs of the probe after the swap (None without a probe), and two times (WS6)."""

    probe_logprobs: Floats | None
    swap_pause_s: float
    prefill_again_s: float = 0.0
    prefill_again_tokens: int = 0
