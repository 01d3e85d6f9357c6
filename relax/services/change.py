"""What may change when a run goes on (B5, ST8): every setting that differs, what follows from it, or why it is refused.

Used by `relax train --resume`. One table says it; a path that no rule knows is refused, because a run that goes on with a setting
its state was not made for is wrong without a word. Whatever may change wins over the checkpoint (B8).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from relax.config.tree import RunConfig
from relax.core.message import Json

ABSENT = "absent"
MAX_VALUE_LENGTH = 80
Verdict = Literal["free", "told", "refused"]
"""`free`: nothing else follows. `told`: it is allowed, and what follows is said."""


class Rule(NamedTuple):
    """`path` may hold `*` for one key and stands for everything below it too; of several that fit the longest decides."""

    path: str
    verdict: Verdict
    why: str = ""


_SCORED = "trajectories are judged by it from here on; what was trained before was not"
_SAMPLED = "tokens in flight were sampled without it"
_BEGUN = "its steps were trained with it"
_ACCEPTED = "data.accept_changes is on: the run goes on with the data that there are now"
RULES: tuple[Rule, ...] = (
    Rule("schema", "refused", "it is the format of the file"),
    Rule("run", "free"),
    Rule("run.name", "refused", "the run is in this folder; to rename it move the folder"),
    Rule("run.directory", "refused", "the run is in this folder; to move it move the folder"),
    Rule("run.seed", "refused", "every random choice so far, the groups in flight included, derives from it"),
    Rule("run.deterministic", "refused", "a run is bit-identical from its first step or not at all"),
    Rule("runtime", "free"),
    Rule("model", "refused", "checkpoints hold this model with this vocabulary"),
    Rule(
        "data",
        "refused",
        "the place in the data is counted in these prompts, in this order; data.accept_changes=true goes on with those there are now",
    ),
    Rule("data.accept_changes", "free"),
    Rule("data.media", "told", "media are read by it from here on"),
    Rule("data.media.processes", "free"),
    Rule("data.media.cache", "free"),
    Rule("data.media.cache_bytes", "free"),
    Rule("data.media.held_bytes", "free"),
    Rule("data.media.dtype", "refused", "features of groups in flight are in it"),
    Rule("tasks", "told", _SCORED),
    Rule("judges", "told", _SCORED),
    Rule("tasks.*.timeout_s", "free"),
    Rule("tasks.*.max_attempts", "free"),
    Rule("rollout", "free"),
    Rule("rollout.max_staleness", "told", "groups in flight that no longer fit are made again"),
    Rule("rollout.sampling", "told", _SAMPLED),
    Rule("rollout.sampling.temperature", "refused", f"{_SAMPLED}, and the trainer could not tell them apart"),
    Rule("rollout.max_context_tokens", "told", _SAMPLED),
    Rule("rollout.max_trajectory_tokens", "told", _SAMPLED),
    Rule("training", "refused", "the state in the checkpoint was made with it"),
    Rule("training.backend.device", "free"),
    Rule("training.optimizer", "told", "it takes effect with the next step; the optimizer's state goes on"),
    Rule("training.schedule", "told", "the step within the stage goes on, so the learning rate may jump"),
    Rule("training.grad_clip", "told", "it takes effect with the next step"),
    Rule("training.microbatch_tokens", "free"),
    Rule("training.microbatch_encoder_tokens", "free"),
    Rule("training.backend.kept_encoder_tokens", "free"),
    Rule("training.backend.share_prompts", "free"),
    Rule("training.backend.parts.*.lr", "told", "it takes effect with the next step; the optimizer's state goes on"),
    Rule("training.backend.activation_checkpointing", "free"),
    Rule("training.max_nonfinite_steps", "free"),
    Rule("training.checkpoint", "free"),
    Rule("training.snapshot_every", "free"),
    Rule("weights", "free"),
    Rule("bus", "free"),
    Rule("eval", "free"),
    Rule("monitors", "free"),
)
STAGE_RULES: tuple[Rule, ...] = (
    Rule("steps", "told", "a schedule that falls now ends with the new last step"),
    Rule("groups_per_step", "told", "groups in flight that no longer fit are made again"),
    Rule("max_staleness", "told", "groups in flight that no longer fit are made again"),
    Rule("filter", "free"),
    Rule("optimizer", "told", "it takes effect with the next step; the optimizer's state goes on"),
    Rule("schedule", "told", "the step within the stage goes on, so the learning rate may jump"),
    Rule("algorithm", "told", "the loss is another one from here on"),
    Rule("algorithm.type", "refused", "the columns of the groups in flight are those of the other one"),
    Rule("algorithm.group_size", "refused", "the groups in flight have the other number of siblings"),
    Rule("sources", "refused", "the place in the stage's data is counted in these sources"),
)
"""For the stage under way, below `stages.<name>`. One that has ended may not change, one that has not begun may change freely."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the run is: its newest checkpoint or snapshot, and the groups in flight there. `step` None: there is none, so the run
    begins again."""

    step: int | None
    stage: int = 0
    num_outstanding: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that is not what it was; values are shortened for people."""

    path: tuple[str, ...]
    before: Json
    after: Json

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {_shown(self.before)} -> {_shown(self.after)}"


@dataclass(frozen=True, slots=True)
class Changes:
    """One line for each setting that differs."""

    allowed: tuple[str, ...]
    refused: tuple[str, ...]


def judge(before: RunConfig, after: RunConfig, progress: Progress) -> Changes:
    """Compare the tree that a run was begun with and the one that it shall go on with."""
    misfits = dict(_misfits(before, after, progress))
    allowed, refused = list[str](), list(misfits.values())
    for difference in differences(before, after):
        if difference.path in misfits:
            continue
        verdict, why = _verdict(difference.path, before, after, progress)
        line = f"{difference}{f' ({why})' if why else ''}"
        (refused if verdict == "refused" else allowed).append(line)
    return Changes(tuple(allowed), tuple(refused))


def differences(before: RunConfig, after: RunConfig) -> list[Difference]:
    """Every setting that differs; an item of a list goes by its name, one that came or went is a single difference."""
    return list(
        _compare((), before.model_dump(mode="json", by_alias=True), after.model_dump(mode="json", by_alias=True))
    )


def _compare(path: tuple[str, ...], before: Json, after: Json) -> Iterator[Difference]:
    old, new = _children(before), _children(after)
    if old is None or new is None:
        if before != after:
            yield Difference(path, before, after)
        return
    for key in dict.fromkeys((*old, *new)):
        if key in old and key in new:
            yield from _compare((*path, key), old[key], new[key])
        else:
            yield Difference((*path, key), old.get(key, ABSENT), new.get(key, ABSENT))
    common = [[key for key in side if key in old and key in new] for side in (old, new)]
    if isinstance(before, list) and common[0] != common[1]:
        yield Difference((*path, "order"), common[0], common[1])


def _children(value: Json) -> dict[str, Json] | None:
    """What lies below a value by key; a list of items with different names by name, any other list is a value itself."""
    if isinstance(value, dict) and value:
        return value
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return None
    names = [item.get("name") for item in value]
    is_named = bool(names) and all(isinstance(name, str) for name in names) and len({*names}) == len(names)
    return dict(zip(names, value, strict=True)) if is_named else None


def _verdict(path: tuple[str, ...], before: RunConfig, after: RunConfig, progress: Progress) -> tuple[Verdict, str]:
    if progress.step is None:
        # Nothing was kept that a setting could contradict, but for where the run lies.
        rule = _rule(RULES, path)
        is_place = rule is not None and rule.path in ("schema", "run.name", "run.directory")
        return (rule.verdict, rule.why) if rule is not None and is_place else ("free", "")
    if path[0] == "stages":
        return _stage_verdict(path[1:], before, after, progress)
    if path[0] == "data" and path != ("data", "accept_changes") and after.data.accept_changes:
        return "told", _ACCEPTED
    rule = _rule(RULES, path)
    return (
        (rule.verdict, rule.why) if rule is not None else ("refused", "nothing is known of what would follow from it")
    )


def _stage_verdict(
    path: tuple[str, ...], before: RunConfig, after: RunConfig, progress: Progress
) -> tuple[Verdict, str]:
    names = [stage.name for stage in before.stages]
    begun = names[: progress.stage + 1]
    if path[0] == "order":
        kept = [stage.name for stage in after.stages][: len(begun)] == begun
        return (
            ("free", "")
            if kept
            else ("refused", f"the stages that have begun ({', '.join(begun)}) come first, in their order")
        )
    if path[0] not in begun:
        is_behind = path[0] in names or path[0] not in [stage.name for stage in after.stages][: len(begun)]
        return (
            ("free", "")
            if is_behind
            else ("refused", f"a new stage comes after those that have begun ({', '.join(begun)})")
        )
    if path[0] != begun[-1]:
        return "refused", "the stage has ended"
    if len(path) == 1:
        return "refused", "the stage is under way"
    rule = _rule(STAGE_RULES, path[1:])
    return (rule.verdict, rule.why) if rule is not None else ("refused", _BEGUN)


def _rule(rules: Sequence[Rule], path: tuple[str, ...]) -> Rule | None:
    fitting = [rule for rule in rules if _fits(rule.path.split("."), path)]
    return max(fitting, key=lambda rule: rule.path.count("."), default=None)


def _fits(pattern: Sequence[str], path: tuple[str, ...]) -> bool:
    return len(pattern) <= len(path) and all(key in ("*", own) for key, own in zip(pattern, path, strict=False))


def _misfits(before: RunConfig, after: RunConfig, progress: Progress) -> Iterator[tuple[tuple[str, ...], str]]:
    """What only the whole of the stage under way shows: the path that it speaks of, and a line."""
    if progress.step is None or progress.stage >= len(after.stages):
        return
    old, new = before.stages[progress.stage], after.stages[progress.stage]
    if old.name != new.name:
        return  # said already
    path = ("stages", new.name)
    have, want = before.optimizer_of(old).type, after.optimizer_of(new).type
    if have != want:
        line = f"stage {new.name}: optimizer {have} -> {want} (the checkpoint holds the state of the other one)"
        yield (*path, "optimizer", "type"), line
    weights = [getattr(stage.algorithm, "kl_weight", 0.0) for stage in (old, new)]
    if not weights[0] and weights[1]:
        why = "the policy that the stage began with was not kept"
        yield (*path, "algorithm", "kl_weight"), f"stage {new.name}: kl_weight {weights[0]} -> {weights[1]} ({why})"
    end = sum(stage.steps for stage in after.stages[: progress.stage + 1])
    if end < progress.step:
        yield (*path, "steps"), f"stage {new.name}: it would end at step {end}, but step {progress.step} is reached"
    if end == progress.step and new.steps < old.steps and progress.num_outstanding:
        flying = f"{progress.num_outstanding} groups in flight"
        yield (*path, "steps"), f"stage {new.name}: it would end at step {end}, the step that is reached, with {flying}"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 3]}..."
