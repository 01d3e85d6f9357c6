"""The critic's weights between steps: a value model, its optimizer, and the step that both belong to; opened, written and read here.

Owned by whoever owns the trainer: they begin, are captured and are loaded together with the policy, or not at all (B9). The critic
role moves them from step to step.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from relax.algorithms.config_critic import CriticConfig
from relax.config.section import StageConfig
from relax.config.tree import RunConfig
from relax.core.algorithm import Algorithm
from relax.core.batch import Shards
from relax.core.completion import Floats
from relax.core.error import UserError
from relax.core.protocol import Captured, Compute, TrainBackend
from relax.model.load import load_model
from relax.model.source import model_folder
from relax.training.checkpoint import read_meta
from relax.training.table import VALUE_BACKENDS, value_problem

if TYPE_CHECKING:
    from relax.services.assembly import Assembly

CRITIC_FOLDER = "critic"
"""Beside the policy's in a checkpoint or snapshot."""
FILE = "critic.json"


class ValueBackend(TrainBackend, Protocol):
    """A backend around a value model."""

    def values(self, shards: Shards) -> list[list[list[Floats]]]:
        """Per replica, micro-batch and row: float32[T], the value before each masked token, 0 elsewhere."""
        ...


class CriticWeights:
    """`step` is the one that the weights belong to: they have learned from all before it. -1 until they have begun."""

    def __init__(self, backend: ValueBackend, compute: Compute) -> None:
        self.backend, self.compute = backend, compute
        self.step = -1

    async def begin(self, optimizer: Any, schedule: Any, total_updates: int, step: int) -> None:
        """Start a stage at `step` with a fresh optimizer; the weights stay as they are."""
        await self.compute.run(self.backend.begin, optimizer, schedule, total_updates)
        self.step = step

    async def capture(self) -> Captured:
        """A copy of all that `load` needs; between two steps."""
        return CapturedCritic(await self.compute.run(self.backend.capture), self.step)

    async def load(self, folder: Path, step: int) -> None:
        """Go on from what a capture of `step` wrote into `folder`; call `begin` first.

        Raises UserError, with the weights as they were, when there is none, or it is of another step.
        """
        _check_saved(folder, step)
        await self.compute.run(self.backend.load, str(folder))
        self.step = step


@dataclass(frozen=True, slots=True)
class CapturedCritic:
    """Core's `Captured` of a critic."""

    backend: Captured
    step: int

    def write(self, path: str) -> None:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.write(path)
        (folder / FILE).write_text(json.dumps({"step": self.step}))


@dataclass(frozen=True, slots=True)
class CapturedBoth:
    """Core's `Captured` of policy and critic of one moment: `write` makes the critic's folder beside the policy's."""

    policy: Captured
    critic: Captured

    def write(self, path: str) -> None:
        self.policy.write(path)
        self.critic.write(str(Path(path).parent / CRITIC_FOLDER))


async def open_critic(assembly: "Assembly", index: int, model: Any = None) -> CriticWeights | None:
    """A fresh critic at the beginning of stage `index`; None when its algorithm has none.

    It starts from `critic.model`, else from `model` (which becomes the critic's), else from the policy as it is now. Raises UserError for
    a backend that trains no value model.
    """
    stage = assembly.config.stages[index]
    functions = assembly.algorithm(stage).critic
    if functions is None:
        return None
    config, node = assembly.config, _node_of(stage)
    problem = value_problem(config.training.backend.type)
    if problem is not None:
        raise UserError(f"algorithm {stage.algorithm.type!r} has a critic, and {problem}")
    compute = assembly.compute("critic")
    if node.model is not None:
        folder = model_folder(node.model, cache=config.model.cache)
        model = await compute.run(load_model, folder, "pretrained", config.model.dtype)
    elif model is None:
        model = await compute.run(assembly.copy_model)
    backend: ValueBackend = VALUE_BACKENDS.component(config.training.backend.type)(
        config.training.backend,
        model=model,
        vocabulary=assembly.vocabulary,
        grad_clip=node.grad_clip,
        deterministic=config.run.deterministic,
        family=assembly.family,
    )
    assembly.sharing.add("critic", backend)
    weights = CriticWeights(backend, compute)
    total = stage.steps * functions.epochs * functions.updates
    first = sum(before.steps for before in config.stages[:index])
    optimizer, schedule = node.optimizer or config.optimizer_of(stage), node.schedule or config.schedule_of(stage)
    await weights.begin(optimizer, schedule, total, first)
    return weights


async def load_critic(assembly: "Assembly", index: int, policy: Path, model: Any = None) -> CriticWeights | None:
    """The critic that was saved beside the policy in folder `policy`, during stage `index`; None when its algorithm has none."""
    weights = await open_critic(assembly, index, model)
    if weights is not None:
        await weights.load(policy.parent / CRITIC_FOLDER, int(read_meta(policy.parent)["step"]))
    return weights


def first_policy_step(config: RunConfig, index: int, algorithm: Algorithm) -> int:
    """The first step of stage `index` that trains the policy: the critic may warm up before it."""
    first = sum(stage.steps for stage in config.stages[:index])
    return first if algorithm.critic is None else first + algorithm.critic.warm_up_steps


def _node_of(stage: StageConfig) -> CriticConfig:
    node = getattr(stage.algorithm, "critic", None)
    if not isinstance(node, CriticConfig):
        raise UserError(
            f"algorithm {stage.algorithm.type!r} has a critic, but its configuration has no field `critic` that says how it is "
            "trained; give it one of the class relax.algorithms.config_critic:CriticConfig"
        )
    return node


def _check_saved(folder: Path, step: int) -> None:
    try:
        saved = json.loads((folder / FILE).read_text())["step"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"[B9] {folder} holds no critic: {error}; its weights belong to those of the policy, so resume from a checkpoint that "
            "has both, or start a new run from the policy alone"
        ) from error
    if saved != step:
        raise UserError(
            f"[B9] the critic in {folder} is of step {saved}, the policy beside it of step {step}; resume from a checkpoint whose "
            "two parts were written together"
        )
