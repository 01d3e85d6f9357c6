"""Replay: train the steps between the two newest snapshots again, from the journal, and compare the bits (DE3).

Called by `relax replay`. Nothing of the run is changed. The rows come from the journal's segments, the order of the groups from
its take log, the weights from the older snapshot; what comes out must be the newer one, to the last bit.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

from relax.bus.journal import Journal
from relax.bus.log import MemoryLog
from relax.bus.row import Fetched, PutReport, Receipt, RowPut
from relax.config.tree import RunConfig
from relax.core.column import COLUMNS
from relax.core.error import InvariantError, UserError
from relax.core.id import GroupId, RowId, Table, table_of
from relax.data.quarantine import Quarantine
from relax.services.access import TRAINER, StepOutcome, Taken
from relax.services.account import Account, EndState
from relax.services.assembly import Assembly
from relax.services.controller import Controller
from relax.services.directory import RunDirectory
from relax.services.gate import Gate
from relax.services.gate_state import Take
from relax.services.ledger import Ledger
from relax.services.projection import Projection
from relax.services.recovery import Recovery
from relax.services.register import Register
from relax.services.resume import BACKEND_FOLDER, RunState
from relax.services.roles.trainer import Trainer
from relax.training.checkpoint import CheckpointStore, read_meta


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Steps `first .. end - 1` were trained again; `differences` names every file or tensor that came out otherwise."""

    first: int
    end: int
    groups: int
    differences: tuple[str, ...]


@dataclass(slots=True)
class TakenStep:
    """What a step took: portions in order, and the rows of all their groups."""

    portions: list[Take]
    cells: dict[RowId, dict[str, object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """Two snapshots of one stage and what the run says of them."""

    start_folder: Path
    start: RunState
    end_folder: Path
    end: RunState


class RecordedSteps:
    """Controller and critic as the trainer sees them, made of what the journal holds of some steps. `bus` is its bus."""

    def __init__(self, steps: dict[int, TakenStep], first: int) -> None:
        self._steps, self._step = steps, first
        self._waiting = list(steps[first].portions) if first in steps else []
        self.bus = RecordedBus(self)

    async def take(self, holder: str) -> Taken:
        """The next recorded portion of the step."""
        if not self._waiting:
            return Taken(self._step, None)
        take = self._waiting.pop(0)
        cells = self._steps[self._step].cells
        samples = [row for group in take.groups for row in cells if _is_sample_of(row, group)]
        return Taken(self._step, Receipt(f"{TRAINER}:replay", TRAINER, TRAINER, tuple(samples), (), take.groups))

    def fetch(self, receipt: Receipt) -> Fetched:
        return Fetched(receipt.ids, self._steps[self._step].cells)

    async def applied(self, outcome: StepOutcome) -> int:
        self._step = outcome.step + 1
        self._waiting = list(self._steps[self._step].portions) if self._step in self._steps else []
        return self._step

    async def evaluate(self, step: int, receipts: Sequence[Receipt]) -> None:
        """What the critic found lies with the rows."""

    async def train(self, step: int, receipts: Sequence[Receipt]) -> dict[str, float]:
        return {}

    async def start(self, group: GroupId) -> int:
        return 0

    async def end(self, group: GroupId, state: EndState, reason: str) -> None: ...


class RecordedBus:
    """Gives the rows of the step that is replayed; nothing is put or taken in a replay."""

    def __init__(self, recorded: RecordedSteps) -> None:
        self._recorded = recorded

    async def take(self, consumer: str, holder: str, max_rows: int = 1) -> Receipt:
        raise InvariantError("DE3", "groups are taken from the bus itself in a replay")

    async def take_each(self, consumer: str, holder: str, max_leases: int) -> list[Receipt]:
        raise InvariantError("DE3", "groups are taken from the bus itself in a replay")

    async def fetch(self, receipt: Receipt, columns: Sequence[str] | None = None) -> Fetched:
        return self._recorded.fetch(receipt)

    async def put(self, puts: Sequence[RowPut], lease: str, is_last: bool = False) -> PutReport:
        raise InvariantError("DE3", "the trainer put rows in a replay")

    async def written(self, lease: str) -> dict[RowId, tuple[str, ...]]:
        return {}

    async def ack(self, lease: str) -> None: ...

    async def renew(self, lease: str) -> None: ...

    async def release(self, lease: str) -> None: ...


async def replay(config: RunConfig, directory: RunDirectory) -> ReplayReport:
    """Raises UserError when the run keeps no journal, is running, or has not two snapshots of one stage."""
    span = _newest_span(config, directory)
    assembly = Assembly(config, Quarantine())
    try:
        steps = _read_steps(config, directory, assembly, span)
        missing = [step for step in range(span.start.step, span.end.step) if step not in steps]
        if missing:
            raise UserError(
                f"the journal of {directory.root} does not hold the steps {missing}; nothing can be replayed"
            )
        await _train(assembly, span, steps)
        captured = await assembly.compute("trainer").run(assembly.backend.capture)
        with tempfile.TemporaryDirectory() as folder:
            captured.write(folder)
            differences = tuple(_differences(Path(folder), span.end_folder))
        groups = sum(len(take.groups) for step in steps.values() for take in step.portions)
        return ReplayReport(span.start.step, span.end.step, groups, differences)
    finally:
        await assembly.close()


def _newest_span(config: RunConfig, directory: RunDirectory) -> Span:
    if directory.owner is not None:
        raise UserError(f"run {directory.root} is running (process {directory.owner}); stop it first")
    found = CheckpointStore(directory.snapshots).complete()
    states = [(path / BACKEND_FOLDER, RunState.from_json(read_meta(path))) for path in found]
    for (start_folder, start), (end_folder, end) in reversed(list(pairwise(states))):
        if start.bus is not None and start.step < end.step and _stage_of(config, start.step) == end.stage:
            return Span(start_folder, start, end_folder, end)
    raise UserError(
        f"{directory.root} has {len(found)} snapshots, and no two that follow each other in one stage with a journal between "
        "them; a replay needs a run with bus.journal and training.snapshot_every"
    )


def _stage_of(config: RunConfig, step: int) -> int:
    """The number of the stage that trains a step."""
    end = 0
    for index, stage in enumerate(config.stages):
        end += stage.steps
        if step < end:
            return index
    return len(config.stages)


def _read_steps(config: RunConfig, directory: RunDirectory, assembly: Assembly, span: Span) -> dict[int, TakenStep]:
    """Follow the journal from the older snapshot to the newer one and keep what each step took, with its rows."""
    log = MemoryLog(assembly.clock, keep=0)
    gate = Gate(log, config.stages[0].groups_per_step, config.max_staleness_of(config.stages[0]))
    ledger = Ledger(":memory:")
    projection = Projection(ledger, assembly.compute("ledger"), lambda: log.last_number, lambda step, metrics: None)
    controller = Controller(gate, Register(Account(), projection), settles_at_once=False)
    steps: dict[int, TakenStep] = {}

    def keep(step: int, takes: list[Take], read: Callable[[GroupId], Fetched]) -> None:
        taken = steps[step] = TakenStep(list(takes))
        for take in takes:
            for group in take.groups:
                taken.cells.update({row: dict(cells) for row, cells in read(group).cells.items()})

    for name, stream in assembly.supply.streams.items():
        stream.restore(span.start.streams[name])
    journal = Journal(directory.journal, COLUMNS)
    place = partial(assembly.place, state=span.start)
    Recovery(span.start, journal, COLUMNS, log, controller, place, keep).run(up_to=span.end.event)
    ledger.close()
    return steps


async def _train(assembly: Assembly, span: Span, steps: dict[int, TakenStep]) -> None:
    backend, compute = assembly.backend, assembly.compute("trainer")
    index = span.end.stage
    for stage in dict.fromkeys((span.start.stage, index)):
        await assembly.begin_optimizer(stage)
        if stage == span.start.stage:
            await compute.run(backend.load, str(span.start_folder))
    setup = assembly.stage(index, span.start.step, span.end.step)
    recorded = RecordedSteps(steps, span.start.step)

    async def publish(step: int, applied: bool) -> None: ...

    critic = None if setup.algorithm.critic is None else recorded
    trainer = Trainer(
        recorded.bus,
        recorded,
        backend,
        compute,
        setup.algorithm,
        setup.trainer,
        publish,
        lambda step, rows: None,
        critic,
    )
    await trainer.run(span.start.step, span.end.step)


def _differences(made: Path, saved: Path) -> list[str]:
    """Tensor files of a saved backend that the replay did not make equal, with the largest difference."""
    found: list[str] = []
    for path in sorted(saved.rglob("*.safetensors")):
        name = path.relative_to(saved)
        if not (made / name).exists():
            found.append(f"{name}: not made by the replay")
            continue
        expected, actual = load_file(path), load_file(made / name)
        for tensor in sorted(expected.keys() | actual.keys()):
            if tensor not in expected or tensor not in actual:
                found.append(f"{name}: {tensor} is only in one of the two")
            elif not torch.equal(expected[tensor], actual[tensor]):
                gap = (expected[tensor].double() - actual[tensor].double()).abs().max()
                found.append(f"{name}: {tensor} differs by up to {float(gap):.3g}")
    return found


def _is_sample_of(row: RowId, group: GroupId) -> bool:
    return table_of(row) is Table.sample and row.startswith(f"{group}/")
