"""A version goes out beside the next step: what waits for what, and what a failure leads to (WS1, ST7)."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.bus.row import Fetched, Receipt
from relax.core.batch import StepReport
from relax.core.completion import frozen
from relax.core.error import UserError
from relax.core.version import Version
from relax.services.access import StepOutcome, Taken
from relax.services.controller import StopRequested
from relax.services.directory import RunDirectory
from relax.services.publisher import ProbeSource, Publisher, StepHooks
from relax.services.roles.trainer import Trainer
from relax.services.roles.update import TrainerSettings
from relax.services.run import Run
from relax.services.sample_file import SampleFiles
from relax.weights.store import WeightStore
from tests.algorithms.step import Inline, build, plain_backend, take
from tests.e2e.tiny import Watcher, run_root, tiny_config, train

STEPS = 3


class Backend:
    """A real one that writes down what is done with it."""

    def __init__(self, events: list[str]) -> None:
        self._events, self._backend = events, plain_backend()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward_backward(self, *args: Any) -> Any:
        self._events.append("forward")
        return self._backend.forward_backward(*args)

    def optim_step(self, normalizer: float) -> StepReport:
        self._events.append("optimizer")
        return self._backend.optim_step(normalizer)


@dataclass
class World:
    """Bus, controller and publication of a run of STEPS steps, one group in each; the rest of a publication waits for `gates`."""

    events: list[str] = field(default_factory=list)
    goes_on: bool = True
    fails: Callable[[int], Exception | None] = lambda version: None
    ends: Callable[[int], Exception | None] = lambda step: None
    step: int = 0
    given: int = 0
    gates: dict[int, asyncio.Event] = field(
        default_factory=lambda: {number: asyncio.Event() for number in range(1, STEPS + 1)}
    )

    waits: bool = False

    def __post_init__(self) -> None:
        self.algorithm = build("grpo", group_size=2)
        self.backend = Backend(self.events)

    def trainer(self, **settings: Any) -> Trainer:
        chosen = TrainerSettings(1, max_staleness=STEPS, **settings)
        world: Any = self
        return Trainer(
            *(world, world, world.backend, Inline(), self.algorithm, chosen, self.publish, self.dump),
            waiting=self.waiting,
        )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    async def take(self, holder: str) -> Taken:
        error = self.ends(self.step)
        if error is not None:
            raise error
        if self.given > self.step:
            return Taken(self.step, None)
        self.given += 1
        self.events.append(f"take {self.step}")
        return Taken(self.step, Receipt(f"lease {self.step}", "trainer", holder, self._rows().ids, ()))

    async def fetch(self, receipt: Receipt) -> Fetched:
        return self._rows()

    def _rows(self) -> Fetched:
        return take(self.algorithm, self.step, version=self.step)

    async def ack(self, lease: str) -> None: ...

    async def applied(self, outcome: StepOutcome) -> int:
        self.step += 1
        return self.step

    async def publish(self, step: int, applied: bool) -> Coroutine[Any, Any, None] | None:
        if self.goes_on:
            return self._go_out(step)
        await self._go_out(step)
        return None

    async def _go_out(self, version: int) -> None:
        self.events.append(f"begin {version}")
        await self.gates[version].wait()
        error = self.fails(version)
        if error is not None:
            raise error
        self.events.append(f"out {version}")

    def dump(self, step: int, rows: Any) -> None: ...


async def settled() -> None:
    """Whoever can go on has done so."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_rule_ws1_the_next_step_trains_while_a_version_goes_out_and_its_optimizer_waits() -> None:
    world = World()
    run = asyncio.create_task(world.trainer().run(0, STEPS))
    await settled()
    assert sorted(world.events[-3:]) == ["begin 1", "forward", "take 1"]
    assert world.events.count("optimizer") == 1
    assert world.waits
    world.gates[1].set()
    await settled()
    assert world.events.index("out 1") < len(world.events) - world.events[::-1].index("optimizer") - 1
    assert world.events.count("optimizer") == 2
    world.gates[2].set()
    await settled()
    assert not run.done(), "the last version is not out"
    world.gates[3].set()
    await run
    assert world.events[-1] == "out 3"
    assert not world.waits


@pytest.mark.parametrize("how", ["told to wait", "shared device"])
async def test_rule_ws1_a_trainer_that_must_wait_takes_nothing_before_the_version_is_out(how: str) -> None:
    world = World(goes_on=how == "shared device")
    run = asyncio.create_task(world.trainer(whole_steps=how == "shared device").run(0, STEPS))
    await settled()
    assert "take 1" not in world.events
    for gate in world.gates.values():
        gate.set()
    await run
    assert [event for event in world.events if event.startswith(("take", "out"))] == [
        *("take 0", "out 1"),
        *("take 1", "out 2"),
        *("take 2", "out 3"),
    ]


async def test_a_publication_that_fails_ends_a_trainer_that_waits_for_groups() -> None:
    """They may be those that only the new version would have brought."""

    class Waits(World):
        async def take(self, holder: str) -> Taken:
            if self.step == 1 and self.given > 1:
                await asyncio.Event().wait()
            return await super().take(holder)

    world = Waits(fails=lambda version: UserError("the disk is full"))
    run = asyncio.create_task(world.trainer().run(0, STEPS))
    await settled()
    world.gates[1].set()
    with pytest.raises(UserError, match="the disk is full"):
        await asyncio.wait_for(run, 5)
    assert world.events.count("optimizer") == 1


async def test_a_version_is_out_before_a_stop_goes_on_to_its_checkpoint() -> None:
    world = World(ends=lambda step: StopRequested("stop") if step == 1 else None)
    run = asyncio.create_task(world.trainer().run(0, STEPS))
    await settled()
    assert not run.done()
    world.gates[1].set()
    with pytest.raises(StopRequested):
        await run
    assert world.events[-1] == "out 1"


# --- the publisher ----------------------------------------------------------------------------------------------------


@dataclass
class Published:
    """A publisher with a real store, and what it does around a version."""

    goes_on: bool
    events: list[str] = field(default_factory=list)
    covered: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.store = WeightStore(keep=2)
        hooks = StepHooks(self._before_step, self._covered, self._evaluated, self._after_step)
        probe = ProbeSource(frozen(np.array([1, 2, 3], dtype=np.int32)), 1e-4, 1.0)
        self.backend = plain_backend()
        self.publisher = Publisher(self.store, self.backend, Inline(), [], probe, hooks)

    async def _before_step(self, step: int) -> bool:
        self.events.append(f"cut {step}")
        return self.goes_on

    async def _covered(self) -> None:
        await self.covered.wait()
        self.events.append("covered")

    async def _evaluated(self, version: Version) -> None:
        assert self.store.latest == version
        self.events.append(f"evaluated {version.number}")

    async def _after_step(self, version: Version) -> None:
        assert self.store.latest == version
        self.events.append(f"after {version.number}")


@pytest.mark.parametrize("applied", [True, False])
async def test_rule_ws1_a_version_goes_out_when_its_snapshot_is_complete_whoever_waits(applied: bool) -> None:
    for goes_on in (True, False):
        world = Published(goes_on)
        await world.publisher.first(0)
        call = asyncio.create_task(world.publisher(1, applied))
        await settled()
        assert call.done() == goes_on
        rest = None
        if goes_on:
            left = call.result()
            assert left is not None
            rest = asyncio.create_task(left)
            await settled()
        assert (world.store.latest, world.publisher.version) == (Version(0, 0), Version(0, 0))
        world.covered.set()
        await (rest or call)
        assert world.events == ["cut 1", "covered", "evaluated 1", "after 1"]
        assert world.store.latest == Version(0, 1)


async def test_a_version_is_proved_by_a_probe_of_the_moment_between_two_steps() -> None:
    """What goes out later are the same weights: they stand still until then."""
    world = Published(goes_on=True)
    await world.publisher.first(0)
    left = await world.publisher(1, True)
    assert left is not None
    calls: list[str] = []
    world.backend.logprobs = lambda *args: calls.append("logprobs")  # type: ignore[method-assign,assignment,return-value]
    world.covered.set()
    await left
    assert not calls


# --- a whole run --------------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """The newest version that is out, the steps that began before theirs was, and what was out when a step's samples were closed."""

    out: int = 0
    early: list[int] = field(default_factory=list)
    sampled: dict[int, int] = field(default_factory=dict)


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    found = Trace()
    go_out, step, flush = Publisher._go_out, Trainer.step, SampleFiles.flush

    async def gone_out(self: Publisher, hooks: StepHooks, number: int, probe: Any) -> None:
        await asyncio.sleep(0.02)
        await go_out(self, hooks, number, probe)
        found.out = number

    async def stepped(self: Trainer, number: int) -> Any:
        if found.out < number:
            found.early.append(number)
        return await step(self, number)

    async def flushed(self: SampleFiles, number: int) -> None:
        found.sampled[number] = found.out
        await flush(self, number)

    monkeypatch.setattr(Publisher, "_go_out", gone_out)
    monkeypatch.setattr(Trainer, "step", stepped)
    monkeypatch.setattr(SampleFiles, "flush", flushed)
    return found


async def test_rule_rr4_a_step_begins_early_but_where_a_checkpoint_is_due(tmp_path: Path, trace: Trace) -> None:
    config = tiny_config(tmp_path, stages=RL, training={"checkpoint": {"every": 3, "keep_last": 9}})
    await train(config)
    assert trace.early == [1, 2, 4, 5, 7]
    saved = sorted(int(path.name[-6:]) for path in (run_root(config) / "checkpoints").glob("step-*"))
    assert saved == [3, 6, 8]


async def test_the_samples_of_a_step_are_closed_before_the_next_one_begins(tmp_path: Path, trace: Trace) -> None:
    await train(tiny_config(tmp_path, stages=RL, training={"checkpoint": {"every": 100, "keep_last": 2}}))
    assert trace.early == [1, 2, 3, 4, 5, 6, 7]
    assert trace.sampled == {step: step for step in range(8)}, "before the version that the step made is out"


async def test_a_checkpoint_that_is_asked_for_is_of_a_moment_between_two_steps(tmp_path: Path, trace: Trace) -> None:
    config = tiny_config(tmp_path, stages=RL, training={"checkpoint": {"every": 100, "keep_last": 9}})
    hub = Watcher()
    with RunDirectory(run_root(config)) as directory:
        run = Run(config, directory, hub)
        running = asyncio.create_task(run.execute())
        await hub.reached(2)
        step = await run.checkpoint()
        await running
    assert step < 8, "at the next step, not where one is due anyway"
    assert step not in trace.early
    assert (run_root(config) / "checkpoints" / f"step-{step:06d}").is_dir()


RL = [{"name": "rl", "steps": 8, "groups_per_step": 2, "algorithm": {"type": "grpo", "group_size": 4}}]
