"""The verifier of a record's own reasoning-gym task, in the killable pool.

A prompt carries its task as `metadata["reasoning_gym"] = {"dataset": name, "entry": {...}}`, and the task's own answer as its
reference. Verifiers run code over what a model wrote, so they run where they can be killed (SE3).
"""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from relax.core.error import TaskError, UserError
from relax.core.message import Json, Prompt
from relax.core.protocol import Limits, Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config import ReasoningGymConfig

FIELD = "reasoning_gym"
"""Of a prompt's metadata."""
_WITH_TUPLES = frozenset({"arc_agi", "rearc"})
"""Tasks whose verifiers compare grids as tuples, which JSON made lists of."""
MAX_SHOWN = 200
"""Characters of the answer that are kept."""


class Verifier:
    """`(dataset, entry, answer) -> score`. Unpickled in a worker it imports reasoning-gym, before a call's clock starts."""

    def __reduce__(self) -> Any:
        return _load, ()

    def __call__(self, dataset: str, entry: dict[str, Json], answer: str) -> float:
        """Raises ValueError for a task that reasoning-gym does not have."""
        from reasoning_gym.factory import DATASETS, get_score_answer_fn

        if dataset not in DATASETS:
            raise ValueError(f"reasoning-gym has no task {dataset!r}")
        task = _with_tuples(entry) if dataset in _WITH_TUPLES else entry
        return float(get_score_answer_fn(dataset)(answer, task))


def _load() -> Verifier:
    import reasoning_gym.factory  # noqa: F401

    return Verifier()


def _with_tuples(entry: dict[str, Json]) -> dict[str, Any]:
    def changed(value: Json) -> Any:
        if isinstance(value, list):
            return tuple(changed(item) for item in value)
        return {key: changed(item) for key, item in value.items()} if isinstance(value, dict) else value

    return {key: changed(value) for key, value in entry.items()}


class ReasoningGym:
    """Core's `Reward`. A response without the tag is wrong, not a failure: it scores 0."""

    def __init__(self, config: ReasoningGymConfig, pool: Pool) -> None:
        self._pool = pool
        self._limits = Limits(config.timeout_s, config.memory_bytes)
        # What is between the last pair: no other opening tag inside, so that the text before it cannot be part of the answer.
        tag = re.escape(config.tag)
        inside = rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>"
        self._pattern = re.compile(inside, re.DOTALL) if config.answer == "tag" else None

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """0 to 1, with the answer that was judged. Raises TaskError without a usable task, LimitError when it was killed."""
        dataset, entry = _task(prompt)
        answer = self._answer(trajectory.response)
        if not answer:
            return Score(0.0, info={"answer": answer})
        value = await self._pool.run(Verifier(), dataset, dict(entry), answer, limits=self._limits)
        return Score(value, info={"answer": answer[:MAX_SHOWN]})

    def _answer(self, response: str) -> str | None:
        if self._pattern is None:
            return response.strip()
        found = self._pattern.findall(response)
        return found[-1].strip() if found else None


def build_reasoning_gym(config: ReasoningGymConfig, *, pool: Pool) -> ReasoningGym:
    """Raises UserError, before the run, where the package is not installed."""
    if find_spec("reasoning_gym") is None:
        raise UserError("the reasoning_gym reward needs the package reasoning-gym: pip install 'relax[reasoning-gym]'")
    return ReasoningGym(config, pool)


def _task(prompt: Prompt) -> tuple[str, Mapping[str, Json]]:
    task = prompt.metadata.get(FIELD)
    if not isinstance(task, Mapping) or not isinstance(task.get("dataset"), str):
        raise _unusable(prompt, f"no metadata field {FIELD!r} that names its dataset")
    entry = task.get("entry")
    if not isinstance(entry, Mapping) or "answer" not in entry:
        raise _unusable(prompt, f"no entry with an answer in its metadata field {FIELD!r}")
    if prompt.reference is None and entry["answer"] is not None:
        raise _unusable(prompt, "the reference None, but its task has an answer")
    return task["dataset"], entry


def _unusable(prompt: Prompt, what: str) -> TaskError:
    return TaskError(
        f"record {prompt.key.record} of source {prompt.key.source!r} has {what}; "
        "the reasoning_gym reward judges records of reasoning-gym sources"
    )
