"""Trajectories: completions and the environment's replies, as token segments.

Made by `tasks.episode`, cut into samples by the rollout role. A segment is one unbroken history; a history that branches
(TK2) starts a new one. Segment `i` becomes sample `i`. `mask` is true exactly on sampled tokens (TK3).
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from relax.core.completion import Bools, Floats, Ints, StopReason
from relax.core.media import Medium
from relax.core.message import Json, Message

EndReason: TypeAlias = Literal["done", "truncated"]
"""`done`: the environment ended it; `truncated`: a budget did (TK6). Neither is a failure."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One history of L tokens. `logprobs` is 0 and `versions` is -1 where `mask` is false.

    `media` are what its placeholders stand for, in their order.
    """

    token_ids: Ints
    mask: Bools
    logprobs: Floats
    versions: Ints
    mixed: Bools
    media: tuple[Medium, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a completion lies: sampled positions `[start, end)` of `segment`; `text` is its decoded reply."""

    segment: int
    start: int
    end: int
    stop_reason: StopReason
    text: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The whole run of one sibling. `messages` is the conversation as the environment saw it, the prompt excluded."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    end: EndReason
    info: dict[str, Json] = field(default_factory=dict)

    @property
    def response(self) -> str:
        """The text of the last completion."""
        return self.turns[-1].text if self.turns else ""

    @property
    def num_sampled(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Score:
    """A reward's answer: a value, or None with the reason why there is none (a failure is a value, not an exception)."""

    value: float | None
    failure: str | None = None
    info: dict[str, Json] = field(default_factory=dict)
