"""A trajectory while it grows: token segments, and where each completion lies in them.

Used by `episode` only. Ids are appended, never changed: what an engine sampled is what will be trained (TK1), and the mask is
true exactly where it sampled, by position (TK3).
"""

from dataclasses import dataclass, field

import numpy as np

from relax.core.completion import PROMPT, Completion, Ints, frozen
from relax.core.media import Medium
from relax.core.trajectory import Segment, Turn


@dataclass(slots=True)
class _Span:
    """Consecutive tokens of one origin: an engine, or (without a completion) a render."""

    token_ids: Ints
    completion: Completion | None
    media: tuple[Medium, ...] = ()


@dataclass(slots=True)
class Draft:
    """`begin` opens a segment with a full render; `show` appends rendered tokens; `sample` appends a completion."""

    turns: list[Turn] = field(default_factory=list)
    _done: list[Segment] = field(default_factory=list)
    _spans: list[_Span] = field(default_factory=list)
    _length: int = 0

    def begin(self, token_ids: Ints, media: tuple[Medium, ...] = ()) -> None:
        """Close the segment, if one is open, and start the next. `media` are what the placeholders stand for, in order."""
        self._close()
        self.show(token_ids, media)

    def show(self, token_ids: Ints, media: tuple[Medium, ...] = ()) -> None:
        self._spans.append(_Span(token_ids, None, media))
        self._length += len(token_ids)

    def sample(self, completion: Completion, text: str) -> None:
        start = self._length
        self._spans.append(_Span(completion.token_ids, completion))
        self._length += len(completion)
        self.turns.append(Turn(len(self._done), start, self._length, completion.stop_reason, text))

    @property
    def length(self) -> int:
        """Tokens of the open segment."""
        return self._length

    @property
    def token_ids(self) -> Ints:
        """The open segment, int32[length]: the context of the next request. Read-only."""
        first = self._spans[0].token_ids
        if len(self._spans) == 1 and first.dtype == np.int32 and not first.flags.writeable:
            return first
        joined = np.concatenate([span.token_ids for span in self._spans]).astype(np.int32, copy=False)
        return frozen(joined)

    @property
    def media(self) -> tuple[Medium, ...]:
        """The media of the open segment, in order."""
        return tuple(medium for span in self._spans for medium in span.media)

    def segments(self) -> tuple[Segment, ...]:
        """All segments (a prompt that left no room is one without samples); the draft is finished."""
        self._close()
        return tuple(self._done)

    def _close(self) -> None:
        """End the open segment. What was shown after its last sample teaches nothing, so it is left out."""
        if any(span.completion is not None for span in self._spans):
            while self._spans[-1].completion is None:
                self._length -= len(self._spans.pop().token_ids)
        elif self._done or not self._spans:
            self._spans, self._length = [], 0
            return
        length = self._length
        mask, mixed = np.zeros(length, bool), np.zeros(length, bool)
        logprobs = np.zeros(length, np.float32)
        versions = np.full(length, PROMPT, np.int32)
        start = 0
        for span in self._spans:
            where = slice(start, start + len(span.token_ids))
            start = where.stop
            if span.completion is not None:
                mask[where] = True
                logprobs[where] = span.completion.logprobs
                versions[where] = span.completion.versions
                mixed[where] = span.completion.mixed
        columns = frozen(mask), frozen(logprobs), frozen(versions), frozen(mixed)
        self._done.append(Segment(self.token_ids, *columns, media=self.media))
        self._spans, self._length = [], 0
