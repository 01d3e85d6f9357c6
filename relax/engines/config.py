"""Configuration of the engines; loads without torch.

Read by the configuration tree through `relax.engines.table`, and by the engine that a node belongs to.
"""

from typing import Literal

from pydantic import Field

from relax.config.base import ComponentConfig


class TorchEngineConfig(ComponentConfig):
    """The embedded engine."""

    type: Literal["torch"] = "torch"
    slots: int = Field(default=128, ge=1)
    """Requests that decode at the same time."""
    kv_tokens: int | None = Field(default=None, ge=16)
    """Bound on the tokens whose keys and values are held, prefixes included; None: slots x context, allocated as needed."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion; None: what the model's positions and `kv_tokens` allow."""
    burst: int = Field(default=32, ge=1)
    """Decode steps per call on the compute thread. Requests join, leave and are delivered at every step all the same."""
    prefill_tokens: int = Field(default=4096, ge=1)
    """Padded tokens of one prefill forward; a longer prompt is prefilled alone."""
    prefill_encoder_tokens: int = Field(default=16384, ge=1)
    """Encoder tokens (patches, frames of sound) of the media that one prefill encodes; a larger medium is encoded alone."""
    kept_encoder_tokens: int = Field(default=65536, ge=0)
    """Encoder tokens of the media whose encoder outputs are kept for later turns and siblings; 0 keeps none."""


class EmulatedEngineConfig(ComponentConfig):
    """An engine without a model: tokens from a seeded stream, durations on the injected clock."""

    type: Literal["emulated"] = "emulated"
    slots: int = Field(default=64, ge=1)
    """Requests that run at the same time; the others wait."""
    vocabulary_size: int = Field(default=100, ge=1)
    """Tokens are drawn from 0 to this, exclusive."""
    max_context_tokens: int = Field(default=4096, ge=2)
    """Longest prompt plus completion."""
    length: Literal["budget", "uniform"] = "budget"
    """Tokens per request: the whole budget (ends `length`), or uniform in 1..budget by the request's seed (ends `stop`)."""
    duration: Literal["constant", "lognormal"] = "lognormal"
    """Distribution of the running time of a request."""
    mean_s: float = Field(default=1.0, ge=0)
    """Mean running time of a request, whatever its length."""
    sigma: float = Field(default=1.0, ge=0)
    """Of the logarithm of the duration, for `lognormal`."""
    load_s: float = Field(default=0.1, ge=0)
    """Time that loading a version takes."""
    failure_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of requests that raise EngineError half way."""
    load_failure_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of loads that raise; the old version goes on serving."""
