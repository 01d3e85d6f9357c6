"""Snapshots and checkpoints of a run: the consistent cut, the trainer's state, and their place in the journal (TQ8, RR4, WS1).

Called by the publisher before a version goes out (snapshot), and by the run (checkpoint). A snapshot is for restart in place
and has a tail in the journal; a checkpoint is for people and stands alone. Both are complete or ignored.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from relax.bus.journal import Journal, Mark
from relax.bus.log import MemoryLog
from relax.core.message import Json
from relax.core.protocol import Captured, Compute, Source, TrainBackend
from relax.services.controller import Controller
from relax.services.critic import CapturedBoth, CriticWeights
from relax.services.ledger import Ledger
from relax.services.resume import BACKEND_FOLDER, RunState

KEPT = 2
"""Snapshots that are kept: the newest, and the one before it, from which `relax replay` trains again."""


class Store(Protocol):
    """What a `CheckpointStore` is used for here."""

    def write(self, step: int, fill: Callable[[Path], None], meta: Mapping[str, Json]) -> object: ...


@dataclass(slots=True)
class StageCursor:
    """The stage under way: its number, and the source of its prompts."""

    index: int = 0
    source: Source | None = None


class Trainable(Protocol):
    """The trainer's state, and the thread that writes it."""

    @property
    def writer(self) -> Compute: ...

    async def capture(self) -> Captured: ...


@dataclass(frozen=True, slots=True)
class LocalTrainable:
    """The state of a backend in this process, and of a critic that learns beside it."""

    backend: TrainBackend
    compute: Compute
    writer: Compute
    critic: CriticWeights | None = None

    async def capture(self) -> Captured:
        policy = await self.compute.run(self.backend.capture)
        return policy if self.critic is None else CapturedBoth(policy, await self.critic.capture())


@dataclass(frozen=True, slots=True)
class Begun:
    """A snapshot that is cut and not yet on the disk."""

    state: RunState
    captured: Captured
    mark: Mark | None


class Snapshots:
    """`streams` gives the cursors of all data sources; `incarnation` that of the versions now published."""

    def __init__(
        self,
        controller: Controller,
        log: MemoryLog,
        ledger: Ledger,
        journal: Journal | None,
        snapshots: Store,
        checkpoints: Store,
        stages: list[tuple[str, int]],
        streams: Callable[[], dict[str, dict[str, Json]]],
        incarnation: Callable[[], int],
        trainable: Callable[[], Trainable],
    ) -> None:
        self._controller, self._log, self._ledger, self._journal = controller, log, ledger, journal
        self._snapshots, self._checkpoints = snapshots, checkpoints
        self._stages, self._streams, self._incarnation = stages, streams, incarnation
        self._trainable = trainable
        self.cursor = StageCursor()
        self._marks: dict[int, Mark] = {}
        self._last_step = -1
        self._begun: Begun | None = None

    def adopt(self, states: Iterable[RunState]) -> None:
        """The run resumed: these snapshots, oldest first, are on the disk already."""
        for state in states:
            self._last_step = state.step
            if state.segment is not None:
                self._marks[state.step] = Mark(state.event, state.segment)

    async def begin(self) -> None:
        """Cut a snapshot of the moment between two steps. The next step may begin before it is complete: nothing of it gets in, and
        of the trainer there is a copy."""
        mark = None if self._journal is None else self._journal.cut(self._log.last_number)
        state = self._cut(mark)
        self._begun = Begun(state, await self._trainable().capture(), mark)

    async def complete(self) -> None:
        """Write the snapshot that was begun, if one was; then what it covers is settled (TQ2)."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        state = begun.state
        await self._write(self._snapshots, state, begun.captured)
        self._last_step = state.step
        await self._controller.settle(state.step)
        if begun.mark is not None:
            self._prune(state.step, begun.mark)

    async def checkpoint(self) -> None:
        """A checkpoint of this moment. Everything it needs is in it: what the steps so far ended is settled first."""
        if self._journal is not None and self._last_step != self._controller.gate.step:
            await self.begin()
            await self.complete()
        state = self._cut(None)
        await self._write(self._checkpoints, state, await self._trainable().capture())

    # --- parts ---

    def _cut(self, mark: Mark | None) -> RunState:
        """Made without waiting for anything, so it is of one moment."""
        controller, cursor = self._controller, self.cursor
        assert cursor.source is not None
        state = RunState(
            step=controller.gate.step,
            stage=cursor.index,
            stages=self._stages,
            event=self._log.last_number,
            incarnation=self._incarnation(),
            controller=controller.dump(),
            source=cursor.source.state(),
            streams=self._streams(),
        )
        return state if mark is None else replace(state, bus=controller.dump_bus(), segment=mark.segment)

    async def _write(self, store: Store, state: RunState, captured: Captured) -> None:
        """First the ledger: it holds everything that ended before the cut; what ended since has a later event number."""
        projection = self._controller.register.projection
        projection.note("account", state.controller["register"]["account"])
        await projection.flush()
        await self._trainable().writer.run(self._write_files, store, state, captured)

    def _write_files(self, store: Store, state: RunState, captured: Captured) -> None:
        """On the writer's thread: everything is on the disk itself before the snapshot counts."""
        self._ledger.sync()
        if self._journal is not None:
            self._journal.sync()
        store.write(state.step, lambda folder: captured.write(str(folder / BACKEND_FOLDER)), state.to_json())

    def _prune(self, step: int, mark: Mark) -> None:
        assert self._journal is not None
        self._marks[step] = mark
        for old in sorted(self._marks)[:-KEPT]:
            del self._marks[old]
        self._journal.prune(self._marks[min(self._marks)])
