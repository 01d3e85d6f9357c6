"""The number in the response is the number in the reference."""

import re
from decimal import Context, Decimal

from relax.core.error import TaskError
from relax.core.message import Prompt
from relax.core.protocol import Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config import NumericConfig

_NUMBER = re.compile(
    r"""(?<![\w.])                                    # not inside a word or another number
        (?:(?<![)\]}])[-+\N{MINUS SIGN}])?            # a sign, unless it is an operator after a bracket
        (?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)? # thousands in groups of three, or plain digits
           |\.\d+)
        (?:[eE][-+]?\d{1,3})?
        (?!\.?\d|[eE][-+]?\d)                        # whole, or not at all: 1.2.3 is no number""",
    re.VERBOSE | re.ASCII,
)
MAX_DIGITS = 100
"""Longer ones are no numbers here: exact comparison would cost too much."""
_EXACT = Context(prec=2200, Emax=9999, Emin=-9999)
"""Wide enough to subtract any two accepted numbers without rounding."""


def find_numbers(text: str) -> list[Decimal]:
    """All numbers of a text, in order. `1,234.5`, `-3`, `1e-5`; units and currency signs around them do not matter."""
    found = (match.group() for match in _NUMBER.finditer(text))
    return [_decimal(number) for number in found if len(number) <= MAX_DIGITS]


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("\N{MINUS SIGN}", "-"))


class Numeric:
    """Core's `Reward`. A response without a number is wrong, not a failure: it scores 0."""

    def __init__(self, config: NumericConfig) -> None:
        self._whole = config.answer == "whole"
        self._tolerance = Decimal(repr(config.tolerance))

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """1 or 0, with the number that was read. Raises TaskError when the reference is not exactly one number."""
        expected = _reference(prompt)
        answer = self._answer(trajectory.response)
        if answer is None:
            return Score(0.0, info={"answer": None})
        right = abs(_EXACT.subtract(answer, expected)) <= self._tolerance
        return Score(float(right), info={"answer": str(answer)})

    def _answer(self, response: str) -> Decimal | None:
        if self._whole:
            text = response.strip()
            return _decimal(text) if len(text) <= MAX_DIGITS and _NUMBER.fullmatch(text) else None
        numbers = find_numbers(response)
        return numbers[-1] if numbers else None


def build_numeric(config: NumericConfig, *, pool: Pool) -> Numeric:
    """Quick and harmless, so it runs where it is called and needs no pool."""
    del pool
    return Numeric(config)


def _reference(prompt: Prompt) -> Decimal:
    reference = prompt.reference
    usable = isinstance(reference, str | int | float) and not isinstance(reference, bool)
    numbers = find_numbers(repr(reference) if isinstance(reference, float) else str(reference)) if usable else []
    if len(numbers) != 1:
        raise TaskError(
            f"record {prompt.key.record} of source {prompt.key.source!r} has the reference {reference!r}; "
            "numeric needs one number, alone or with a unit"
        )
    return numbers[0]
