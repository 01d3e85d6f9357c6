"""Evaluations that wait for their process hold their versions; and a connection that ends late is nobody's end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
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


def desk(
    catalog: CatalogService, evaluated: Callable[[EvaluationResult], Awaitable[None]] | None = None
) -> RemoteEvaluation:
    return RemoteEvaluation(
        catalog, Hooks(StepHooks(nothing, nothing, nothing, nothing), lambda: 1, evaluated or nothing), Desk()
    )


async def nothing(*args: Any) -> None:
    pass


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


async def test_a_version_is_held_until_its_evaluation_is_on_the_disk(catalog: CatalogService) -> None:
    """Or, if nobody can say whether it is, until the connection of who reported it was lost."""
    written = asyncio.Event()
    evaluation = desk(catalog, lambda result: written.wait())  # type: ignore[arg-type,return-value]
    for number in (0, 1):
        written.clear()
        await catalog.announce(Entry(Version(0, number + 1), "digest", 1))
        await evaluation.request(Version(0, number + 1), number + 1)
        reporting = asyncio.create_task(evaluation.report(Version(0, number + 1), EvaluationResult(1, {}, []), 4))
        await asyncio.sleep(0)
        await catalog.announce(Entry(Version(0, number + 2), "digest", 1))
        assert Version(0, number + 1) in await catalog.versions()
        written.set() if number == 0 else reporting.cancel()
        await asyncio.wait({reporting})
        await evaluation.idle()
        assert await catalog.versions() == (Version(0, number + 2),)


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
