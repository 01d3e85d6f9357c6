"""Evaluations that wait for their process hold their versions; and a connection that ends late is nobody's end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax.core.version import Version
from relax.runtime.wire_client import WireClient
from relax.runtime.wire_server import WireServer
from relax.services.publisher import StepHooks
from relax.services.remote.controller import ControllerProcess
from relax.services.remote.desk import Desk
from relax.services.remote.site import RemoteEvaluation
from relax.services.roles.evaluation import EvaluationResult
from relax.services.site import Hooks
from relax.weights.catalog import Catalog, Entry
from relax.weights.service import CatalogService


@pytest.fixture
async def catalog() -> CatalogService:
    """One version, v0; the newest alone is kept."""
    service = CatalogService(Catalog(1))
    await service.announce(Entry(Version(0, 0), "digest", 1))
    return service


def desk(catalog: CatalogService) -> RemoteEvaluation:
    async def nothing(*args: Any) -> None:
        pass

    return RemoteEvaluation(
        catalog, Hooks(StepHooks(nothing, nothing, nothing), lambda: 1, lambda result: None), Desk()
    )


async def test_rule_ws7_a_version_asked_for_twice_is_held_until_both_are_reported(catalog: CatalogService) -> None:
    evaluation = desk(catalog)
    await evaluation.request(Version(0, 0), 0)
    await evaluation.request(Version(0, 0), 0)
    await evaluation.report(Version(0, 0), EvaluationResult(0, {}, []), 4)
    await catalog.announce(Entry(Version(0, 1), "digest", 1))
    request, _ = await evaluation.next()
    await catalog.entry(request.version)  # raises when it is gone
    await evaluation.report(Version(0, 0), EvaluationResult(0, {}, []), 8)
    assert await catalog.versions() == (Version(0, 1),)


async def test_rule_ws7_what_a_lost_attempt_held_is_not_held_for_ever(catalog: CatalogService) -> None:
    await desk(catalog).request(Version(0, 0), 0)
    await desk(catalog).settle()
    await catalog.announce(Entry(Version(1, 0), "digest", 1))
    assert await catalog.versions() == (Version(1, 0),)


@pytest.fixture
async def gone(tmp_path: Path) -> AsyncIterator[tuple[str, asyncio.Queue[str]]]:
    """The address of a controller, and the hosts that are gone to its site."""
    found: asyncio.Queue[str] = asyncio.Queue()
    process = object.__new__(ControllerProcess)
    process._site = SimpleNamespace(gone=found.put_nowait)  # type: ignore[assignment]
    process._server = WireServer({}, on_gone=process._gone)
    yield await process._server.start(f"unix:{tmp_path}/control.sock"), found
    await process._server.close()


async def test_rule_rr5_a_connection_that_ends_after_the_next_one_began_takes_nothing_away(
    gone: tuple[str, asyncio.Queue[str]],
) -> None:
    address, hosts = gone
    old, new, other = (WireClient(address, name) for name in ("engine-0", "engine-0", "engine-1"))
    for client in (old, new, other):
        assert await client.ping(5.0)
    await old.close()
    await other.close()
    assert await hosts.get() == "engine-1"
    await new.close()
    assert await hosts.get() == "engine-0"
    assert hosts.empty()
