"""Configuration of environments and rewards. Loads without torch."""

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from relax.config.base import ComponentConfig, Violation, rule


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

    @property
    def judges_groups(self) -> bool:
        """Whether it is a core `GroupReward`: called once for all siblings of a prompt, not for each trajectory."""
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


class MultipleChoiceConfig(RewardConfig):
    """1 if the last stated answer of the response is the right letter, else 0."""

    type: Literal["multiple_choice"] = "multiple_choice"
    letters: str = Field(default="ABCDE", min_length=2, max_length=26, pattern="^[A-Z]+$")
    """The letters that name options, in order."""
    options: str | None = None
    """Field of the record that lists the options' texts, in the order of `letters`; then a stated text counts as its letter. null: letters
    alone."""

    @rule
    def letters_differ(self) -> Iterator[Violation]:
        if len(set(self.letters)) < len(self.letters):
            yield ("letters",), f"is {self.letters!r}, which repeats a letter; name each option once"


class CountConfig(RewardConfig):
    """1 if the number that the response states, in digits or in words, is the reference, else 0."""

    type: Literal["count"] = "count"
    tolerance: NonNegativeInt = 0
    """Largest accepted difference."""


class OpenAnswerConfig(RewardConfig):
    """1 if the answer that the response states equals the reference (or one of a list) without regard to case, articles, punctuation
    and ways to write a number, else 0."""

    type: Literal["open_answer"] = "open_answer"
    answer: Literal["stated", "whole"] = "stated"
    """What follows the last `answer is`, stands in the last box or `<answer>` tag, or else the last line; or the whole response."""


class WordErrorRateConfig(RewardConfig):
    """1 minus the word error rate of the response against the reference (the nearest of a list), at least 0."""

    type: Literal["word_error_rate"] = "word_error_rate"
    unit: Literal["word", "character"] = "word"
    """What is counted; characters (without white space) for languages that write no spaces."""
    ignore_case: bool = True
    """Letters match in either case."""
    ignore_punctuation: bool = True
    """Punctuation does not count, except inside words and numbers."""


class IoUConfig(RewardConfig):
    """How far the boxes that the response states cover the boxes of the reference (intersection over union)."""

    type: Literal["iou"] = "iou"
    threshold: float | None = Field(default=None, gt=0, le=1)
    """A pair of boxes counts as 1 from this IoU on, and as 0 below; null: it counts as its IoU."""
    form: Literal["corners", "corner_size", "centre_size"] = "corners"
    """What the four numbers are, on both sides: left, top, right, bottom; left, top, width, height; or centre and size."""
    answer: Literal["auto", "pixels", "unit", "thousand"] = "auto"
    """Units of the response: pixels, 0 to 1, or 0 to 1000 over the picture; auto: 0 to 1 if all four numbers are, else the reference's."""
    reference: Literal["pixels", "unit", "thousand"] = "pixels"
    """Units of the reference."""
    image: NonNegativeInt = 0
    """Which picture of the prompt the boxes lie in, if its size is needed to compare units."""
    size: str | None = None
    """Field of the record that holds that picture's [width, height]; null: those of the picture itself."""


class RegexConfig(RewardConfig):
    """1 if the response matches a pattern (and what a group matched equals the reference), else 0. Runs in the process pool."""

    type: Literal["regex"] = "regex"
    pattern: str = Field(min_length=1)
    """A Python regular expression."""
    match: Literal["search", "full"] = "search"
    """`search` looks for it anywhere, `full` wants the whole response, without white space at its ends, to match."""
    group: str | PositiveInt | None = None
    """Name or number of the group that must equal the reference, in the last match that there is; null: that it matches is enough."""
    ignore_case: bool = False
    """Letters match in either case, in the pattern and in the comparison."""
    multiline: bool = False
    """`^` and `$` match at every line."""
    dot_all: bool = False
    """`.` matches the end of a line too."""
    memory_bytes: int = Field(default=1 << 29, gt=0)
    """Memory that one match may use."""

    @property
    def uses_pool(self) -> bool:
        return True

    @property
    def flags(self) -> int:
        """Of the `re` module."""
        chosen = [(self.ignore_case, re.IGNORECASE), (self.multiline, re.MULTILINE), (self.dot_all, re.DOTALL)]
        return sum(int(flag) for wanted, flag in chosen if wanted)

    @rule
    def pattern_is_usable(self) -> Iterator[Violation]:
        try:
            pattern = re.compile(self.pattern, self.flags)
        except (re.error, RecursionError, OverflowError) as error:
            yield ("pattern",), f"is {self.pattern!r}, which is no regular expression: {error}"
            return
        known = set(pattern.groupindex) | set(range(1, pattern.groups + 1))
        if self.group is not None and self.group not in known:
            names = ", ".join(map(str, sorted(known, key=str))) or "none"
            yield ("group",), f"is {self.group!r}, but the pattern has these groups: {names}"
        if self.group is None and pattern.fullmatch("") is not None:
            yield (
                ("pattern",),
                f"is {self.pattern!r}, which matches an empty text, so that every response would earn the reward; "
                "demand something, or compare a group with the reference",
            )


class LengthConfig(RewardConfig):
    """A penalty on long trajectories: 0 up to `budget - buffer` sampled tokens, -1 from `budget` on, falling in between."""

    type: Literal["length"] = "length"
    budget: PositiveInt
    """Sampled tokens of the trajectory, all turns together, at which the penalty is whole."""
    buffer: PositiveInt
    """Tokens before `budget` over which it grows."""
    shape: Literal["linear", "cosine"] = "linear"
    """`linear` (DAPO, arXiv 2503.14476, eq. 13), or half a cosine wave (arXiv 2502.03373, section 3.2), flat at both ends."""

    @rule
    def buffer_fits_the_budget(self) -> Iterator[Violation]:
        if self.buffer > self.budget:
            yield (
                ("buffer",),
                f"is {self.buffer}, more than the budget of {self.budget}; set it to {self.budget} or less",
            )


class ReasoningGymConfig(RewardConfig):
    """What the verifier of the record's own reasoning-gym task says, 0 to 1. Runs in the process pool."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    answer: Literal["tag", "whole"] = "tag"
    """Judge what stands between the last `<answer>` and `</answer>` (nothing there: 0), or the whole response."""
    tag: str = Field(default="answer", pattern="^[A-Za-z][A-Za-z0-9_-]*$")
    """Name of the tag."""
    memory_bytes: int = Field(default=1 << 30, gt=0)
    """Memory that one verification may use."""

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
