"""Mathematical equality by the math-verify package, in the killable pool.

The package bounds its time by signals, which work on a main thread only (case H1), and some expressions never end (case H2):
its own limits are off, the pool's hold. Errors are raised, never read as "not equal".
"""

import logging
import re
from typing import Any

from relax.core.error import TaskError
from relax.core.message import Prompt
from relax.core.protocol import Limits, Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config import MathVerifyConfig

_WORDS = re.compile(r"(?=.*[^\W\d_]{2})(?:[^\W\d_]|[\s.,;:!?'\"-])+", re.DOTALL)
"""Letters and punctuation only, with two letters in a row somewhere."""


class Comparison:
    """`(reference, response) -> bool`. Unpickled in a worker it imports and warms math-verify, before a call's clock starts."""

    def __reduce__(self) -> Any:
        return _load, ()

    def __call__(self, reference: str, response: str) -> bool:
        """Raises ValueError when the reference cannot be parsed as an expression."""
        import math_verify

        problem = _problem(reference)
        gold = [] if problem else math_verify.parse(_delimited(reference), parsing_timeout=None, raise_on_error=True)
        # Beside expressions, parse gives the text itself, which it compares letter by letter.
        if all(isinstance(candidate, str) for candidate in gold):
            raise ValueError(
                f"the reference {reference!r} cannot be parsed: {problem or 'it holds no mathematical expression'}"
            )
        answer = math_verify.parse(response, parsing_timeout=None)
        return bool(answer) and bool(math_verify.verify(gold, answer, timeout_seconds=None, raise_on_error=True))


def _load() -> Comparison:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    comparison = Comparison()
    comparison("\\frac{1}{2}", "\\boxed{0.5}")
    return comparison


def _problem(reference: str) -> str | None:
    """Why the reference is not what math-verify would take it for: it reads `hello` as a product and drops what it cannot read."""
    unescaped = re.sub(r"\\\\.", "", reference)
    depth = 0
    for brace in re.findall(r"[{}]", unescaped):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            break
    if depth:
        return "its braces do not pair"
    if not _is_bare(reference) or not _WORDS.fullmatch(reference):
        return None
    return f"words are no expression; grade them with the exact reward, or write ${reference}$ for a product of letters"


def _is_bare(reference: str) -> bool:
    return "$" not in reference and "\\boxed" not in reference


def _delimited(reference: str) -> str:
    """LaTeX is looked for inside its delimiters; references often come bare."""
    return f"${reference}$" if _is_bare(reference) else reference


class MathVerify:
    """Core's `Reward`. A response without an expression is wrong, not a failure: it scores 0."""

    def __init__(self, config: MathVerifyConfig, pool: Pool) -> None:
        self._pool = pool
        self._limits = Limits(time_s=config.timeout_s, memory_bytes=config.memory_bytes)

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """1 or 0. Raises TaskError without a usable reference, LimitError when it was killed."""
        reference = prompt.reference
        if isinstance(reference, bool) or not isinstance(reference, str | int | float):
            raise TaskError(
                f"record {prompt.key.record} of source {prompt.key.source!r} has the reference {reference!r}; "
                "math_verify needs text or a number"
            )
        return Score(
            float(await self._pool.run(Comparison(), str(reference), trajectory.response, limits=self._limits))
        )


def build_math_verify(config: MathVerifyConfig, *, pool: Pool) -> MathVerify:
    return MathVerify(config, pool)
