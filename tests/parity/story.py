"""What the tests of runs in hosts share: short runs, what must not depend on what went wrong in them, operations."""

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relax.config.tree import RunConfig
from relax.core.message import Json
from relax.services.control.client import ControlClient
from relax.services.directory import RunDirectory
from tests.e2e.tiny import open_ledger, run_root, tiny_config, train

RAY = {"type": "ray"}
END_S = 120.0
"""By then every run of this file has ended; they take seconds."""


def rl(steps: int) -> list[dict[str, Any]]:
    return [{"name": "rl", "steps": steps, "groups_per_step": 4, "algorithm": {"type": "grpo", "group_size": 4}}]


def outcome(config: RunConfig) -> tuple[Any, Any, Any]:
    """What must not depend on what went wrong, and what must be empty."""
    ledger = open_ledger(config)
    try:
        bounds = {stage.name: config.max_staleness_of(stage) for stage in config.stages}
        return sorted(ledger.trained_keys()), ledger.counts(), ledger.staleness_violations(bounds)
    finally:
        ledger.close()


async def undisturbed(directory: Path, **sections: Any) -> tuple[Any, Any, Any]:
    config = tiny_config(directory, **sections)
    await train(config)
    found = outcome(config)
    shutil.rmtree(run_root(config))
    assert found[2] == []
    return found


async def ended(run: Any) -> Any:
    async with asyncio.timeout(END_S):
        return await run


async def operate(config: RunConfig, path: str, body: Mapping[str, Json]) -> dict[str, Json]:
    """Ask the control API for an operation, as a person would, and wait for its end."""
    client = ControlClient(RunDirectory(run_root(config)))
    asked = await asyncio.to_thread(client.post, path, body)
    return await asyncio.to_thread(client.follow, asked, lambda line: None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(END_S):
        while not condition():  # noqa: ASYNC110 - what hosts do sets no event of the test's
            await asyncio.sleep(0.02)
