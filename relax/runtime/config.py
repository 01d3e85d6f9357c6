"""Configuration of runtimes. Loads without torch."""

from typing import Literal

from pydantic import Field

from relax.config.base import ComponentConfig


class LocalConfig(ComponentConfig):
    """Every role in this process."""

    type: Literal["local"] = "local"
    strict: bool = False
    """Copy and freeze every argument and result of a call, and deliver calls in a seeded order: for tests."""
    threads_per_role: int = Field(default=1, ge=1)
    """Intra-op threads of each compute thread."""
    pool_processes: int = Field(default=2, ge=1)
    """Processes for rewards and tools that run untrusted or heavy code; with two, one slow call does not hold up all others."""
    unsafe_pool_without_isolation: bool = False
    """Run such code without namespaces where the machine grants none: it can then reach the network and this user's processes."""
