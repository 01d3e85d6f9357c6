"""How long each stage of a step takes when nothing else runs, and the step times that follow for each way of placing the stages.

Used by `modes`: a recipe's own engine, trainer and weight store, without services between them. Every figure is the median of some
rounds. Left out of the bounds, so that they stay lower bounds: bus, rewards, advantages and the event loop.
"""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from relax.config.tree import RunConfig
from relax.core.batch import TrainRow
from relax.core.completion import Completion, GenerateInput, Ints, Session, frozen
from relax.core.id import group_id, sample_id, trajectory_id
from relax.core.message import Prompt
from relax.core.version import Version
from relax.data.quarantine import Quarantine
from relax.services.assembly import Assembly
from relax.services.publisher import Publisher
from relax.services.roles.trainer import measured_loss
from relax.tasks.episode import request_seed
from relax.training.checkpoint import CheckpointStore
from relax.training.packing import pack


@dataclass(frozen=True)
class StageSeconds:
    """One step's stages, in seconds. `groups` are the moments at which groups are whole, from the first request on, in order.

    `tokens` went through the trainer's forward pass in `train`, cut into micro-batches.
    """

    generate: float
    groups: tuple[float, ...]
    train: tuple[float, ...]
    tokens: float
    update: float
    snapshot: float
    publish: float
    load: float

    def trained_on(self, tokens: float) -> "StageSeconds":
        """The same step with another number of trained tokens: groups without a signal are left out of the forward pass."""
        share = tokens / self.tokens
        return replace(self, train=tuple(seconds * share for seconds in self.train), tokens=tokens)

    @property
    def trained(self) -> float:
        """All micro-batches."""
        return sum(self.train)

    @property
    def after_training(self) -> float:
        return self.update + self.snapshot + self.publish

    @property
    def in_turn(self) -> float:
        """Generate all, train all, publish, load: one device, or two that wait for each other."""
        return self.generate + self.trained + self.after_training + self.load

    @property
    def streamed(self) -> float:
        """On-policy on two devices: a micro-batch is trained as soon as its groups are whole."""
        end, batches = 0.0, len(self.train)
        for index, seconds in enumerate(self.train):
            last = -(-len(self.groups) * (index + 1) // batches) - 1
            end = max(end, self.groups[last]) + seconds
        return max(end, self.generate) + self.after_training + self.load

    @property
    def overlapped(self) -> float:
        """Asynchronous on two devices: the busier one."""
        return max(self.generate + self.load, self.trained + self.after_training)


async def measure(config: RunConfig, directory: Path, rounds: int) -> StageSeconds:
    """The stages of the configuration's only stage, on its own threads; the policy is not changed."""
    assembly = Assembly(config, Quarantine(directory / "quarantine.jsonl"))
    try:
        return await Stages(assembly, directory).measure(rounds)
    finally:
        await assembly.close()


class Stages:
    def __init__(self, assembly: Assembly, directory: Path) -> None:
        self._assembly, self._directory = assembly, directory
        self._stage = assembly.config.stages[0]
        self._algorithm = assembly.algorithm(self._stage)
        self._engine = assembly.engine("engine-0")
        self._compute = assembly.compute("trainer")
        self._prompts = iter(assembly.supply.source(self._stage))
        self._version = Version()

    async def measure(self, rounds: int) -> StageSeconds:
        await self._assembly.begin_optimizer(0)
        steps = [await self._step(round) for round in range(rounds + 1)][1:]  # the first one warms up
        fields = ("generate", "tokens", "update", "snapshot", "publish", "load")
        medians = {name: median(getattr(step, name) for step in steps) for name in fields}
        groups = [median(times) for times in zip(*(step.groups for step in steps), strict=True)]
        batches = min(len(step.train) for step in steps)
        train = [median(step.train[index] for step in steps) for index in range(batches)]
        left_over = median(sum(step.train) for step in steps) - sum(train)
        train = [seconds + left_over / batches for seconds in train]
        return StageSeconds(groups=tuple(groups), train=tuple(train), **medians)

    async def _step(self, round: int) -> StageSeconds:
        publish = await self._timed(self._publish())
        load = await self._timed(self._load())
        prompts = [next(self._prompts) for _ in range(self._stage.groups_per_step)]
        started, ended = time.perf_counter(), list[float]()
        found = await asyncio.gather(*(self._group(index, prompt, ended) for index, prompt in enumerate(prompts)))
        generate = time.perf_counter() - started
        rows = [row for group in found for row in group]
        train, tokens = [], 0.0
        for batch in pack(rows, self._assembly.config.training.microbatch_tokens):
            began = time.perf_counter()
            result = await self._compute.run(
                self._assembly.backend.forward_backward, [[batch]], measured_loss(self._algorithm, 0)
            )
            train.append(time.perf_counter() - began)
            tokens += float(result.measures["training/tokens/forward"].value)
        update = await self._timed(self._compute.run(self._assembly.backend.optim_step, 1e9))
        snapshot = await self._timed(self._snapshot(round))
        groups = tuple(sorted(moment - started for moment in ended))
        return StageSeconds(generate, groups, tuple(train), tokens, update, snapshot, publish, load)

    async def _group(self, index: int, prompt: Prompt, ended: list[float]) -> list[TrainRow]:
        """All siblings of one prompt, as the rollout role asks for them."""
        token_ids = self._assembly.renderer.encode(prompt.messages).token_ids
        group, seed = group_id(index), self._assembly.config.run.seed
        sessions = [
            Session(group, sibling, 0, 0, request_seed(seed, prompt.key, sibling, 0), prefix=str(group))
            for sibling in range(self._algorithm.group_size)
        ]
        sampling = self._assembly.sampling()
        work = [self._engine.generate(GenerateInput(token_ids), sampling, session) for session in sessions]
        completions = await asyncio.gather(*work)
        ended.append(time.perf_counter())
        return [_row(index, sibling, token_ids, one) for sibling, one in enumerate(completions)]

    async def _publish(self) -> None:
        """As the publisher does it: the probe, then the copy."""
        assembly = self._assembly
        publisher = Publisher(assembly.store, assembly.backend, self._compute, [], assembly.probe)
        publisher.version = self._version = self._version.next()
        await publisher.first(self._version.number)

    async def _load(self) -> None:
        if (await self._engine.status()).version is not None:
            await self._engine.pause("recompute")
        await self._engine.load(self._version, self._assembly.store)
        await self._engine.resume()

    async def _snapshot(self, round: int) -> None:
        captured = await self._compute.run(self._assembly.backend.capture)
        store = CheckpointStore(self._directory / "snapshots", 2)
        await self._assembly.compute("ledger").run(lambda: store.write(round, lambda path: captured.write(str(path))))

    async def _timed(self, work: Awaitable[Any]) -> float:
        started = time.perf_counter()
        await work
        return time.perf_counter() - started


def _row(index: int, sibling: int, prompt: Ints, completion: Completion) -> TrainRow:
    """A row as the trainer gets it, with an advantage of either sign."""
    sampled, length = len(completion), len(prompt) + len(completion)
    mask = frozen(np.arange(length) >= len(prompt))

    def padded(values: Any, before: int | float, dtype: Any) -> Any:
        return frozen(np.concatenate([np.full(len(prompt), before), np.asarray(values)]).astype(dtype))

    columns = {
        "advantages": padded(np.full(sampled, 1.0 if sibling % 2 else -1.0), 0.0, np.float32),
        "behaviour_logprobs": padded(completion.logprobs, 0.0, np.float32),
        "versions": padded(completion.versions, -1, np.int32),
    }
    token_ids = padded(completion.token_ids, 0, np.int32).copy()
    token_ids[: len(prompt)] = prompt
    sample = sample_id(trajectory_id(group_id(index), sibling), 0)
    return TrainRow(sample, frozen(token_ids), mask, frozen(mask.astype(np.float32)), columns)
