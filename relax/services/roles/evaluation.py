"""The evaluation role: scores fixed sets of prompts with a published version, on an engine of its own.

Consumes: requests `(version, step)`. Waits for: the next request. Unblocked by: the trainer's publication. Its groups have
ledger rows of their own kind and are outside the gate and the account (AC5). A failed sample counts as 0 in the mean.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relax.core.completion import Bools, Sampling, Session
from relax.core.error import EngineError, TaskError
from relax.core.id import GroupId, TrajectoryId, evaluation_id, trajectory_id
from relax.core.message import Prompt
from relax.core.protocol import Renderer, RolloutEngine
from relax.core.version import Version
from relax.services.ledger import EvaluationRow
from relax.services.task import Task
from relax.tasks.episode import request_seed, run_episode
from relax.tasks.score import score
from relax.weights.proof import check_proof
from relax.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """`samples` trajectories of every prompt."""

    name: str
    prompts: Sequence[Prompt]
    samples: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    version: Version
    step: int


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """`metrics` holds `eval/<set>/reward` and `eval/<set>/failed`."""

    step: int
    metrics: dict[str, float]
    rows: list[EvaluationRow]


class Evaluation:
    """`report` receives each result; `number` gives event numbers for ledger rows."""

    def __init__(
        self,
        engine: RolloutEngine,
        store: WeightStore,
        renderer: Renderer,
        tasks: Mapping[str, Task],
        sets: Sequence[EvaluationSet],
        run_seed: int,
        max_context_tokens: int,
        allowed: Bools | None,
        number: Callable[[], int],
        report: Callable[[EvaluationResult], None],
        next_number: int = 0,
    ) -> None:
        self._engine, self._store, self._renderer, self._tasks = engine, store, renderer, tasks
        self._sets, self._run_seed, self._max_context_tokens = sets, run_seed, max_context_tokens
        self._allowed = allowed
        self._number, self._report = number, report
        self._requests: asyncio.Queue[EvaluationRequest] = asyncio.Queue(maxsize=2)
        self._loaded: Version | None = None
        self.next_number = next_number

    async def request(self, version: Version, step: int) -> None:
        """Queue an evaluation; the version is held until it is done. Waits when two are waiting already."""
        self._store.pin(version)
        await self._requests.put(EvaluationRequest(version, step))

    async def idle(self) -> None:
        """Return once every request has been reported. A failure of the role ends the run, and with it this wait."""
        await self._requests.join()

    async def run(self) -> None:
        """Endless."""
        while True:
            request = await self._requests.get()
            await self._evaluate(request)
            self._store.unpin(request.version)
            self._requests.task_done()

    async def _evaluate(self, request: EvaluationRequest) -> None:
        await self._load(request.version)
        metrics: dict[str, float] = {}
        rows: list[EvaluationRow] = []
        for evaluated in self._sets:
            found = await self._run_set(evaluated, request)
            rows += found
            rewards = [row.reward if row.reward is not None else 0.0 for row in found]
            metrics[f"eval/{evaluated.name}/reward"] = float(np.mean(rewards))
            metrics[f"eval/{evaluated.name}/failed"] = float(sum(row.failure is not None for row in found))
        self._report(EvaluationResult(request.step, metrics, rows))

    async def _load(self, version: Version) -> None:
        if version == self._loaded:
            return
        await self._engine.pause("drain")
        try:
            report = await self._engine.load(version, self._store)
        finally:
            await self._engine.resume()
        check_proof("evaluation", self._store.manifest(version), report)
        self._loaded = version

    async def _run_set(self, evaluated: EvaluationSet, request: EvaluationRequest) -> list[EvaluationRow]:
        runs = []
        for prompt in evaluated.prompts:
            group = evaluation_id(self.next_number)
            self.next_number += 1
            runs += [self._sample(evaluated, request, prompt, group, sibling) for sibling in range(evaluated.samples)]
        return list(await asyncio.gather(*runs))

    async def _sample(
        self, evaluated: EvaluationSet, request: EvaluationRequest, prompt: Prompt, group: GroupId, sibling: int
    ) -> EvaluationRow:
        task = self._tasks[prompt.task]
        id: TrajectoryId = trajectory_id(group, sibling)

        def session(turn: int) -> Session:
            seed = request_seed(self._run_seed, prompt.key, sibling, turn)
            return Session(group, sibling, turn, request.version.number, seed, prefix=f"{group}" if turn == 0 else None)

        reward, failure, text = None, None, ""
        try:
            async with asyncio.timeout(task.timeout_s):
                trajectory = await run_episode(
                    prompt,
                    task.environment(),
                    self._renderer,
                    self._engine,
                    evaluated.sampling,
                    session,
                    max_context_tokens=self._max_context_tokens,
                    max_turns=task.max_turns,
                    allowed=self._allowed,
                )
            text = trajectory.response
            reward, parts = await score(prompt, trajectory, task.rewards)
            failure = next((part["failure"] for part in parts if part.get("failure")), None)
        except TimeoutError:
            failure = "timeout"
        except (TaskError, EngineError) as error:
            failure = f"{type(error).__name__}: {error}"
        return EvaluationRow(id, self._number(), evaluated.name, request.step, reward, failure, text[:2000])
