"""The whole number that a response states, in digits or in words, is the one in the reference.

What an answer states is in `relax.tasks.statement`. A response that offers two numbers (`3 or 4`, `3-4`) states none: it scores 0
and says so.
"""

import re
from itertools import pairwise

from relax.core.error import TaskError
from relax.core.message import Prompt
from relax.core.protocol import Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config import CountConfig
from relax.tasks.statement import marked

# fmt: off
_UNITS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
# fmt: on
WORDS = {word: value for value, word in enumerate(_UNITS)} | {
    word: 10 * (value + 2) for value, word in enumerate(_TENS)
}
"""Numbers that one word names."""
_SMALL = "|".join(_UNITS[1:10])
_WORD = re.compile(rf"\b(?:({'|'.join(_TENS)})(?:[- ]({_SMALL}))?|({'|'.join(_UNITS)}))\b", re.IGNORECASE)
_DIGITS = re.compile(
    r"""(?<![\w.,])                     # not inside a word or another number
        (?:(?<![\w)\]}][ ])(?<!\d)[-\N{MINUS SIGN}])?
        (?:\d{1,3}(?:,\d{3})+|\d+)(?:\.(\d+))?
        (?![\d_]|[.,]\d|[eE][-+]?\d)""",
    re.VERBOSE | re.ASCII,
)
_JOIN = re.compile(
    r"[)\]]?[ \t]*(?:[,/;&~–-][ \t]*|\b(?:or|and|to|maybe|perhaps|possibly)\b[ \t]*){0,4}[(\[]?", re.IGNORECASE
)
"""What stands between two numbers of which neither is stated."""
MAX_DIGITS = 12
"""Longer numbers are no counts."""


def find_counts(text: str) -> list[tuple[int, int, float]]:
    """(start, end, value) of the numbers in a text, in order: those in digits, or, where there are none, those in words."""
    digits = [(match.start(), match.end(), _value(match)) for match in _DIGITS.finditer(text)]
    return digits or [(match.start(), match.end(), float(_word_value(match))) for match in _WORD.finditer(text)]


class Count:
    """Core's `Reward`. A response without a number is wrong, not a failure: it scores 0."""

    def __init__(self, config: CountConfig) -> None:
        self._tolerance = config.tolerance

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """1 or 0, with the number that was read. Raises TaskError when the reference is not one whole number from 0 on."""
        expected = _reference(prompt)
        stated = marked(trajectory.response)
        text = trajectory.response if stated is None else stated
        counts = find_counts(text)
        if not counts:
            return Score(0.0, info={"answer": None})
        # A marked statement begins with its number ("Answer: 3, one of them red"); free text ends with it.
        index = len(counts) - 1 if stated is None else 0
        neighbours = counts[max(index - 1, 0) : index + 2]
        offered = [value for pair in pairwise(neighbours) for value in _offered(text, *pair)]
        answer = counts[index][2]
        if len(set(offered)) > 1:
            return Score(0.0, info={"answer": None, "ambiguous": sorted(set(offered))})
        return Score(float(abs(answer - expected) <= self._tolerance), info={"answer": answer})


def build_count(config: CountConfig, *, pool: Pool) -> Count:
    """Quick and harmless, so it runs where it is called and needs no pool."""
    del pool
    return Count(config)


def _offered(text: str, first: tuple[int, int, float], second: tuple[int, int, float]) -> tuple[float, ...]:
    """Both values, when nothing but a comma, an `or` or the like is between them on one line."""
    return (first[2], second[2]) if _JOIN.fullmatch(text, first[1], second[0]) else ()


def _value(match: re.Match[str]) -> float:
    text = match.group().replace(",", "").replace("\N{MINUS SIGN}", "-")
    return float(text) if len(text) <= MAX_DIGITS else float("inf")


def _word_value(match: re.Match[str]) -> int:
    return sum(WORDS[word.lower()] for word in match.groups() if word)


def _reference(prompt: Prompt) -> int:
    reference = prompt.reference
    values = [value for _, _, value in find_counts(reference)] if isinstance(reference, str) else [reference]
    value = values[0] if len(values) == 1 else None
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value < 10**MAX_DIGITS
        and value == int(value)
    ):
        return int(value)
    raise TaskError(
        f"record {prompt.key.record} of source {prompt.key.source!r} has the reference {reference!r}; "
        "count needs one whole number from 0 on"
    )
