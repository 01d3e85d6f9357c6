"""A router that follows the fleet registry: nothing is lost, nothing goes where it must not (RR8, WS7, ST2)."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relax.core.completion import Completion, GenerateInput, Sampling, Session, frozen
from relax.core.error import EngineError, LateError
from relax.core.version import Version
from relax.engines.router import Router
from relax.runtime.wire_client import WireClient
from relax.runtime.wire_server import WireServer
from relax.services.fleet_registry import EngineEntry, FleetRegistry, FleetView
from relax.services.fleet_service import FleetService
from relax.services.router_follower import RouterFollower
from tests.engines.clock import StepClock
from tests.engines.setting import prompt, session

NAMES = ("a", "b", "c")


@dataclass(eq=False)
class Engine:
    """One process: requests wait until the test ends them. `closed` to new ones once the follower has seen it drain."""

    name: str
    incarnation: int
    running: list["asyncio.Future[None]"] = field(default_factory=list)
    must_get_nothing: bool = False
    violations: list[str] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        if self.must_get_nothing:
            self.violations.append(f"{self.name}.{self.incarnation} got a request although it drains or is gone")
        wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running.append(wait)
        self.began.set()
        try:
            await wait
        finally:
            self.running.remove(wait)
        count = sampling.max_tokens
        zeros = np.zeros(count, np.float32)
        token_ids = frozen(np.arange(count, dtype=np.int32))
        return Completion(
            token_ids, frozen(zeros), frozen(zeros.astype(np.int32)), frozen(zeros.astype(bool)), "length"
        )


class World:
    """A registry in its service, a router and its follower, and requests; every event settles before the next."""

    def __init__(self) -> None:
        self.service = FleetService(FleetRegistry())
        self.router = Router(StepClock(), max_resends=10_000)
        self.engines: dict[tuple[str, int], list[Engine]] = {}
        self.clock = StepClock()
        self.follower = RouterFollower(self.router, self, self._connect, self._disconnect, self.clock.sleep)
        self.requests: list[asyncio.Task[Completion]] = []
        self.starts = 0
        self.left: list[str] = []
        self.disconnected: list[Engine] = []

    def _connect(self, entry: EngineEntry) -> Engine:
        engine = Engine(entry.name, entry.incarnation)
        self.engines.setdefault((entry.name, entry.incarnation), []).append(engine)
        return engine

    async def _disconnect(self, entry: EngineEntry, engine: object) -> None:
        assert isinstance(engine, Engine)
        assert not engine.running
        self.disconnected.append(engine)

    # What the follower calls: the service of now, which a restart of the controller replaces.
    async def changes(self, after: int | None, timeout_s: float = 30.0) -> FleetView:
        while True:
            service = self.service
            waiting = asyncio.ensure_future(service.changes(after, timeout_s))
            try:
                await asyncio.wait({waiting, self.gone()}, return_when=asyncio.FIRST_COMPLETED)
                if service is self.service:
                    return await waiting
            finally:
                waiting.cancel()

    def gone(self) -> "asyncio.Future[None]":
        if not hasattr(self, "_gone") or self._gone.done():
            self._gone = asyncio.get_running_loop().create_future()
        return self._gone

    async def leave(self, name: str, incarnation: int, drain: int) -> bool:
        running = sum(len(one.running) for one in self.engines.get((name, incarnation), []))
        assert running == 0, f"{name} is said to have drained with {running} requests"
        self.left.append(name)
        return await self.service.leave(name, incarnation, drain)

    def restart_controller(self) -> None:
        self.starts += 1
        self.service = FleetService(FleetRegistry(self.starts << 32))
        if not self.gone().done():
            self.gone().set_result(None)

    def ask(self, base: int) -> None:
        work = self.router.generate(GenerateInput(prompt(3)), Sampling(max_tokens=4), session(base=base))
        self.requests.append(asyncio.ensure_future(work))

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)
        for entry in self.service.registry:
            for (name, incarnation), engines in self.engines.items():
                if name == entry.name and (incarnation < entry.incarnation or entry.state in ("draining", "gone")):
                    for engine in engines:
                        engine.must_get_nothing = True
        for engines in self.engines.values():
            for engine in engines[:-1]:
                engine.must_get_nothing = True  # attached anew since
            if engines and all(self._is_used(one) for one in engines[-1:]):
                engines[-1].must_get_nothing = False

    def _is_used(self, engine: Engine) -> bool:
        entry = self.service.registry.find(engine.name)
        return entry is not None and entry.incarnation == engine.incarnation and entry.state not in ("draining", "gone")

    def check(self) -> None:
        for engines in self.engines.values():
            for engine in engines:
                assert engine.violations == []
        known = {one.name for one in self.service.registry}
        if known >= {name for name, _ in self.engines}:  # else some are of an earlier controller
            assert self.router.highest_live() == self.service.live()


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "join",
                "again",
                "live",
                "fail",
                "drain",
                "undrain",
                "lose",
                "doubt",
                "ask",
                "ask",
                "end",
                "end",
                "restart",
            ]
        ),
        st.sampled_from(NAMES),
        st.integers(0, 7),
    ),
    max_size=60,
)


async def play(world: World, events: list[tuple[str, str, int]]) -> None:
    incarnations = dict.fromkeys(NAMES, 0)
    version = 0
    for verb, name, number in events:
        registry, incarnation = world.service.registry, incarnations[name]
        entry = registry.find(name)
        match verb:
            case "join":
                incarnations[name] += 1
                await world.service.join(name, incarnations[name], f"unix:/{name}", 2)
            case "again" if incarnation:
                with suppress(LateError):
                    live = None if number % 2 else Version(0, version)
                    await world.service.join(name, incarnation, f"unix:/{name}", 2, version=live)
            case "live":
                version += number % 2
                await world.service.set_live(name, incarnation, Version(0, version))
            case "fail":
                await world.service.set_failed(name, incarnation, "a fault")
            case "drain" if entry is not None and entry.state != "gone":
                registry.drain(name)
                world.service._tell()
            case "undrain" if entry is not None and entry.drain is not None:
                world.service._told(registry.undrain(name, entry.drain))
            case "lose":
                await world.service.lose(name, incarnation, "killed")
                for engine in world.engines.get((name, incarnation), []):
                    for wait in engine.running:
                        if not wait.done():  # it was lost before
                            wait.set_exception(EngineError("its process is gone"))
            case "doubt":
                world.follower.doubt(name, incarnation)
                await world.clock.advance(60)  # and a while later it is trusted again
            case "ask":
                world.ask(min(version, number))
            case "end":
                running = [wait for engines in world.engines.values() for engine in engines for wait in engine.running]
                if running:
                    wait = running[number % len(running)]
                    if not wait.done():
                        wait.set_result(None)
            case "restart":
                world.restart_controller()
        if number != 7:  # now and then two events come before the follower looks
            await world.settle()
            world.check()


async def finish(world: World) -> None:
    """One engine that serves all, and every request ends: nothing was lost, and every drain is over."""
    await world.service.join("last", 1, "unix:/last", 100, version=Version(0, 1000))
    for _ in range(200):
        await world.settle()
        world.check()
        for engines in world.engines.values():
            for engine in engines:
                for wait in engine.running:
                    if not wait.done():
                        wait.set_result(None)
        if all(request.done() for request in world.requests):
            break
    await world.settle()
    answers = [await request for request in world.requests]
    assert [len(answer) for answer in answers] == [4] * len(answers)
    assert [one.name for one in world.service.registry if one.state == "draining"] == []


@settings(max_examples=100, deadline=None)
@given(events=EVENTS)
@example(events=[("join", "a", 0), ("again", "a", 0), ("ask", "a", 0), ("lose", "a", 7), ("lose", "a", 0)])
def test_rule_rr8_whatever_comes_goes_and_drains_nothing_is_lost(events: list[tuple[str, str, int]]) -> None:
    async def run() -> None:
        world = World()
        following = asyncio.create_task(world.follower.run())
        try:
            await play(world, events)
            await finish(world)
            assert not following.done()
        finally:
            following.cancel()
            for request in world.requests:
                request.cancel()
            await asyncio.gather(*world.requests, following, return_exceptions=True)

    asyncio.run(run())


@pytest.fixture
async def world():  # type: ignore[no-untyped-def]
    made = World()
    following = asyncio.create_task(made.follower.run())
    yield made
    following.cancel()
    for request in made.requests:
        request.cancel()
    await asyncio.gather(*made.requests, following, return_exceptions=True)


async def test_rule_rr8_drained_is_said_when_the_last_request_has_ended(world: World) -> None:
    await world.service.join("a", 1, "unix:/a", 2, version=Version(0, 1))
    await world.settle()
    world.ask(0)
    world.ask(0)
    world.ask(0)  # waits: the engine is full
    await world.settle()
    draining = asyncio.create_task(world.service.drain("a", "scale to 1", 60))
    await world.settle()
    (engine,) = world.engines["a", 1]
    for left in (1, 0):
        assert world.left == []
        assert not draining.done()
        engine.running[0].set_result(None)
        await world.settle()
        assert len(engine.running) == left  # and the one that waited is not sent there
    assert (await draining).state == "gone"
    assert world.left == ["a"]
    assert world.disconnected == [engine]
    await world.service.join("b", 1, "unix:/b", 2, version=Version(0, 1))
    await world.settle()
    assert len(world.engines["b", 1][0].running) == 1


async def test_a_drain_that_is_cancelled_lets_the_engine_work_on(world: World) -> None:
    await world.service.join("a", 1, "unix:/a", 2, version=Version(0, 1))
    await world.settle()
    world.ask(0)
    await world.settle()
    draining = asyncio.create_task(world.service.drain("a", "", 60))
    await world.settle()
    assert world.router.highest_live() is None
    draining.cancel()
    await world.settle()
    assert draining.cancelled()
    assert world.router.highest_live() == 1
    # A second drain waits for the requests from before the first one, too.
    again = asyncio.create_task(world.service.drain("a", "", 60))
    await world.settle()
    assert world.left == []
    world.engines["a", 1][0].running[0].set_result(None)
    await world.settle()
    assert (await again).state == "gone"


async def test_a_drain_that_somebody_else_takes_back_is_an_error(world: World) -> None:
    await world.service.join("a", 1, "unix:/a", 2, version=Version(0, 1))
    await world.settle()
    world.ask(0)
    await world.settle()
    first, second = (asyncio.create_task(world.service.drain("a", "", 60)) for _ in range(2))
    await world.settle()
    first.cancel()
    with pytest.raises(EngineError, match="drain of engine a was taken back: it is live"):
        await second


async def test_rule_rr7_a_drain_that_takes_too_long_says_so_and_goes_on(world: World) -> None:
    await world.service.join("a", 1, "unix:/a", 2, version=Version(0, 1))
    await world.settle()
    world.ask(0)
    await world.settle()
    with pytest.raises(EngineError, match=r"engine a has not ended its requests within 0\.01 s; .* goes on draining"):
        await world.service.drain("a", "", 0.01)
    assert world.service.registry.find("a").state == "draining"  # type: ignore[union-attr]
    world.engines["a", 1][0].running[0].set_result(None)
    await world.settle()
    assert world.service.registry.find("a").state == "gone"  # type: ignore[union-attr]


async def test_a_controller_that_restarts_disturbs_no_engine(world: World) -> None:
    for name in ("a", "b"):
        await world.service.join(name, 1, f"unix:/{name}", 2, version=Version(0, 3))
    await world.settle()
    world.ask(3)
    await world.settle()
    world.restart_controller()
    await world.settle()
    assert world.router.highest_live() == 3  # they have not reported yet, and serve
    await world.service.join("a", 1, "unix:/a", 2, version=Version(0, 3))
    await world.service.lose("b", 1, "killed")
    await world.settle()
    assert len(world.engines["a", 1]) == 1
    assert sorted(world.follower._attached) == ["a"]


async def test_rule_rr7_without_news_a_follower_gets_an_answer_all_the_same() -> None:
    service = FleetService()
    view = await service.changes(None)
    assert await service.changes(view.revision, timeout_s=0.001) == view


async def test_waiting_until_an_engine_serves(world: World) -> None:
    with pytest.raises(EngineError, match=r"takes no requests after 0\.01 s: it has not reported yet"):
        await world.service.served("a", 0.01)
    waiting = asyncio.create_task(world.service.served("a", 60))
    await world.service.join("a", 1, "unix:/a", 2)
    await world.settle()
    assert not waiting.done()
    await world.service.set_live("a", 1, Version(0, 2))
    assert (await waiting).version == Version(0, 2)
    await world.service.lose("a", 1, "killed by a test")
    again = asyncio.create_task(world.service.served("a", 60))  # the former one does not count
    await world.settle()
    assert not again.done()
    await world.service.join("a", 2, "unix:/a", 2)
    await world.service.lose("a", 2, "killed again")
    with pytest.raises(EngineError, match=r"it is gone \(killed again\)"):
        await again


async def test_rule_rr1_requests_wait_for_a_dead_engine_instead_of_being_spent_on_it(world: World) -> None:
    await world.service.join("a", 1, "unix:/a", 2, version=Version(0, 1))
    await world.settle()
    (engine,) = world.engines["a", 1]
    world.router._max_resends = 1
    world.ask(0)
    await world.settle()
    world.follower.doubt("a", 1)
    engine.running[0].set_exception(EngineError("its process was lost"))
    await world.settle()
    assert not world.requests[0].done()
    assert world.router.highest_live() is None
    await world.service.join("b", 1, "unix:/b", 2)  # no news of a
    await world.settle()
    assert world.router.highest_live() is None
    await world.service.lose("a", 1, "killed")
    await world.service.join("a", 2, "unix:/a", 2)
    await world.settle()
    await world.clock.advance(60)  # what was doubted is not there any more
    assert world.router.highest_live() is None
    await world.service.set_live("a", 2, Version(0, 1))
    await world.settle()
    world.engines["a", 2][0].running[0].set_result(None)
    assert len(await world.requests[0]) == 4


async def test_an_engine_that_was_only_out_of_reach_is_tried_again_later_and_later(world: World) -> None:
    await world.service.join("a", 1, "unix:/a", 2, version=Version(0, 1))
    await world.settle()
    for wait_s in (0.5, 1.0, 2.0):
        world.follower.doubt("a", 1)
        world.follower.doubt("a", 1)  # a second request that failed with the first says nothing more
        await world.clock.advance(wait_s - 0.01)
        assert world.router.highest_live() is None
        await world.clock.advance(0.02)
        assert world.router.highest_live() == 1
    world.follower.doubt("a", 1)
    await world.service.set_live("a", 1, Version(0, 2))  # news
    await world.settle()
    assert world.router.highest_live() == 2
    await world.clock.advance(60)
    assert world.router.highest_live() == 2
    world.follower.doubt("a", 7)
    world.follower.doubt("b", 1)
    assert world.router.highest_live() == 2


async def test_views_and_answers_cross_the_wire(tmp_path: Path) -> None:
    service = FleetService(FleetRegistry(1 << 32))
    server = WireServer({"fleet": service})
    address = await server.start(f"unix:{tmp_path}/s")
    client = WireClient(address, "rollout", patient=True)
    engine = Engine("a", 1)
    router = Router(StepClock())
    follower = RouterFollower(router, client.proxy("fleet"), lambda entry: engine)
    changed = asyncio.Event()
    following = asyncio.create_task(follower.run(changed.set))
    await client.call("fleet", "join", "a", 1, "unix:/a", 2, version=Version(1, 3))
    while router.highest_live() is None:
        changed.clear()
        await asyncio.wait_for(changed.wait(), 10)
    request = asyncio.create_task(router.generate(GenerateInput(prompt(3)), Sampling(max_tokens=4), session(base=3)))
    await asyncio.wait_for(engine.began.wait(), 10)
    draining = asyncio.create_task(service.drain("a", "scale to 0", 10))
    with pytest.raises(EngineError, match="no engine 'b' to drain; engines: a"):
        await client.call("fleet", "drain", "b", "", 1.0)
    engine.running[0].set_result(None)
    assert len(await request) == 4
    assert (await draining).state == "gone"
    with pytest.raises(LateError):
        await client.call("fleet", "join", "a", 1, "unix:/a", 2)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await client.close()
    await server.close()
