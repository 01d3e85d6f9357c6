"""A run of the real services on virtual time, with stage times that a benchmark gives: emulated engines, judge and trainer.

Used by `pipeline` and `controller`. Controller, gate, bus, roles, router, weight service and ledger are the real ones. The clock
jumps, so virtual seconds are exact and processor time is what the services themselves cost.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from relax.core.completion import Completion
from relax.core.id import group_id, index_of
from relax.core.message import Prompt
from relax.core.seed import derive_seed
from relax.core.trajectory import Score, Trajectory
from relax.core.version import Version
from relax.services.ledger import Ledger
from relax.services.stage import StageSetup
from relax.services.task import Task
from relax.simulation.fake import MAX_TOKENS
from relax.simulation.scenario import FleetScenario, Scenario, StageScenario, TaskScenario
from relax.simulation.services import ServiceRun
from relax.simulation.torn_disk import Disk, SnapshotMemory
from relax.simulation.virtual import run_virtual

T = TypeVar("T")
PATIENCE_S = 1e7


@dataclass(frozen=True)
class Profile:
    """One setting. `*_s` of a stage is per trajectory, on one device of its own; `mean_s` is a request's running time."""

    steps: int
    groups_per_step: int = 8
    group_size: int = 8
    max_staleness: int = 1
    streaming: bool = True
    filtered: float = 0.0
    engines: int = 2
    slots: int = 4
    mean_s: float = 1.0
    sigma: float = 1.0
    load_s: float = 0.0
    reward_s: float = 0.0
    reference_s: float = 0.0
    train_s: float = 0.0
    seed: int = 0

    @property
    def trajectories_per_step(self) -> int:
        return self.groups_per_step * self.group_size


class CostCompute:
    """Core's `Compute`: one call at a time, each as long as its rows cost by the table. A call that is not there is free."""

    def __init__(self, row_seconds: dict[str, float]) -> None:
        self._row_seconds = row_seconds
        self._lock = asyncio.Lock()
        self.busy_s = 0.0

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        async with self._lock:
            seconds = self._row_seconds.get(getattr(function, "__name__", ""), 0.0)
            if seconds:
                seconds *= sum(len(batch) for batches in args[0] for batch in batches)
                await asyncio.sleep(seconds)
            self.busy_s += seconds
            return function(*args)

    def close(self) -> None: ...


class SerialJudge:
    """Core's `Reward`: judges one trajectory at a time. All siblings of a filtered prompt get one reward, others differ."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._lock = asyncio.Lock()

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        async with self._lock:
            await asyncio.sleep(self._profile.reward_s)
        if is_filtered(prompt, self._profile):
            return Score(0.0)
        return Score(derive_seed(0, trajectory.response) % 2**20 / 2**20)


def is_filtered(prompt: Prompt, profile: Profile) -> bool:
    key = prompt.key
    return derive_seed(profile.seed, "filtered", key.record, key.pass_number) % 2**20 < profile.filtered * 2**20


def scenario_of(profile: Profile) -> Scenario:
    """A scenario without troubles. KL brings the reference role; DAPO brings the filter."""
    stage = StageScenario(
        name="measured",
        algorithm="dapo" if profile.filtered else "grpo",
        steps=profile.steps,
        groups_per_step=profile.groups_per_step,
        max_staleness=profile.max_staleness,
        group_size=profile.group_size,
        max_lost=1 << 30,
        kl_weight=0.1 if profile.reference_s else 0.0,
        space_groups=8,
    )
    fleet = FleetScenario(
        engines=profile.engines,
        slots=profile.slots,
        mode="keep",
        mean_s=profile.mean_s,
        sigma=profile.sigma,
        load_s=profile.load_s,
        request_failure=0.0,
        load_failure=0.0,
        load_damage=0.0,
    )
    task = TaskScenario(
        turns=1,
        delay_s=0.0,
        branch_rate=0.0,
        timeout_s=1e6,
        max_attempts=1,
        on_failure="survivors",
        environment_failure=0.0,
        reward_failure=0.0,
        reward_stall=0.0,
        bad_reference=0.0,
    )
    return Scenario(
        seed=profile.seed,
        stages=(stage,),
        fleet=fleet,
        task=task,
        compute_s=0.0,
        nonfinite_rate=0.0,
        in_order=not profile.streaming,
        strict=False,
        releases=0,
        drops=0,
        kills=0,
        snapshot_every=1,
    )


class EmulatedRun(ServiceRun):
    """Built inside a virtual loop. Afterwards: when each step was published, and how long each request really took."""

    def __init__(self, profile: Profile, disk: Disk) -> None:
        self.profile = profile
        super().__init__(scenario_of(profile), disk)
        self.published: list[float] = []
        self.durations: dict[tuple[int, int], float] = {}
        for engine in self.fleet.engines.values():
            engine.generate = self._timed(engine.generate)  # type: ignore[method-assign]

    def _timed(self, generate: Callable[..., Awaitable[Completion]]) -> Callable[..., Awaitable[Completion]]:
        """The router sends no more than an engine's slots, so a call takes its running time and nothing else."""

        async def measured(input: Any, sampling: Any, session: Any) -> Completion:
            started = self.clock.time()
            completion = await generate(input, sampling, session)
            self.durations[index_of(session.group), session.sibling] = self.clock.time() - started
            return completion

        return measured

    def _compute(self) -> Any:
        profile = self.profile
        return CostCompute({"forward_backward": profile.train_s, "logprobs": profile.reference_s})

    def _task(self) -> Task:
        return replace(super()._task(), rewards=(("judge", 1.0, SerialJudge(self.profile)),))

    def _setup(self, stage: StageScenario, first: int, end: int) -> StageSetup:
        """Micro-batches of a group each."""
        setup = super()._setup(stage, first, end)
        tokens = self.profile.group_size * MAX_TOKENS
        return replace(setup, trainer=replace(setup.trainer, microbatch_tokens=tokens))

    async def _after_step(self, version: Version) -> None:
        await super()._after_step(version)
        self.published.append(self.clock.time())

    def filtered_groups(self) -> set[int]:
        """Admission numbers of the groups that the filter ended."""
        ended = (self.ledger.group(group_id(number)) for number in range(self.controller.register.next_number))
        return {index_of(str(row["id"])) for row in ended if row is not None and row["state"] == "filtered"}


def emulate(
    profile: Profile, inspect: Callable[[EmulatedRun], T], make: Callable[[Profile, Disk], EmulatedRun] = EmulatedRun
) -> T:
    """Run a profile to its end; returns what `inspect` makes of the run before its ledger closes."""

    async def main(disk: Disk) -> T:
        run = make(profile, disk)
        try:
            await run.run()
            return inspect(run)
        finally:
            run.journal.close()
            run.ledger.close()

    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder), Random(profile.seed), None, SnapshotMemory(), Ledger(":memory:"))
        return run_virtual(main(disk), PATIENCE_S)
