"""From a judge's reply to a number: where the verdict stands, and which numbers or words count.

Called by the rewards that ask a model. Pure functions; None means that the reply cannot be read, which is never a score. What a
judge merely repeats of the answer that it judges earns nothing (SE4).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

QUOTE = "| "
"""Begins every quoted line, also where a judge quotes."""
_SIGNS = "-+\N{MINUS SIGN}"
_NUMBER = re.compile(
    rf"(?<![\w.,])(?P<value>[{_SIGNS}]?\d{{1,9}}(?:\.\d{{1,9}})?)(?:\s{{0,3}}(?:/|out of)\s{{0,3}}(?P<of>\d{{1,9}}))?(?![\w,]|\.\d)"
)
_BEFORE_VERDICT = " \t:=*_\"'`([-\N{EN DASH}\N{EM DASH}"
_AFTER_VERDICT = " \t.!*_\"'`)]"
MAX_MATCHES = 20
"""Newest matches of a pattern that are looked at."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers `low` to `high`, mapped to 0 to 1 if `unit`; or only `words` (lower case), each with its worth."""

    low: float = 0.0
    high: float = 10.0
    unit: bool = True
    words: Mapping[str, float] = field(default_factory=dict)

    @property
    def wording(self) -> str:
        """What a judge is told that it may say."""
        if self.words:
            return f"one of: {', '.join(self.words)}"
        return f"a number from {self.low:g} (worst) to {self.high:g} (best)"

    def all_in(self, text: str) -> list[tuple[int, float]]:
        """Every verdict in the text, in order: where it begins, and its value."""
        found = [(match.start(), self._value(match)) for match in self._pattern.finditer(text)]
        return [(start, value) for start, value in found if value is not None]

    def whole(self, text: str) -> float | None:
        """The value of a text that is a verdict and nothing else."""
        match = self._pattern.fullmatch(text.strip().lstrip(_BEFORE_VERDICT.replace("-", "")).rstrip(_AFTER_VERDICT))
        return None if match is None else self._value(match)

    def first(self, text: str) -> float | None:
        """The value of the verdict that a text begins with, after punctuation."""
        start = len(text) - len(text.lstrip(_BEFORE_VERDICT))
        signed = start > 0 and text[start - 1] == "-" and text[start : start + 1].isdigit() and not self.words
        match = self._pattern.match(text, start - 1 if signed and self.low < 0 else start)
        return None if match is None else self._value(match)

    @property
    def _pattern(self) -> re.Pattern[str]:
        if not self.words:
            return _NUMBER
        longest_first = sorted(self.words, key=len, reverse=True)
        return re.compile(rf"(?<!\w)(?P<word>{'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)

    def _value(self, match: re.Match[str]) -> float | None:
        if self.words:
            return self.words[match["word"].casefold()]
        number = float(match["value"].replace("\N{MINUS SIGN}", "-"))
        if not self.low <= number <= self.high or (match["of"] is not None and float(match["of"]) != self.high):
            return None
        return (number - self.low) / (self.high - self.low) if self.unit else number


def read_marked(reply: str, mark: str, scale: Scale) -> float | None:
    """The verdict right after the last mark."""
    before, found, after = reply.rpartition(mark)
    del before
    return scale.first(after.splitlines()[0] if after.strip() else "") if found else None


def read_whole(reply: str, scale: Scale) -> float | None:
    """The verdict that the reply is."""
    return scale.whole(reply)


def read_last(reply: str, answers: Sequence[str], scale: Scale) -> float | None:
    """The last verdict of the reply, lines left out that quote an answer or repeat one of its lines."""
    said = {line.strip() for answer in answers for line in answer.splitlines()}
    for line in reversed(reply.splitlines()):
        is_copied = line.strip() in said and scale.whole(line) is None
        found = scale.all_in(line)
        if found and not is_copied and not line.lstrip().startswith(QUOTE.strip()):
            return found[-1][1]
    return None


def read_matches(matches: Sequence[Sequence[str]], answers: Sequence[str], scale: Scale) -> float | None:
    """The verdict in the last of `(whole match, group score)`; a match counts not that stands in an answer as it is, unless it is
    the bare verdict."""
    for whole, score in reversed(matches):
        is_copied = whole.strip() != score.strip() and any(whole.strip() in answer for answer in answers)
        if not is_copied:
            return scale.whole(score)
    return None


def find_matches(pattern: str, text: str) -> list[list[str]]:
    """`[whole match, group score]` of the last matches, in order. Runs in a pool worker."""
    found = [[match[0], match["score"]] for match in re.finditer(pattern, text) if match["score"] is not None]
    return found[-MAX_MATCHES:]
