"""Configuration of rewards that ask a model: `judge` grades one trajectory, `pairwise_judge` compares the siblings of a group.

Loads without torch. Which model answers, and how it samples, is the entry of `judges` that a node names.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from relax.config.base import Violation, rule
from relax.tasks.config import RewardConfig

MARK, ANSWER = "{mark}", "{answer}"
Worth = Annotated[float, Field(allow_inf_nan=False)]


class AskConfig(RewardConfig):
    """What rewards share that ask a model and read a verdict out of its reply."""

    judge: str
    """Which of `judges` is asked."""
    system: str | None = None
    """A system message for the judge; null: none."""
    template: str | None = None
    """What the judge is asked; null: a template for all purposes. `{question}`, `{reference}`, `{answer}` (the last reply) and
    `{conversation}` (all turns after the question) stand for the texts, `{scores}` for what may be said, `{mark}` for the mark."""
    quote: bool = True
    """Begin every line of those texts with `| `, so that none of them can pretend to have ended."""
    read: Literal["marked", "last", "whole", "pattern"] = "marked"
    """Where the verdict stands in the reply. `marked`: after a mark that is new each time, so that no answer can know it. `last`: the
    last verdict. `whole`: the reply is the verdict. `pattern`: the group `score` of the last match."""
    pattern: str | None = None
    """The regular expression of `read: pattern`, with a group named `score`; it is matched in the process pool."""
    attempts: PositiveInt = 3
    """Replies that are asked for, each with a seed of its own, until one can be read; then the part fails."""
    timeout_s: PositiveFloat = 60.0
    """Seconds that one reply may take, once the judge has a place for it; more is a failure of this part."""
    memory_bytes: int = Field(default=1 << 29, gt=0)
    """Memory that one match of `pattern` may use."""

    @property
    def uses_pool(self) -> bool:
        return self.read == "pattern"

    @rule
    def pattern_goes_with_read(self) -> Iterator[Violation]:
        if self.read != "pattern":
            if self.pattern is not None:
                yield ("pattern",), f"has no effect with read: {self.read}; set read: pattern, or leave it out"
            return
        if self.pattern is None:
            yield (
                ("pattern",),
                "is missing; read: pattern needs one with a group named `score`, e.g. 'Score: (?P<score>\\d+)'",
            )
            return
        try:
            groups = re.compile(self.pattern).groupindex
        except (re.error, RecursionError, OverflowError) as error:
            yield ("pattern",), f"is {self.pattern!r}, which is no regular expression: {error}"
            return
        if "score" not in groups:
            yield ("pattern",), f"is {self.pattern!r}, which has no group named `score`; write (?P<score>...)"

    @rule
    def template_holds_what_is_read(self) -> Iterator[Violation]:
        if self.template is not None and self.read == "marked" and MARK not in self.template:
            yield (
                ("template",),
                f"never says {MARK}, which read: marked looks for in the reply; ask for it, or set read: last, whole or pattern",
            )


class JudgeConfig(AskConfig):
    """What a model says about the answer, 0 to 1. A reply that cannot be read is asked for again, then it is a failure, never a 0."""

    type: Literal["judge"] = "judge"
    low: float = Field(default=0.0, allow_inf_nan=False)
    """The worst number that the judge may say; one outside of `low` to `high` counts as unreadable."""
    high: float = Field(default=10.0, allow_inf_nan=False)
    """The best number."""
    scale: Literal["unit", "raw"] = "unit"
    """`unit`: `low` to `high` become 0 to 1. `raw`: the number itself."""
    words: dict[str, Worth] | None = Field(default=None, min_length=1)
    """What the judge may say in place of a number, and what it is worth, e.g. `{yes: 1, no: 0}`, in either case; null: numbers."""
    samples: int = Field(default=1, ge=1, le=64)
    """Verdicts that are asked for, each with a seed of its own; the value is the mean of those that could be read."""

    @rule
    def range_is_a_range(self) -> Iterator[Violation]:
        if self.low >= self.high:
            yield ("high",), f"is {self.high:g}, not above low ({self.low:g}); set the best number above the worst"

    @rule
    def words_are_words(self) -> Iterator[Violation]:
        for word in self.words or {}:
            if not re.fullmatch(r"\w+(?:[ -]\w+)*", word):
                yield ("words",), f"has {word!r}; a verdict is made of letters and digits"
        if len({word.casefold() for word in self.words or {}}) < len(self.words or {}):
            yield ("words",), "has one word twice; case makes no difference"

    @rule
    def template_shows_the_answer(self) -> Iterator[Violation]:
        if self.template is not None and ANSWER not in self.template and "{conversation}" not in self.template:
            yield ("template",), f"never says {ANSWER} or {{conversation}}, so the judge would not see what it judges"


class PairwiseJudgeConfig(AskConfig):
    """How many of its siblings an answer beats, 0 to 1, as a model sees it that is shown two at a time; a tie counts as a half."""

    type: Literal["pairwise_judge"] = "pairwise_judge"
    opponents: PositiveInt | None = None
    """Comparisons that each answer takes part in, at least; null: every pair is compared."""
    both_orders: bool = True
    """Show each pair in both orders, for judges prefer a place."""

    @property
    def judges_groups(self) -> bool:
        return True

    @rule
    def template_shows_both_answers(self) -> Iterator[Violation]:
        for field in ("{first}", "{second}"):
            if self.template is not None and field not in self.template:
                yield ("template",), f"never says {field}; the judge compares {{first}} with {{second}}"
