"""What only the whole application can say about a configuration: staleness without correction, the bus's capacity.

Called by `relax config check` and at the start of `relax train`. Loads no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.config_critic import CriticConfig
from relax.config.section import StageConfig
from relax.config.tree import RunConfig
from relax.core.error import ConfigError
from relax.services.check_runtime import runtime_problems
from relax.services.controller import GroupSize
from relax.services.gate_state import GatePolicy
from relax.training.config import ScheduleConfig
from relax.training.table import value_problem

_TOKEN_BYTES = 40
"""Bytes per token over all columns of a trajectory and its samples, text included."""
_TEACHER_BYTES = 4
"""Bytes of a logprob, and of a token id, that a teacher writes."""
_ROW_BYTES = 4096
"""Bytes per row for turns, parts of the reward and other texts."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a stage may put on the bus: rows and bytes of one group, and how many groups it must hold."""

    size: GroupSize
    groups: int

    @property
    def rows(self) -> int:
        return self.size.rows * self.groups

    @property
    def num_bytes(self) -> int:
        return self.size.num_bytes * self.groups


def max_context_tokens(config: RunConfig) -> int:
    """The longest history: the configured limit, else the longest prompt plus the longest completion."""
    if config.rollout.max_context_tokens is not None:
        return config.rollout.max_context_tokens
    return config.data.max_prompt_tokens + config.rollout.sampling.max_tokens


def capacity(config: RunConfig, stage: StageConfig) -> Capacity:
    """Room for `(S + 1) * B` groups and the oversampled, and for the steps that no snapshot has settled yet (TQ5)."""
    siblings: int = stage.algorithm.group_size  # type: ignore[attr-defined]
    tokens = max_context_tokens(config)
    rows = 1 + 2 * siblings
    num_bytes = _ROW_BYTES * rows + _TOKEN_BYTES * tokens * siblings + 8 * config.data.max_prompt_tokens
    if hasattr(stage.algorithm, "teacher"):
        num_bytes += _TEACHER_BYTES * (1 + 2 * getattr(stage.algorithm, "top_k", 0)) * tokens * siblings
    if config.data.media is not None:
        num_bytes += int(config.data.media.max_feature_bytes)
    unsettled = snapshot_interval(config, stage) if config.bus.journal else 1
    groups = (config.max_staleness_of(stage) + 1 + unsettled) * stage.groups_per_step + config.rollout.oversample
    return Capacity(GroupSize(siblings, rows, num_bytes), groups)


def gate_policy(config: RunConfig, stage: StageConfig, samples: bool) -> GatePolicy:
    """The gate's policy in a stage: nothing is late that is not sampled, nor at `max_staleness` 0 (ST5)."""
    rollout = config.rollout
    over_age = rollout.over_age if samples and config.max_staleness_of(stage) > 0 else "wait"
    return GatePolicy(over_age, rollout.max_requeues, rollout.oversample if samples else 0)


def snapshot_interval(config: RunConfig, stage: StageConfig) -> int:
    """The most steps between two snapshots of a stage: one is always taken at its end, and with each checkpoint."""
    every = config.training.snapshot_every or config.training.checkpoint.every
    return min(every, config.training.checkpoint.every, stage.steps)


def max_rows(config: RunConfig, stage: StageConfig) -> int:
    """`bus.max_rows`, or what the stage needs when it is `auto`."""
    return capacity(config, stage).rows if config.bus.max_rows == "auto" else config.bus.max_rows


def _critic_problems(config: RunConfig, stage: StageConfig) -> Iterator[str]:
    """What is wrong with the critic of a stage, where it has one."""
    node = getattr(stage.algorithm, "critic", None)
    if not isinstance(node, CriticConfig):
        return
    problem = value_problem(config.training.backend.type)
    if problem is not None:
        yield problem
    if node.warm_up_steps >= stage.steps:
        yield f"warm_up_steps is {node.warm_up_steps} of the stage's {stage.steps} steps, so the policy is never trained; lower it"
    schedule = node.schedule or config.schedule_of(stage)
    updates: int = stage.algorithm.count_critic_updates(stage.steps)  # type: ignore[attr-defined]
    unfit = schedule.problem(updates) if isinstance(schedule, ScheduleConfig) else None
    if unfit is not None:
        yield unfit


def check_run(config: RunConfig) -> list[str]:
    """Warnings (ST9). Raises ConfigError listing every stage that cannot work."""
    problems: list[str] = []
    backend, dtype = config.training.backend, config.model.dtype
    dtypes = getattr(backend, "dtypes", (dtype,))
    if dtype not in dtypes:
        problems.append(f"model.dtype: backend {backend.type} trains in {', '.join(dtypes)}, not in {dtype}")
    problems += runtime_problems(config)
    warnings: list[str] = []
    for index, stage in enumerate(config.stages):
        path = f"stages.{index}"
        needed = capacity(config, stage)
        if max_rows(config, stage) < needed.rows:
            problems.append(
                f"bus.max_rows: {config.bus.max_rows} is too small for {path} ({stage.name}), which needs {needed.rows} [TQ5]"
            )
        if config.bus.max_bytes < needed.num_bytes:
            problems.append(
                f"bus.max_bytes: {config.bus.max_bytes} is too small for {path} ({stage.name}), which may need {needed.num_bytes}; "
                "raise it, or lower groups_per_step, group_size, max_staleness, rollout.oversample, training.snapshot_every, "
                f"{'data.media.max_feature_bytes, ' if config.data.media is not None else ''}or the token limits [TQ5]"
            )
        problems += [f"{path}.algorithm.critic: {text}" for text in _critic_problems(config, stage)]
        schedule = config.schedule_of(stage)
        unfit = schedule.problem(stage.num_updates) if isinstance(schedule, ScheduleConfig) else None
        if unfit is not None:
            problems.append(f"{path}: {unfit}")
        if getattr(stage.algorithm, "teacher", stage) is None:
            problems.append(
                f"{path}.algorithm.teacher: is missing; {stage.algorithm.type} needs the model to learn from: set teacher.path"
            )
        staleness = config.max_staleness_of(stage)
        algorithm: AlgorithmConfig = stage.algorithm  # type: ignore[assignment]
        if staleness > 0 and not algorithm.corrects_staleness:
            warnings.append(
                f"{path}.algorithm: {algorithm.type} trains on samples up to {staleness} steps old and "
                f"{algorithm.staleness_answer}; set {', or '.join(('max_staleness: 0', *algorithm.staleness_choices))} [ST9]"
            )
    if problems:
        raise ConfigError(problems)
    return warnings
