"""The root of the configuration: one frozen typed tree that everything in a run is built from.

Made by `load.load_config`; read by services, which hand each room its own node. The rules here are those that need two
sections at once. Whatever needs an algorithm object (ST9, the bus's capacity) is checked by services.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Protocol, Self, cast

from pydantic import Field, model_validator

from relax.config.base import ComponentConfig, Config, KeyPath, Violation, check_rules, rule
from relax.config.component import component
from relax.config.judge import JudgeSection
from relax.config.section import (
    BusSection,
    DataSection,
    EvalSection,
    ModelSection,
    Name,
    RolloutSection,
    RunSection,
    StageConfig,
    TaskConfig,
    TrainingSection,
    WeightsSection,
    repeated_names,
)
from relax.config.suggestion import suggestion

Monitors = tuple[Annotated[ComponentConfig, component("relax.services.monitors.table:MONITORS")], ...]


class SourceNode(Protocol):
    """What the tree reads of any data source's node."""

    @property
    def name(self) -> str: ...
    @property
    def task(self) -> str: ...


def source_node(node: ComponentConfig) -> SourceNode:
    """A source's node under the fields that every source has."""
    return cast(SourceNode, node)


def group_size_of(stage: StageConfig) -> int:
    """Siblings in a group: the one field that every algorithm's node has."""
    return cast(int, stage.algorithm.group_size)  # type: ignore[attr-defined]


class RunConfig(Config):
    """A whole run."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    """Version of this file's format."""
    run: RunSection = Field(default_factory=RunSection)
    """The run itself: name, folder, seed."""
    runtime: Annotated[ComponentConfig, component("relax.runtime.table:RUNTIMES", default="local")] = ComponentConfig(
        type="local"
    )
    """Where roles live."""
    model: ModelSection
    """The policy that is trained."""
    data: DataSection
    """What the policy is asked."""
    tasks: Annotated[dict[Name, TaskConfig], Field(min_length=1)]
    """How trajectories are made and judged, by task; a record's source names its task."""
    judges: dict[Name, JudgeSection] = Field(default_factory=dict)
    """Models that rewards of type `judge` and the like ask, by name; each has engines of its own."""
    stages: Annotated[tuple[StageConfig, ...], Field(min_length=1)]
    """What is trained, in order."""
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    """How samples are made, and how old they may be."""
    training: TrainingSection = Field(default_factory=TrainingSection)
    """How gradients are made and applied."""
    weights: WeightsSection = Field(default_factory=WeightsSection)
    """How weight versions travel."""
    bus: BusSection = Field(default_factory=BusSection)
    """The TransferQueue."""
    eval: EvalSection = Field(default_factory=EvalSection)
    """Evaluation while training."""
    monitors: Monitors = (ComponentConfig(type="console"), ComponentConfig(type="jsonl"))
    """Where metrics go."""

    def sources_of(self, stage: StageConfig) -> tuple[ComponentConfig, ...]:
        """The data sources that a stage uses, in the order of `data.sources`."""
        return tuple(source for source in self.data.sources if _uses(stage, source))

    def max_staleness_of(self, stage: StageConfig) -> int:
        """The stage's own bound (0 is one), else that of `rollout`."""
        return self.rollout.max_staleness if stage.max_staleness is None else stage.max_staleness

    def optimizer_of(self, stage: StageConfig) -> ComponentConfig:
        """The stage's own optimizer, else that of `training`."""
        return self.training.optimizer if stage.optimizer is None else stage.optimizer

    def schedule_of(self, stage: StageConfig) -> ComponentConfig:
        """The stage's own schedule, else that of `training`."""
        return self.training.schedule if stage.schedule is None else stage.schedule

    @rule
    def stages_have_different_names(self) -> Iterator[Violation]:
        yield from repeated_names("stages", self.stages)

    @rule
    def sources_name_tasks(self) -> Iterator[Violation]:
        for index, source in enumerate(self.data.sources):
            yield from self._names_task(("data", "sources", index, "task"), source)

    @rule
    def evaluation_sources_name_tasks(self) -> Iterator[Violation]:
        for index, item in enumerate(self.eval.sets):
            for place, node in item.source_nodes:
                yield from self._names_task(("eval", "sets", index, *place, "task"), node)

    def _names_task(self, path: KeyPath, source: ComponentConfig) -> Iterator[Violation]:
        task = source_node(source).task
        if task not in self.tasks:
            yield path, f"names the task {task!r}, which is not in `tasks`; {suggestion(task, self.tasks)}"

    @rule
    def rewards_name_judges(self) -> Iterator[Violation]:
        for name, task in self.tasks.items():
            for index, reward in enumerate(task.rewards):
                judge = getattr(reward, "judge", None)
                if judge is not None and judge not in self.judges:
                    path = ("tasks", name, "rewards", index, "judge")
                    yield path, f"names the judge {judge!r}, which is not in `judges`; {suggestion(judge, self.judges)}"

    @rule
    def stages_name_sources(self) -> Iterator[Violation]:
        known = [source_node(source).name for source in self.data.sources]
        for index, stage in enumerate(self.stages):
            for position, name in enumerate(stage.sources or ()):
                if name not in known:
                    path = ("stages", index, "sources", position)
                    yield path, f"names the source {name!r}, which is not in `data.sources`; {suggestion(name, known)}"

    @rule
    def survivors_fit_groups(self) -> Iterator[Violation]:
        for stage in self.stages:
            size = group_size_of(stage)
            for name in dict.fromkeys(source_node(source).task for source in self.sources_of(stage)):
                task = self.tasks.get(name)
                # A group of one has no other survivors: its failure ends it whatever the policy says.
                if task and size > 1 and task.on_failure == "survivors" and task.min_survivors > size:
                    yield (
                        ("tasks", name, "min_survivors"),
                        f"is {task.min_survivors}, more than the {size} siblings of a group in stage {stage.name!r}, so no "
                        f"group would ever be trained; set it to {size} or less, or raise the algorithm's group_size",
                    )

    @rule
    def deterministic_is_on_policy(self) -> Iterator[Violation]:
        if self.run.deterministic and self.rollout.max_staleness > 0:
            unset = any(stage.max_staleness is None for stage in self.stages)
            if unset:
                yield ("rollout", "max_staleness"), _not_on_policy(self.rollout.max_staleness)

    @rule
    def deterministic_stages_are_on_policy(self) -> Iterator[Violation]:
        for index, stage in enumerate(self.stages):
            if self.run.deterministic and stage.max_staleness:
                yield ("stages", index, "max_staleness"), _not_on_policy(stage.max_staleness)

    @rule
    def late_groups_need_staleness(self) -> Iterator[Violation]:
        if self.rollout.over_age != "wait" and not any(self.max_staleness_of(stage) for stage in self.stages):
            yield (
                ("rollout", "over_age"),
                f"is {self.rollout.over_age!r}, but at max_staleness 0 no group can be late (ST5); set it to 'wait', or raise "
                "rollout.max_staleness",
            )

    @rule
    def context_holds_prompt_and_completion(self) -> Iterator[Violation]:
        context = self.rollout.max_context_tokens
        if context is None:
            return
        prompt, completion = self.data.max_prompt_tokens, self.rollout.sampling.max_tokens
        if prompt + completion > context:
            yield (
                ("rollout", "max_context_tokens"),
                f"is {context}, less than data.max_prompt_tokens ({prompt}) + rollout.sampling.max_tokens ({completion}) "
                f"= {prompt + completion}; raise it to that, or lower one of the two",
            )
        for index, item in enumerate(self.eval.sets):
            if item.max_tokens is not None and prompt + item.max_tokens > context:
                yield (
                    ("eval", "sets", index, "max_tokens"),
                    f"is {item.max_tokens}; with data.max_prompt_tokens ({prompt}) that is more than "
                    f"rollout.max_context_tokens ({context}); lower it to {max(context - prompt, 1)}, or raise the context",
                )

    @model_validator(mode="after")
    def _check_rules_of_the_whole_tree(self) -> Self:
        check_rules(self)
        return self


def warnings_of(config: RunConfig) -> list[str]:
    """What is allowed but probably not meant, one sentence each, with the key path first."""
    return [
        f"{path}: {text}"
        for found in (_sampling, _bias, _survivors, _lengths, _evaluation, _unused)
        for path, text in found(config)
    ]


def _sampling(config: RunConfig) -> Iterator[tuple[str, str]]:
    sampling = config.rollout.sampling
    for key, value, is_on in (
        ("top_p", sampling.top_p, sampling.top_p < 1),
        ("top_k", sampling.top_k, sampling.top_k > 0),
    ):
        if is_on:
            yield (
                f"rollout.sampling.{key}",
                f"is {value}: tokens are sampled from a cut distribution but logprobs are of the whole one (TK5), so "
                "training is biased; leave it off unless that is wanted",
            )


def _bias(config: RunConfig) -> Iterator[tuple[str, str]]:
    rollout = config.rollout
    if rollout.oversample:
        yield (
            "rollout.oversample",
            f"is {rollout.oversample}: steps take the groups that finish first and drop the slowest, so training sees fewer long "
            "answers than the policy writes; set it to 0 unless that bias is wanted",
        )
    if rollout.over_age == "requeue":
        yield (
            "rollout.over_age",
            "is 'requeue': late groups are dropped and sampled again with other seeds, so training sees fewer long answers than "
            "the policy writes; 'wait' and 'mask' keep them",
        )


def _survivors(config: RunConfig) -> Iterator[tuple[str, str]]:
    for name, task in config.tasks.items():
        for stage in config.stages:
            names = {source_node(source).task for source in config.sources_of(stage)}
            if (
                name in names
                and group_size_of(stage) > 1
                and task.on_failure == "survivors"
                and task.min_survivors == 1
            ):
                yield (
                    f"tasks.{name}.min_survivors",
                    f"is 1: stage {stage.name!r} compares siblings, and a group with one survivor has nothing to compare it with, so "
                    "an algorithm with a baseline of the group learns nothing from it; set it to 2 or more",
                )
                break


def _lengths(config: RunConfig) -> Iterator[tuple[str, str]]:
    longest = config.rollout.max_context_tokens or config.data.max_prompt_tokens + config.rollout.sampling.max_tokens
    if longest > config.training.microbatch_tokens:
        yield (
            "training.microbatch_tokens",
            f"is {config.training.microbatch_tokens}, but a sample may have {longest} tokens; such a sample makes a "
            "micro-batch of its own that is over the budget",
        )


def _evaluation(config: RunConfig) -> Iterator[tuple[str, str]]:
    for index, item in enumerate(config.eval.sets):
        if item.samples > 1 and item.temperature == 0:
            yield f"eval.sets.{index}.samples", f"is {item.samples} at temperature 0: all samples of a prompt are equal"


def _unused(config: RunConfig) -> Iterator[tuple[str, str]]:
    evaluated = [node for item in config.eval.sets for _, node in item.source_nodes]
    used = {source_node(node).task for node in (*config.data.sources, *evaluated)}
    for task in config.tasks:
        if task not in used:
            yield f"tasks.{task}", "no data source names this task"
    asked = {getattr(reward, "judge", None) for task in config.tasks.values() for reward in task.rewards}
    for judge in config.judges:
        if judge not in asked:
            yield f"judges.{judge}", "no reward names this judge, so it is not started"
    staged = {name for stage in config.stages for name in (stage.sources or _all_names(config))}
    for index, name in enumerate(_all_names(config)):
        if name not in staged:
            yield f"data.sources.{index}", f"no stage uses the source {name!r}"


def _all_names(config: RunConfig) -> tuple[str, ...]:
    return tuple(source_node(source).name for source in config.data.sources)


def _uses(stage: StageConfig, source: ComponentConfig) -> bool:
    return stage.sources is None or source_node(source).name in stage.sources


def _not_on_policy(value: int) -> str:
    return f"is {value}, but run.deterministic needs 0 (DE2); set it to 0, or turn run.deterministic off"
