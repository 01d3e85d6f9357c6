"""A run on the real state objects, files and ledger, without models: a seeded driver plays the roles, and at chosen events the
run directory is copied as a kill would leave it. Another process then goes on from the copy.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from relax.bus.event_file import OpenFile, open_unbuffered
from relax.bus.index import BusIndex
from relax.bus.journal import Journal
from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import Receipt, RowPut, Subscription
from relax.core.column import COLUMNS
from relax.core.event import Event
from relax.core.id import GroupId, Table, index_of, trajectory_id
from relax.core.message import Prompt, PromptKey, text_message
from relax.core.trajectory import Segment, Trajectory, Turn
from relax.services.access import TRAINER, StepOutcome
from relax.services.account import END_STATES, Account
from relax.services.controller import Controller, GroupSize, StageBounds
from relax.services.gate import Gate
from relax.services.gate_sampler import GateSampler
from relax.services.ledger import Ledger
from relax.services.projection import Projection
from relax.services.recovery import Recovery, StagePlace, recover
from relax.services.register import Register
from relax.services.resume import RunState, complete_states, newest_state
from relax.services.row import failed_row, trajectory_rows
from relax.services.snapshot import KEPT, LocalTrainable, Snapshots, StageCursor
from relax.training.checkpoint import CheckpointStore

SUBSCRIPTIONS = (
    Subscription("rollout", Table.group, ("prompt",)),
    Subscription("reward", Table.trajectory, ("turns", "failure")),
    Subscription("verdict", Table.trajectory, ("reward", "failure"), unit="group"),
    Subscription(TRAINER, Table.sample, ("kept", "token_ids", "span"), unit="group"),
)
MAX_ROWS, MAX_BYTES = 500, 1 << 22


@dataclass(frozen=True)
class Plan:
    """B, S and the rest of the one stage. `checkpoint_every` also makes snapshots, in the middle of retaken steps too."""

    seed: int
    groups_per_step: int = 2
    staleness: int = 1
    steps: int = 6
    siblings: int = 2
    snapshot_every: int = 1
    checkpoint_every: int = 100
    journal: bool = True


class Inline:
    """Core's `Compute` on the caller's thread."""

    busy_s = 0.0

    async def run(self, function, *args):  # type: ignore[no-untyped-def]
        return function(*args)

    def close(self) -> None: ...


class Still:
    def time(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None: ...


class Learner:
    """A source whose next prompt depends on everything that it was shown, and in which order."""

    def __init__(self) -> None:
        self.drawn, self.mood = 0, 0

    def __iter__(self) -> Iterator[Prompt]:
        while True:
            number, self.drawn = self.drawn, self.drawn + 1
            yield Prompt(PromptKey("toy", number, 0), "toy", (text_message("user", f"{number}?"),), str(self.mood))

    def observe(self, key: PromptKey, rewards: Sequence[float]) -> None:
        self.mood = hash((self.mood, key.record, tuple(rewards))) % 1_000_003

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "mood": self.mood}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.drawn, self.mood = state["drawn"], state["mood"]


@dataclass
class Record:
    """What the objects were right after an event: gate and bus at once, register and source before the next event."""

    gate: Any = None
    bus: Any = None
    register: Any = None
    mood: int | None = None
    lost: int = 0


@dataclass
class Life:
    """One process of the run in `folder`. `crash_at` counts its events from 0: at those the folder is copied; negative numbers
    are snapshots while they are written. `crashes` are the copies. `luck` is another course of the same plan. `fill` is called
    with the number of each snapshot or checkpoint that is written; `crash_when` also decides by an event."""

    folder: Path
    plan: Plan
    crash_at: frozenset[int] = frozenset()
    luck: int = 0
    records_all: bool = False
    open_file: OpenFile = open_unbuffered
    fill: Callable[[int], None] = lambda number: None
    crash_when: Callable[[Event], bool] = lambda event: False
    records: dict[int, Record] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    crashes: dict[int, Path] = field(default_factory=dict)
    metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    rows: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        self.folder.mkdir(parents=True, exist_ok=True)
        self.random = Random(f"{plan.seed} {self.luck}")
        journal = Journal(self.folder / "journal", COLUMNS, self.open_file, segment_bytes=1 << 15)
        self.journal = journal if plan.journal else None
        self.log = MemoryLog(Still(), 50, self._sink)
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        self.projection = Projection(self.ledger, Inline(), lambda: self.log.last_number, self.metrics.__setitem__)
        self.register = Register(Account(), self.projection)
        self.gate = Gate(self.log, plan.groups_per_step, plan.staleness)
        self.controller = Controller(self.gate, self.register, settles_at_once=self.journal is None)
        self.store = CheckpointStore(self.folder / "snapshots", KEPT)
        self.checkpoints = CheckpointStore(self.folder / "checkpoints", 9)
        self.snapshots = Snapshots(
            self.controller,
            self.log,
            self.ledger,
            self.journal,
            self.store,
            self.checkpoints,
            [("only", plan.steps)],
            dict,
            lambda: 0,
            lambda: LocalTrainable(self, Inline(), Inline()),  # type: ignore[arg-type]
        )
        self.source = Learner()
        self.bus: TransferQueue | None = None
        self.state: RunState | None = None
        self.index: BusIndex | None = None
        self.version = 0
        self.held: list[tuple[Receipt, list[int]]] = []
        self._written = 0

    # --- what the run makes of a folder ---

    def load(self) -> RunState | None:
        """The newest snapshot or checkpoint; the ledger is cut back to it."""
        self.store.clean()
        self.checkpoints.clean()
        found = newest_state(self.store, self.checkpoints)
        self.state = None if found is None else found[1]
        event, step = (-1, 0) if self.state is None else (self.state.event, self.state.step)
        self.ledger.cut_after(event, step)
        return self.state

    def place(self, index: int) -> StagePlace:
        self.source = Learner()
        if self.state is not None:
            self.source.restore(self.state.source)
        return StagePlace("only", MAX_ROWS, MAX_BYTES, self.source)

    def recovery(self) -> Recovery:
        assert self.state is not None
        assert self.journal is not None
        return Recovery(self.state, self.journal, COLUMNS, self.log, self.controller, self.place)

    def resume(self) -> None:
        """As `Run` does it."""
        if self.load() is None:
            if self.journal is not None:
                self.journal.discard()
                self.journal.begin(1)
            self.source = Learner()
            return
        assert self.state is not None
        self.snapshots.adopt(complete_states(self.store))
        self.version = self.state.step
        recovered = recover(self.state, self.journal, self.log, self.controller, self.place)
        self.index = None if recovered is None else recovered.index
        if recovered is None:
            self.place(0)

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
        self.ledger.close()

    def kill(self) -> None:
        """The process is gone: nothing is flushed, cut short or ended."""
        if self.journal is not None:
            self.journal._events.close()
            writer = self.journal.storage._writer
            if writer is not None:
                writer._file.close()
        self.ledger.close()

    # --- the trainer's backend, as far as snapshots see it ---

    def capture(self) -> "Life":
        return self

    def write(self, path: str) -> None:
        self._written += 1
        self._crash(-self._written)
        self.fill(self._written)
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "weights").write_text(str(self.gate.step))

    # --- the journal's sink ---

    def _sink(self, event: Event) -> None:
        if self.journal is not None:
            self.journal.write(event)
        if self.records_all:
            self._record(event.number)
        self.events.append(event)
        self._crash(len(self.events) - 1, self.crash_when(event))

    def _record(self, number: int) -> None:
        before = self.records.setdefault(number - 1, Record())
        before.register, before.mood = copied(self.register.dump()), self.source.mood
        before.lost = self.controller._state.lost
        bus = None if self.bus is None else copied(self.bus._index.state())
        self.records[number] = Record(copied(self.gate.dump()), bus)

    def _crash(self, point: int, now: bool = False) -> None:
        if now or point in self.crash_at:
            copy = self.folder.with_name(f"{self.folder.name}-{point}")
            shutil.copytree(self.folder, copy)
            self.crashes[point] = copy

    # --- the run ---

    @asynccontextmanager
    async def stage(self) -> Any:
        plan, controller = self.plan, self.controller
        storage: Any = self.journal.storage if self.journal is not None else _memory()
        self.bus = TransferQueue(COLUMNS, storage, self.log, Still(), MAX_ROWS, MAX_BYTES, self.index)
        first = self.gate.step
        size = GroupSize(plan.siblings, 1 + 2 * plan.siblings, 4000)
        bounds = StageBounds(
            "only",
            first,
            plan.steps,
            plan.groups_per_step,
            plan.staleness,
            size,
            3,
            max_empty_steps=99,
            max_nonfinite_steps=99,
        )
        begin = controller.begin_stage if self.index is None else controller.continue_stage
        controller.register.observe = self.source.observe
        begin(bounds, self.bus, lambda: self.version)
        for one in SUBSCRIPTIONS:
            await self.bus.subscribe(one, GateSampler(self.gate) if one.consumer == TRAINER else None)
        stop = self.log.listen(controller.on_event)
        self.snapshots.cursor = StageCursor(0, self.source)  # type: ignore[arg-type]
        try:
            yield self
        finally:
            stop()
            await self.bus.close()

    async def run(self) -> None:
        """To the end of the stage."""
        async with self.stage():
            tasks = [asyncio.create_task(self.controller.admit(iter(self.source))), asyncio.create_task(self._train())]
            try:
                for _ in range(20_000):
                    for _ in range(5):
                        await asyncio.sleep(0)
                    for task in tasks:
                        if task.done():
                            task.result()
                            return
                    await self._act()
                raise AssertionError(f"the run goes on for ever: {self.controller.status()}")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _train(self) -> None:
        assert self.bus is not None
        going_out: asyncio.Task[None] | None = None
        for step in range(self.gate.step, self.plan.steps):
            leases = []
            while (taken := await self.controller.take(TRAINER)).receipt is not None:
                assert taken.step == step
                await self.bus.fetch(taken.receipt)
                leases.append(taken.receipt.lease)
            if going_out is not None:
                await going_out
            for lease in leases:
                await self.bus.ack(lease)
            reason = self.random.choice(["", "", "", "nonfinite", "nothing to train"])
            next_step = await self.controller.applied(StepOutcome(step, not reason, reason, {"train/loss": 0.5}))
            if next_step % self.plan.snapshot_every == 0 or next_step == self.plan.steps:
                await self.snapshots.begin()
            going_out = asyncio.create_task(self._go_out(next_step))
            is_between = next_step == self.plan.steps or next_step % self.plan.checkpoint_every == 0
            if is_between or self.random.random() < 0.3:
                await going_out

    async def _go_out(self, version: int) -> None:
        """Beside the next step, unless a checkpoint is due."""
        await self.snapshots.complete()
        self.version = version
        self.controller.changed.notify()
        if version % self.plan.checkpoint_every == 0:
            await self.snapshots.checkpoint()
        await self.projection.flush()

    async def _act(self) -> None:
        """One thing that a role does, if there is something to do for it."""
        acts = [
            self._begin_group,
            self._put,
            self._put,
            self._put,
            self._score,
            self._score,
            self._decide,
            self._decide,
        ]
        await self.random.choice([*acts, self._lose])()

    def _has(self, consumer: str) -> bool:
        assert self.bus is not None
        return bool(self.bus._index.candidates(consumer))

    async def _begin_group(self) -> None:
        assert self.bus is not None
        if self._has("rollout"):
            receipt = await self.bus.take("rollout", "roller")
            await self.controller.start(receipt.groups[0])
            there = {row for row in await self.bus.written(receipt.lease) if "/" in row}
            group = receipt.groups[0]
            self.held.append((receipt, [n for n in range(self.plan.siblings) if trajectory_id(group, n) not in there]))

    async def _put(self) -> None:
        assert self.bus is not None
        if not self.held:
            return
        receipt, missing = place = self.random.choice(self.held)
        if receipt.lease not in self.bus._index._state.leases.ids():
            self.held.remove(place)  # its group ended
            return
        if missing:
            await self.bus.put(trajectory(receipt.groups[0], missing.pop(0), self.version, self.random), receipt.lease)
        if not missing:
            await self.bus.ack(receipt.lease)
            self.held.remove(place)

    async def _lose(self) -> None:
        """A holder dies, or a group fails."""
        assert self.bus is not None
        if self.held and self.random.random() < 0.3:
            receipt, _ = self.held.pop(self.random.randrange(len(self.held)))
            if self.random.random() < 0.5:
                await self.bus.release(receipt.lease)
            else:
                await self.controller.end(receipt.groups[0], "failed", "a test")

    async def _score(self) -> None:
        assert self.bus is not None
        if self._has("reward"):
            receipt = await self.bus.take("reward", "judge")
            await self.bus.put([RowPut(receipt.ids[0], {"reward": float(self.random.randrange(3))})], receipt.lease)
            await self.bus.ack(receipt.lease)

    async def _decide(self) -> None:
        assert self.bus is not None
        if self._has("verdict"):
            receipt = await self.bus.take("verdict", "judge")
            if self.random.random() < 0.15:
                await self.controller.end(receipt.groups[0], "filtered", "equal rewards")
            else:
                await self.bus.put([RowPut(receipt.groups[0], {"kept": np.bool_(True)})], receipt.lease)
                await self.bus.ack(receipt.lease)


def trajectory(group: GroupId, sibling: int, version: int, random: Random) -> list[RowPut]:
    id = trajectory_id(group, sibling)
    if random.random() < 0.1:
        return failed_row(id, "a test")
    length = random.choice([2, 5, 40])
    mask = np.array([False] + [True] * (length - 1))
    versions = np.where(mask, np.int32(version), np.int32(-1)).astype(np.int32)
    segment = Segment(
        token_ids=np.array([random.randrange(100) for _ in range(length)], np.int32),
        mask=mask,
        logprobs=np.zeros(length, np.float32),
        versions=versions,
        mixed=np.zeros(length, np.bool_),
    )
    turns = (Turn(0, 1, length, "stop", "text"),)
    return trajectory_rows(id, Trajectory((segment,), turns, (text_message("user", "?"),), "stop"))


def _memory() -> Any:
    from relax.bus.storage import MemoryStorage

    return MemoryStorage(COLUMNS)


def finished(life: Life) -> Life:
    """To the end, all in the ledger, closed."""
    try:
        asyncio.run(life.run())
        asyncio.run(life.projection.flush())
        life.rows = rows_of(life.ledger)
    finally:
        life.close()
    return life


def lived(life: Life) -> Life:
    """A whole process: it resumes and runs to the end."""
    life.resume()
    return finished(life)


def check_the_end(life: Life) -> None:
    """Every admitted group has exactly one row, every prompt was drawn once, every step was closed."""
    register, groups = life.register, {id: row for id, row in life.rows.items() if "/" not in id}
    numbers = list(range(register.next_number))
    assert sorted(index_of(GroupId(group)) for group in groups) == numbers
    assert sorted(row[4] for row in groups.values()) == numbers, "the records of the data"
    counts = life.controller.account.counts()
    assert (counts["outstanding"], counts["admitted"]) == (0, len(groups))
    for state in END_STATES:
        assert sum(row[10] == state for row in groups.values()) == counts[state]
    assert life.gate.step == life.plan.steps


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def rows_of(ledger: Ledger, up_to: int | None = None) -> dict[str, tuple[Any, ...]]:
    """Every row of the ledger that was closed by event `up_to`."""
    found: dict[str, tuple[Any, ...]] = {}
    for table in ("group_", "trajectory", "sample"):
        for row in ledger._connection.execute(f"SELECT * FROM {table}"):
            if up_to is None or row["event"] <= up_to:
                found[row["id"]] = tuple(row)
    return found


def takes_of(events: Sequence[Event]) -> dict[int, list[tuple[str, ...]]]:
    """The portions that the trainer took in each step, in order."""
    step, found = 0, dict[int, list[tuple[str, ...]]]()
    for event in events:
        if event.kind == "bus/lease" and event.data["consumer"] == TRAINER:
            found.setdefault(step, []).append(tuple(event.data["units"]))
        elif event.kind in ("gate/advance", "gate/rollback"):
            step = event.data["step"]
            found = {known: portions for known, portions in found.items() if known < step}
    return found
