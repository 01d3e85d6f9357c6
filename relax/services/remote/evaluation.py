"""The evaluation role in its own process: asks the controller for requests, runs them, reports.

The controller holds the version of every request that waits (WS7); a request that was not reported is given out again.
"""

import asyncio
from dataclasses import dataclass
from typing import NoReturn

from relax.core.protocol import WeightReader
from relax.core.version import Version
from relax.core.weight import Manifest, WeightSet
from relax.runtime.task import TaskSet
from relax.services.remote.host import Host
from relax.services.remote.site import EVALUATIONS
from relax.services.remote.weight import weight_reader
from relax.services.roles.evaluation import Evaluation, EvaluationResult


@dataclass(slots=True)
class HeldVersions:
    """What `Evaluation` asks of a weight store; the controller pins."""

    reader: WeightReader
    _manifest: Manifest | None = None

    async def fetch(self, version: Version) -> WeightSet:
        found = await self.reader.fetch(version)
        self._manifest = found.manifest
        return found

    def manifest(self, version: Version) -> Manifest:
        assert self._manifest is not None
        assert self._manifest.version == version
        return self._manifest

    def pin(self, version: Version) -> None:
        """The controller did."""

    def unpin(self, version: Version) -> None:
        """The controller does."""


async def evaluate_forever(host: Host) -> NoReturn:
    """Endless. Consumes: requests. Waits for: the next one. Unblocked by: the controller, at the ends of a stage and in between."""
    assembly = host.assembly
    results: asyncio.Queue[EvaluationResult] = asyncio.Queue()
    engine = assembly.engine("evaluation")
    evaluation = Evaluation(
        engine,
        HeldVersions(weight_reader(host)),
        assembly.renderer,
        assembly.tasks,
        assembly.evaluation_sets(),
        assembly.limits,
        assembly.slots,
        number=lambda: 0,
        report=results.put,
        media=assembly.supply.media,
    )
    desk = host.client.proxy(EVALUATIONS)
    async with TaskSet("evaluation") as tasks:
        tasks.start("evaluation", evaluation.run(), endless=True)
        while True:
            host.waits("a request", "evaluation")
            request, evaluation.next_number = await desk.next()
            host.busy(f"evaluating {request.version}", "evaluation")
            await evaluation.request(request.version, request.step)
            await evaluation.idle()
            await desk.report(request.version, results.get_nowait(), evaluation.next_number)
    raise AssertionError("the loop above has no end")


async def start_evaluation(host: Host, tasks: TaskSet) -> None:
    """It asks for its work."""
    tasks.start("evaluation", evaluate_forever(host), endless=True)
