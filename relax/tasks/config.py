"""Configuration of environments and rewards. Loads without torch."""

from typing import Any, Literal

from pydantic import Field, PositiveFloat

from relax.config.base import ComponentConfig


class SingleTurnConfig(ComponentConfig):
    """One question, one answer."""

    type: Literal["single_turn"] = "single_turn"


class RewardConfig(ComponentConfig):
    """What all rewards share. A reward's part is its value times `weight`."""

    name: str | None = None
    """Name of the part in metrics; the type without it."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """A part of weight 0 is recorded and does not count, even if it fails."""
    timeout_s: PositiveFloat = 10.0
    """Seconds that judging one trajectory may take; more is a failure of this part."""

    @property
    def uses_pool(self) -> bool:
        """Whether it is judged in the process pool, which the machine must then be able to isolate."""
        return False


class ExactConfig(RewardConfig):
    """1 if the response equals the reference (or one of a list of references), else 0."""

    type: Literal["exact"] = "exact"
    strip: bool = True
    """Ignore white space at both ends."""
    ignore_case: bool = False
    """Letters match in either case."""


class NumericConfig(RewardConfig):
    """1 if the number in the response equals the number in the reference, else 0."""

    type: Literal["numeric"] = "numeric"
    answer: Literal["last", "whole"] = "last"
    """The last number of the response, or the whole response, which must then be one number."""
    tolerance: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Largest accepted absolute difference."""


class MathVerifyConfig(RewardConfig):
    """1 if math-verify finds the response's final expression equal to the reference, else 0. Runs in the process pool."""

    type: Literal["math_verify"] = "math_verify"
    memory_bytes: int = Field(default=1 << 30, gt=0)
    """Memory that one comparison may use."""

    @property
    def uses_pool(self) -> bool:
        return True


class FunctionConfig(RewardConfig):
    """`type: my_package.module:function`: a function of your own."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments for it."""
    in_process: bool = False
    """Call it in relax's own process instead of the pool: for async functions, and for quick ones that are trusted with model output."""
    network: bool = False
    """Let it reach the network from the pool."""
    memory_bytes: int = Field(default=1 << 30, gt=0)
    """Memory that one call may use in the pool."""

    @property
    def uses_pool(self) -> bool:
        return not self.in_process
