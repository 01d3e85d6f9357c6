"""Mathematical equality by the math-verify package, in the killable pool.

The package bounds its time by signals, which work on a main thread only (case H1), and some expressions never end (case H2):
its own limits are off, the pool's hold. Errors are raised, never read as "not equal".
"""

import logging
from typing import Any

from relax.core.error import TaskError
from relax.core.message import Prompt
from relax.core.protocol import Limits, Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config import MathVerifyConfig


class Comparison:
    """`(reference, response) -> bool`. Unpickled in a worker it imports and warms math-verify, before a call's clock starts."""

    def __reduce__(self) -> Any:
        return _load, ()

    def __call__(self, reference: str, response: str) -> bool:
        """Raises ValueError when the reference holds no expression."""
        import math_verify

        gold = math_verify.parse(_delimited(reference), parsing_timeout=None, raise_on_error=True)
        if not gold:
            raise ValueError(f"no mathematical expression in the reference {reference!r}")
        answer = math_verify.parse(response, parsing_timeout=None)
        return bool(answer) and bool(math_verify.verify(gold, answer, timeout_seconds=None, raise_on_error=True))


def _load() -> Comparison:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    comparison = Comparison()
    comparison("\\frac{1}{2}", "\\boxed{0.5}")
    return comparison


def _delimited(reference: str) -> str:
    """LaTeX is looked for inside its delimiters; references often come bare."""
    return reference if "$" in reference or "\\boxed" in reference else f"${reference}$"


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
