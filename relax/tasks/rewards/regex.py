"""A regular expression of the user's, in the killable pool.

A pattern may need more time than the universe has for one unlucky text, and `re` cannot be interrupted: in the pool only that
call is killed, and neither the loop nor another trajectory waits for it (case H2).
"""

import re

from relax.core.error import TaskError
from relax.core.message import Json, Prompt
from relax.core.protocol import Limits, Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config import RegexConfig

MAX_SHOWN = 200
"""Characters of what matched that are kept."""


def find_match(pattern: str, flags: int, whole: bool, group: str | int | None, text: str) -> dict[str, Json]:
    """Whether there is a match, and what `group` (of the last one that has it) matched. Runs in a pool worker."""
    compiled = re.compile(pattern, flags)
    if whole:
        matches = [match] if (match := compiled.fullmatch(text.strip())) is not None else []
    elif group is None:
        matches = [match] if (match := compiled.search(text)) is not None else []
    else:
        matches = list(compiled.finditer(text))
    found = None if group is None else next((m[group] for m in reversed(matches) if m[group] is not None), None)
    return {"matched": bool(matches), "found": found}


class Regex:
    """Core's `Reward`. No match is wrong, not a failure: it scores 0."""

    def __init__(self, config: RegexConfig, pool: Pool) -> None:
        self._config, self._pool = config, pool
        self._limits = Limits(config.timeout_s, config.memory_bytes)

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """1 or 0, with what the group matched. Raises TaskError without a usable reference, LimitError when it was killed."""
        config = self._config
        reference = None if config.group is None else self._normal(_reference(prompt))
        answer = await self._pool.run(
            find_match,
            config.pattern,
            config.flags,
            config.match == "full",
            config.group,
            trajectory.response,
            limits=self._limits,
        )
        found = answer["found"]
        if config.group is None:
            return Score(float(answer["matched"]), info={"matched": answer["matched"]})
        right = found is not None and self._normal(found) == reference
        return Score(float(right), info={"found": None if found is None else found[:MAX_SHOWN]})

    def _normal(self, text: str) -> str:
        return text.strip().casefold() if self._config.ignore_case else text.strip()


def build_regex(config: RegexConfig, *, pool: Pool) -> Regex:
    return Regex(config, pool)


def _reference(prompt: Prompt) -> str:
    reference = prompt.reference
    if isinstance(reference, bool) or not isinstance(reference, str | int | float):
        raise TaskError(
            f"record {prompt.key.record} of source {prompt.key.source!r} has the reference {reference!r}; "
            "regex compares its group with text or a number"
        )
    return str(reference)
