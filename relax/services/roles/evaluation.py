"""The evaluation role: scores fixed sets of prompts with a published version, on an engine of its own.

Consumes: requests `(version, step)`. Waits for: the next request. Unblocked by: the trainer's publication. Its groups have
ledger rows of their own kind and are outside the gate and the account (AC5). A failed sample counts as 0 in the mean.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from relax.core.completion import Sampling
from relax.core.error import DataError, EngineError, TaskError
from relax.core.id import GroupId, evaluation_id, trajectory_id
from relax.core.media import MediaReader
from relax.core.message import Prompt
from relax.core.protocol import Renderer, RolloutEngine
from relax.core.version import Version
from relax.core.weight import Manifest, WeightSet
from relax.services.ledger import EvaluationRow
from relax.services.pass_rate import set_metrics
from relax.services.play import EpisodeLimits, Player
from relax.services.task import Task
from relax.tasks.score import score
from relax.weights.proof import check_proof

MAX_PREPARING = 32
"""Prompts whose media are looked at together."""
LOAD_S = 600.0
"""Deadline of loading a version; nothing runs on the engine then."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """`samples` trajectories of every prompt; pass@k for each of `ks`, where a reward of `threshold` solves a prompt."""

    name: str
    prompts: Sequence[Prompt]
    samples: int
    sampling: Sampling
    ks: tuple[int, ...] = ()
    threshold: float = 1.0


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    version: Version
    step: int


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """`metrics` holds `eval/<set>/reward`, `eval/<set>/failed` and `eval/<set>/pass@<k>`, and those of each source of a mixed set."""

    step: int
    metrics: dict[str, float]
    rows: list[EvaluationRow]


class VersionStore(Protocol):
    """What an evaluation asks of the weight store."""

    async def fetch(self, version: Version) -> WeightSet: ...

    def manifest(self, version: Version) -> Manifest: ...

    def pin(self, version: Version) -> None: ...

    def unpin(self, version: Version) -> None: ...


class Evaluation:
    """`report` receives each result; `number` gives event numbers for ledger rows.

    `done` are samples that an interrupted evaluation left, by id, which are not taken again; `on_sample` is told of each new one.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        store: VersionStore,
        renderer: Renderer,
        tasks: Mapping[str, Task],
        sets: Sequence[EvaluationSet],
        limits: EpisodeLimits,
        concurrency: int,
        number: Callable[[], int],
        report: Callable[[EvaluationResult], Awaitable[None]],
        next_number: int = 0,
        done: Mapping[str, EvaluationRow] | None = None,
        on_sample: Callable[[EvaluationRow], None] = lambda row: None,
        media: MediaReader | None = None,
    ) -> None:
        self._engine, self._store, self._renderer, self._tasks = engine, store, renderer, tasks
        self._sets, self._limits = sets, limits
        self._places = asyncio.Semaphore(concurrency)
        self._number, self._report = number, report
        self._done: Mapping[str, EvaluationRow] = done or {}
        self._on_sample = on_sample
        self._requests: asyncio.Queue[EvaluationRequest] = asyncio.Queue(maxsize=2)
        self._loaded: Version | None = None
        self._media, self._is_prepared = media, media is None
        self.next_number = next_number

    async def request(self, version: Version, step: int) -> None:
        """Queue an evaluation; the version is held until it is done. Waits when two are waiting already."""
        self._store.pin(version)
        await self._requests.put(EvaluationRequest(version, step))

    async def idle(self) -> None:
        """Return once every request has been reported. A failure of the role ends the run, and with it this wait."""
        await self._requests.join()

    async def available(self) -> Sequence[Version]:
        """None: whatever was published before this process is gone."""
        return ()

    async def run(self) -> None:
        """Endless."""
        while True:
            request = await self._requests.get()
            await self._evaluate(request)
            self._store.unpin(request.version)
            self._requests.task_done()

    async def _evaluate(self, request: EvaluationRequest) -> None:
        if self._media is not None and not self._is_prepared:
            self._sets = [await _prepared(evaluated, self._media) for evaluated in self._sets]
            self._is_prepared = True
        await self._load(request.version)
        metrics: dict[str, float] = {}
        rows: list[EvaluationRow] = []
        for evaluated in self._sets:
            found = await self._run_set(evaluated, request)
            rows += [row for of_prompt in found for row in of_prompt]
            metrics |= set_metrics(
                evaluated.name, _by_source(evaluated.prompts, found), evaluated.ks, evaluated.threshold
            )
        await self._report(EvaluationResult(request.step, metrics, rows))

    async def _load(self, version: Version) -> None:
        if version == self._loaded:
            return
        async with asyncio.timeout(LOAD_S):
            await self._engine.pause("drain")
            try:
                report = await self._engine.load(version, self._store)
            finally:
                await self._engine.resume()
        check_proof("evaluation", self._store.manifest(version), report)
        self._loaded = version

    async def _run_set(self, evaluated: EvaluationSet, request: EvaluationRequest) -> list[list[EvaluationRow]]:
        """The samples of each prompt, in order."""
        player = Player(self._renderer, self._engine, evaluated.sampling, self._limits, self._media)
        runs = []
        for prompt in evaluated.prompts:
            group = evaluation_id(self.next_number)
            self.next_number += 1
            runs += [self._sample(player, evaluated, request, prompt, group, s) for s in range(evaluated.samples)]
        rows = await asyncio.gather(*runs)
        return [list(rows[start : start + evaluated.samples]) for start in range(0, len(rows), evaluated.samples)]

    async def _sample(
        self,
        player: Player,
        evaluated: EvaluationSet,
        request: EvaluationRequest,
        prompt: Prompt,
        group: GroupId,
        sibling: int,
    ) -> EvaluationRow:
        """One trajectory and its reward. Its time limit begins when the engine has a place for it."""
        id = trajectory_id(group, sibling)
        if id in self._done:
            return self._done[id]
        task = self._tasks[prompt.task]
        reward, failure, text = None, None, ""
        async with self._places:
            try:
                async with asyncio.timeout(task.timeout_s):
                    trajectory = await player.play(prompt, task, group, sibling, request.version.number)
                text = trajectory.response
                reward, parts = await score(prompt, trajectory, task.rewards)
                failure = next((part["failure"] for part in parts if part.get("failure")), None)
            except TimeoutError:
                failure = "timeout"
            except (TaskError, EngineError) as error:
                failure = f"{type(error).__name__}: {error}"
        row = EvaluationRow(id, self._number(), evaluated.name, request.step, reward, failure, text[:2000])
        self._on_sample(row)
        return row


async def _prepared(evaluated: EvaluationSet, media: MediaReader) -> EvaluationSet:
    """The set with its media looked at; prompts with a bad one are in the quarantine, and out of the set, as other bad records."""
    places = asyncio.Semaphore(MAX_PREPARING)

    async def prepare(prompt: Prompt) -> Prompt | DataError:
        async with places:
            try:
                return await media.prepare(prompt)
            except DataError as error:
                return error

    found = await asyncio.gather(*map(prepare, evaluated.prompts))
    usable = [prompt for prompt in found if isinstance(prompt, Prompt)]
    if not usable:
        raise DataError(f"evaluation set {evaluated.name!r}: none of its prompts can be used: {found[0]}")
    return replace(evaluated, prompts=usable)


def _by_source(
    prompts: Sequence[Prompt], found: Sequence[Sequence[EvaluationRow]]
) -> dict[str, list[Sequence[EvaluationRow]]]:
    groups: dict[str, list[Sequence[EvaluationRow]]] = {}
    for prompt, rows in zip(prompts, found, strict=True):
        groups.setdefault(prompt.key.source, []).append(rows)
    return groups
