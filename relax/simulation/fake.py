"""Everything around the services that tier 2 replaces: prompts, renderer, environment, reward, engine and backend faults.

Built by `services`. Tokens and replies are functions of what was asked (DE1), so that the audit can tell whose they are.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from relax.core.batch import ForwardBackward, Shards, StepReport
from relax.core.completion import Ints, frozen
from relax.core.error import InvariantError, TaskError
from relax.core.message import Json, Message, Prompt, PromptKey, text_message
from relax.core.protocol import Clock, Encoded, LossFn, Step, WeightReader
from relax.core.seed import derive_seed
from relax.core.trajectory import Score, Trajectory
from relax.core.version import Version
from relax.core.weight import LoadReport
from relax.engines.config import EmulatedEngineConfig
from relax.engines.emulated import EmulatedEngine
from relax.simulation.scenario import Scenario, TaskScenario
from relax.training.config import EmulatedConfig
from relax.training.emulated import EmulatedBackend

VOCABULARY = 16
MAX_TOKENS = 6
NUM_RECORDS = 7
TASK = "toy"
STALL_S = 700.0
"""Longer than the lease of any role that judges."""


class Prompts:
    """Core's `Source`: endless passes over a few records; some answers are not text. What it has observed decides the questions."""

    def __init__(self, seed: int, bad_reference: float) -> None:
        self._seed, self._bad_reference = seed, bad_reference
        self._next, self._seen = 0, 0
        self.accepted: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        number, self._next = self._next, self._next + 1
        pass_number, record = divmod(number, NUM_RECORDS)
        is_bad = Random(f"{self._seed} prompt {number}").random() < self._bad_reference
        message = text_message("user", f"question {record} of pass {pass_number}, {self._seen} seen")
        key = PromptKey(TASK, record, pass_number)
        return Prompt(key, TASK, (message,), None if is_bad else f"answer {record}")

    def observe(self, key: PromptKey, rewards: Sequence[float]) -> None:
        self._seen = (31 * self._seen + key.record + int(sum(rewards))) % 1000

    def state(self) -> dict[str, Json]:
        return {"next": self._next, "seen": self._seen}

    def restore(self, state: Mapping[str, Json]) -> None:
        self._next, self._seen = state["next"], state["seen"]


class PlainRenderer:
    """Core's `Renderer`: a few tokens per message; every id may end a turn, as emulated engines stop anywhere."""

    stops = tuple(range(VOCABULARY))

    def __init__(self, branch_rate: float) -> None:
        self._branch_rate = branch_rate

    def encode(self, messages: Sequence[Message], generate: bool = True) -> Encoded:
        return Encoded(_tokens("".join(message.text for message in messages)))

    def extend(self, history: Sequence[Message], token_ids: Ints, messages: Sequence[Message]) -> Encoded | None:
        """None for a share of histories, which then branch (TK2)."""
        share = derive_seed(0, *(message.text for message in history)) % 1000 / 1000
        return None if share < self._branch_rate else self.encode(messages)

    def encode_reply(self, text: str) -> Ints:
        return _tokens(text)

    def decode(self, token_ids: Ints) -> str:
        return " ".join(map(str, token_ids.tolist()))

    def is_stable(self, token_ids: Ints) -> bool:
        return True


def _tokens(text: str) -> Ints:
    codes = np.frombuffer(text.encode()[-6:] or b"\x00", dtype=np.uint8)
    return frozen((codes % VOCABULARY).astype(np.int32))


class Turns:
    """Core's `Environment`: asks again until a drawn number of turns; it may fail at any of them."""

    def __init__(self, random: Random, task: TaskScenario) -> None:
        self._random, self._task = random, task
        self._left = 0

    async def start(self, prompt: Prompt) -> tuple[Message, ...]:
        self._left = 1 + prompt.key.record % self._task.turns
        return prompt.messages

    async def step(self, reply: Message) -> Step:
        await asyncio.sleep(self._random.random() * self._task.delay_s)
        if self._random.random() < self._task.environment_failure:
            raise TaskError("the environment broke")
        self._left -= 1
        return Step((text_message("user", "again"),)) if self._left else Step(done="done")

    async def close(self) -> None: ...


class Judge:
    """Core's `Reward`: 0 or 1 by the reply; it may fail, and it may outlive the lease of its role."""

    def __init__(self, random: Random, task: TaskScenario) -> None:
        self._random, self._task = random, task

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        stalls = self._random.random() < self._task.reward_stall
        await asyncio.sleep(STALL_S if stalls else self._random.random() * self._task.delay_s)
        if self._random.random() < self._task.reward_failure:
            raise TaskError("the judge broke")
        return Score(float(derive_seed(0, trajectory.response) % 2))


class FaultyEngine(EmulatedEngine):
    """An emulated engine whose loads may leave a packed copy behind: its logprobs then tell (WS4), unless nobody asks."""

    def __init__(
        self, config: EmulatedEngineConfig, clock: Clock, name: str, seed: int, random: Random, damage: float
    ) -> None:
        super().__init__(config, clock, name, seed)
        self._random, self._damage = random, damage
        self._is_damaged = False

    async def load(self, version: Version, reader: WeightReader) -> LoadReport:
        report = await super().load(version, reader)
        self._is_damaged = self._random.random() < self._damage
        if self._is_damaged and report.probe_logprobs is not None:
            return replace(report, probe_logprobs=report.probe_logprobs + np.float32(1.0))
        return report

    async def resume(self) -> None:
        if self._is_damaged:
            raise InvariantError("WS4", "an engine with damaged weights was told to go on")
        await super().resume()


class RecordingBackend(EmulatedBackend):
    """An emulated backend that remembers which samples each step trained, and saves it; some steps are not finite."""

    def __init__(self, random: Random, nonfinite_rate: float, saved: dict[int, Any] | None = None) -> None:
        super().__init__(EmulatedConfig())
        self._random, self._nonfinite_rate = random, nonfinite_rate
        self._saved = {} if saved is None else saved
        self._seen: list[str] = []
        self.steps: list[list[str]] = []

    def forward_backward(self, shards: Shards, loss: LossFn) -> ForwardBackward:
        self._seen += [row.id for batches in shards for batch in batches for row in batch]
        result = super().forward_backward(shards, loss)
        return replace(result, finite=self._random.random() >= self._nonfinite_rate)

    def optim_step(self, normalizer: float) -> StepReport:
        self.steps.append(self._seen)
        self._seen = []
        return super().optim_step(normalizer)

    def capture(self) -> "CapturedRecord":  # type: ignore[override]
        return CapturedRecord((self._applied, self._stage, [list(step) for step in self.steps]), self._saved)

    def load(self, path: str) -> None:
        self._applied, self._stage, steps = self._saved[int(path)]
        self.steps, self._seen = [list(step) for step in steps], []


@dataclass(frozen=True, slots=True)
class CapturedRecord:
    """What a `RecordingBackend` was; writing puts it among the saved ones, under the step in the path."""

    state: Any
    saved: dict[int, Any]

    def write(self, path: str) -> None:
        self.saved[int(Path(path).parent.name)] = self.state


def engine_config(scenario: Scenario) -> EmulatedEngineConfig:
    fleet = scenario.fleet
    return EmulatedEngineConfig(
        slots=fleet.slots,
        vocabulary_size=VOCABULARY,
        length="uniform",
        mean_s=fleet.mean_s,
        sigma=fleet.sigma,
        load_s=fleet.load_s,
        failure_rate=fleet.request_failure,
        load_failure_rate=fleet.load_failure,
    )


def algorithm_fields(name: str, group_size: int, kl_weight: float) -> Mapping[str, Any]:
    """The fields of an algorithm's node."""
    return {} if name == "supervised" else {"group_size": group_size, "kl_weight": kl_weight}
