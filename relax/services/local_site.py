"""Every role in this process: the site of the local runtime, made of an assembly's parts."""

from collections.abc import Mapping
from pathlib import Path

from relax.core.message import Json
from relax.core.protocol import Compute
from relax.core.version import Version
from relax.services.assembly import Assembly
from relax.services.critic import CriticWeights, load_critic, open_critic
from relax.services.directory import RunDirectory
from relax.services.dump import BatchDump
from relax.services.meter import Meter
from relax.services.plan import make_plan
from relax.services.publisher import Publisher
from relax.services.reference import open_reference
from relax.services.roles.evaluation import Evaluation
from relax.services.site import Control, Gauge, Hooks
from relax.services.snapshot import LocalTrainable, Trainable
from relax.services.stage import LocalCrew, StageSetup
from relax.services.teacher import open_teacher


class LocalTrainer:
    """`site.TrainerSeat` on the backend of this process."""

    def __init__(self, assembly: Assembly, publisher: Publisher) -> None:
        self._assembly = assembly
        self.publisher = publisher
        self.critic: CriticWeights | None = None

    @property
    def version(self) -> Version:
        return self.publisher.version

    async def begin(self, stage: int, initial: bool) -> None:
        await self._assembly.begin_optimizer(stage)
        self.critic = await open_critic(self._assembly, stage)

    async def load(self, stage: int, folder: Path) -> None:
        await self._assembly.begin_optimizer(stage)
        await self._compute.run(self._assembly.backend.load, str(folder))
        self.critic = await load_critic(self._assembly, stage, folder)

    async def first(self, number: int, incarnation: int) -> None:
        if self._assembly.store.latest is None:
            self.publisher.version = Version(incarnation, number)
            await self.publisher.first(number)

    def trainable(self) -> Trainable:
        return LocalTrainable(self._assembly.backend, self._compute, self._assembly.compute("ledger"), self.critic)

    @property
    def _compute(self) -> Compute:
        return self._assembly.compute("trainer")


class LocalSite:
    """`site.Site` of the local runtime. Lives and dies with the run (RR1)."""

    is_remote = False

    def __init__(self, assembly: Assembly, directory: RunDirectory) -> None:
        self._assembly, self._directory = assembly, directory
        self.evaluation: Evaluation | None = None

    async def open(self, hooks: Hooks) -> None:
        assembly = self._assembly
        await assembly.check_pool()
        await assembly.judges.open(assembly.judges.names)
        self._meter = Meter(assembly)
        self.evaluation = self._make_evaluation(hooks)
        samples = any(make_plan(assembly.algorithm(node)).samples for node in assembly.config.stages)
        publisher = Publisher(
            assembly.store,
            assembly.backend,
            assembly.compute("trainer"),
            [assembly.fleet] if samples else [],
            assembly.probe,
            hooks.step,
        )
        self.trainer = LocalTrainer(assembly, publisher)

    def _make_evaluation(self, hooks: Hooks) -> Evaluation | None:
        assembly = self._assembly
        sets = assembly.evaluation_sets()
        if not sets:
            return None
        return Evaluation(
            assembly.engine("evaluation"),
            assembly.store,
            assembly.renderer,
            assembly.tasks,
            sets,
            assembly.limits,
            assembly.slots,
            hooks.number,
            hooks.evaluated,
            media=assembly.supply.media,
        )

    def keeps(self, holder: str) -> bool:
        """Nobody lives on."""
        return False

    async def crew(self, control: Control, setup: StageSetup, fresh: bool) -> LocalCrew:
        assembly = self._assembly
        reference = None
        if "reference" in setup.plan.roles:
            reference = await open_reference(assembly, self._directory.reference(setup.bounds.name), fresh)
        teacher = None
        if "teacher" in setup.plan.roles:
            teacher = await open_teacher(assembly, setup.bounds.name)
        return LocalCrew(
            controller=control.controller,
            log=control.log,
            clock=assembly.clock,
            backend=assembly.backend,
            compute=assembly.compute("trainer"),
            publish=self.trainer.publisher,
            dump=BatchDump(self._directory.dumps),
            renderer=assembly.renderer,
            tasks=assembly.tasks,
            fleet=assembly.fleet if setup.plan.samples else None,
            reference=reference,
            critic=self.trainer.critic,
            teacher=teacher,
            media=assembly.supply.media,
            wrap=assembly.wrap,
            journal=control.journal,
        )

    @property
    def gauge(self) -> Gauge:
        return self

    async def measure(self) -> Mapping[str, float]:
        return await self._meter.measure()

    def status(self) -> Mapping[str, Json]:
        return {}

    def progress(self) -> tuple[float, ...]:
        return tuple(compute.busy_s for compute in self._assembly.computes.values())

    async def close(self) -> None:
        """The assembly is the run's to close."""
