"""Configuration of the engines; loads without torch.

Read by the configuration tree through `relax.engines.table`, and by the engine that a node belongs to.
"""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, field_validator

from relax.config.base import ComponentConfig
from relax.config.secret import Secret


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


class SglangEngineConfig(ComponentConfig):
    """An SGLang server that runs already, on this machine or another. It must serve this run and nobody else."""

    type: Literal["sglang"] = "sglang"
    url: str
    """Where it listens: `http://host:port` or `https://host:port`."""
    folder: str = Field(min_length=1)
    """Where versions are written for it to load, each in place of the one before: a disk that this process and the server see."""
    folder_on_server: str | None = Field(default=None, min_length=1)
    """What the server calls that folder; None: the same."""
    api_key: Secret | None = None
    """The variable that holds the server's API key, as `env:NAME`; None: it asks for none."""
    slots: int = Field(default=128, ge=1)
    """Requests that are with the server at the same time."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion; None: what the model's positions allow. The server must allow as much."""
    request_s: PositiveFloat = 3600.0
    """Deadline of one completion."""
    call_s: PositiveFloat = 60.0
    """Deadline of every short call: abort, flush, probe."""
    load_s: PositiveFloat = 600.0
    """Deadline for the server to read a version."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            is_plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_plain = False
        if is_plain and "@" in parts.netloc:
            raise ValueError("holds credentials; write http(s)://host:port here, and the key's variable in api_key")
        if (
            not is_plain
            or parts.path.strip("/")
            or parts.query
            or parts.fragment
            or not url.isprintable()
            or " " in url
        ):
            raise ValueError("is no address of a server; write http://host:port or https://host:port")
        return url.rstrip("/")


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
