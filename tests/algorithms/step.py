"""A step as the trainer sees it, with a real tiny model and without bus and controller: taken groups go in, weights come out.

Used by the tests of step scope and of what every algorithm must keep (LO1, LO3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from relax.algorithms.advantage import token_advantages
from relax.algorithms.table import ALGORITHMS
from relax.bus.row import Fetched, Receipt, RowPut
from relax.core.algorithm import Algorithm
from relax.core.batch import TrainRow
from relax.core.completion import frozen
from relax.core.id import GroupId, group_id, sample_id, trajectory_id
from relax.core.protocol import GroupOutcome
from relax.services.access import StepOutcome, Taken
from relax.services.critic import CriticWeights
from relax.services.roles.critic import Critic
from relax.services.roles.trainer import Trainer
from relax.services.roles.update import TrainerSettings
from relax.training.config import ConstantConfig, SgdConfig, TorchConfig
from relax.training.torch_backend import TorchBackend
from relax.training.value_backend import ValueBackend
from tests.training.setting import make_backend, make_model, vocabulary

STEP = 7


def build(name: str, **fields: Any) -> Algorithm:
    algorithm: Algorithm = ALGORITHMS.component(name)(
        ALGORITHMS.config_class(name).model_validate({"type": name, **fields})
    )
    return algorithm


@dataclass(frozen=True)
class Told:
    """One trajectory: three spans of a prompt, a turn, an observation and a second turn; masks are true on the turns."""

    token_ids: np.ndarray
    mask: np.ndarray
    behaviour: np.ndarray
    reference: np.ndarray
    reward: float


def tell(seed: int) -> Told:
    """A trajectory of a seed, under policies near the model's; ragged."""
    rng = np.random.default_rng(seed)
    prompt, first, observed, second = rng.integers(2, 6, 4)
    mask = np.concatenate([np.arange(n) < (n if sampled else 0) for n, sampled in
                           ((prompt, False), (first, True), (observed, False), (second, True))])  # fmt: skip
    token_ids = rng.integers(0, 95, len(mask)).astype(np.int32)
    logprobs = np.where(mask, _logprobs(token_ids.tobytes(), mask.tobytes()), 0)
    near = [np.where(mask, logprobs + rng.normal(0, 0.3, len(mask)), 0).astype(np.float32) for _ in range(2)]
    return Told(token_ids, mask, near[0], near[1], float(rng.uniform()))


@cache
def _logprobs(token_ids: bytes, mask: bytes) -> np.ndarray:
    ids, flags = np.frombuffer(token_ids, np.int32), np.frombuffer(mask, np.bool_)
    row = TrainRow(sample_id(trajectory_id(group_id(0), 0), 0), ids, flags, flags.astype(np.float32))
    return _model().logprobs([[(row,)]])[0][0][0]


@cache
def _model() -> TorchBackend:
    return make_backend()


def take(algorithm: Algorithm, number: int, cut: bool = False, version: int = STEP) -> Fetched:
    """A group as the trainer fetches it. With `cut` each trajectory is two samples of the same history, one turn trained in each."""
    group = group_id(number)
    told = [tell(100 * number + sibling) for sibling in range(algorithm.group_size)]
    advantages = np.zeros(len(told))
    if algorithm.advantages is not None:
        rewards = np.array([one.reward for one in told])
        advantages = algorithm.advantages(GroupOutcome(rewards, np.ones(len(told)), np.zeros(len(told), dtype=bool)))
    cells: dict[str, dict[str, Any]] = {group: {"kept": True}}
    ids: list[str] = []
    for sibling, (one, advantage) in enumerate(zip(told, advantages, strict=True)):
        _add(cells, ids, group, sibling, one, float(advantage), cut, version)
    return Fetched(tuple(ids), cells)


def _add(
    cells: dict[str, dict[str, Any]],
    ids: list[str],
    group: GroupId,
    sibling: int,
    one: Told,
    advantage: float,
    cut: bool,
    version: int,
) -> None:
    length, trajectory = len(one.mask), trajectory_id(group, sibling)
    turn = np.cumsum(np.diff(one.mask.astype(int), prepend=0) == 1)  # 1 from the first turn on, 2 from the second
    masks = [one.mask & (turn == 1), one.mask & (turn == 2)] if cut else [one.mask]
    copies = len(masks)
    joined = np.concatenate(masks)
    cells[trajectory] = {
        "token_ids": frozen(np.tile(one.token_ids, copies)),
        "mask": frozen(joined),
        "behaviour_logprobs": frozen(np.where(joined, np.tile(one.behaviour, copies), 0).astype(np.float32)),
        "versions": frozen(np.where(joined, version, -1).astype(np.int32)),
        "turns": {"turns": [], "messages": [], "end": "done", "info": {}},
        "reward": one.reward,
    }
    for index, mask in enumerate(masks):
        sample = sample_id(trajectory, index)
        ids.append(sample)
        cells[sample] = {
            "span": frozen(np.array([index * length, (index + 1) * length])),
            "advantages": frozen(token_advantages(advantage, mask)),
            "reference_logprobs": frozen(np.where(mask, one.reference, 0).astype(np.float32)),
            **_teacher_cells(one, mask),
        }


def _teacher_cells(one: Told, mask: np.ndarray) -> dict[str, Any]:
    """What a teacher near the model, with three opinions on each token, would write."""
    logprobs = np.where(mask, one.behaviour - 0.3 * np.sin(one.token_ids), 0)
    top = -1.0 - (np.arange(3) + one.token_ids[:, None]) % 5
    return {
        "teacher_logprobs": frozen(logprobs.astype(np.float32)),
        "teacher_top_ids": frozen(((np.arange(3) + one.token_ids[:, None]) % 95).astype(np.int32)),
        "teacher_top_logprobs": frozen(np.where(mask[:, None], top, 0).astype(np.float32)),
    }


@dataclass
class Stand:
    """Bus and controller at once: hands out what it was given, one receipt after the other, and keeps the outcome."""

    portions: list[Fetched]
    on_take: Callable[[int], None] = lambda number: None
    outcomes: list[StepOutcome] = field(default_factory=list)
    acked: list[str] = field(default_factory=list)
    dumped: list[tuple[int, Sequence[TrainRow]]] = field(default_factory=list)
    published: list[tuple[int, bool]] = field(default_factory=list)
    _given: int = 0

    async def take(self, holder: str) -> Taken:
        self.on_take(self._given)
        if self._given == len(self.portions):
            return Taken(STEP, None)
        fetched = self.portions[self._given]
        self._given += 1
        return Taken(STEP, Receipt(f"lease {self._given - 1}", "trainer", holder, fetched.ids, ()))

    async def fetch(self, receipt: Receipt, columns: Sequence[str] | None = None) -> Fetched:
        return self.portions[int(receipt.lease.split()[1])]

    async def put(self, puts: Sequence[RowPut], lease: str) -> None:
        for put in puts:
            self.portions[int(lease.split()[1])].cells[put.id].update(put.cells)  # type: ignore[attr-defined]

    async def ack(self, lease: str) -> None:
        self.acked.append(lease)

    async def applied(self, outcome: StepOutcome) -> int:
        self.outcomes.append(outcome)
        return STEP + 1

    async def publish(self, step: int, applied: bool) -> None:
        self.published.append((step, applied))

    def dump(self, step: int, rows: Sequence[TrainRow]) -> None:
        self.dumped.append((step, rows))


class Inline:
    """A `Compute` that calls at once."""

    busy_s = 0.0

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def close(self) -> None: ...


def plain_backend(lr: float = 1.0, **arguments: Any) -> TorchBackend:
    """Plain gradient descent without clipping: the weights move by the gradient."""
    return make_backend(optimizer=SgdConfig(lr=lr), grad_clip=None, **arguments)


def value_backend(seed: int = 0, **arguments: Any) -> ValueBackend:
    """A critic's. Its head is not zero, so that values differ from token to token."""
    arguments = {"vocabulary": vocabulary(), **arguments}
    backend = ValueBackend(TorchConfig(device="cpu"), make_model(seed), grad_clip=None, **arguments)
    head = backend._trained.model.get_output_embeddings()
    with torch.no_grad():
        head.weight.copy_(0.1 * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed)))
    return backend


async def critic_weights(backend: ValueBackend | None = None, lr: float = 0.02) -> CriticWeights:
    """Begun at STEP, with plain gradient descent."""
    weights = CriticWeights(backend or value_backend(), Inline())
    await weights.begin(SgdConfig(lr=lr), ConstantConfig(), 100, STEP)
    return weights


async def train_step(
    algorithm: Algorithm, stand: Stand, backend: Any = None, settings: TrainerSettings | None = None
) -> Any:
    """Train one step; returns the backend."""
    backend = backend or plain_backend()
    settings = settings or TrainerSettings(10_000, max_staleness=0)
    critic = None
    if algorithm.critic is not None:
        critic = Critic(stand, await critic_weights(), algorithm, settings)  # type: ignore[arg-type]
    trainer = Trainer(
        stand,  # type: ignore[arg-type]
        stand,  # type: ignore[arg-type]
        backend,
        Inline(),
        algorithm,
        settings,
        stand.publish,
        stand.dump,
        critic,
    )
    await trainer.step(STEP)
    return backend


def moved(backend: Any) -> torch.Tensor:
    """How far every weight is from where it began."""
    first, last = _model().export(), backend.export()
    return torch.cat([(last[name] - first[name]).flatten().double() for name in first])
