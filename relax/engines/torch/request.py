"""One request inside the embedded engine, from submission to completion.

Made by the engine, owned by the batcher on the compute thread. `spans` says from which token on which version samples, so a
token's stamp is that of the weights it was sampled from (WS6).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relax.core.completion import Completion, Sampling, Session, StopReason, frozen
from relax.core.error import EngineError, InvariantError
from relax.core.media import Medium
from relax.engines.torch.stop import StopStrings
from relax.model.family import Family, Positions

Prefix = tuple[str, bytes, tuple[str, ...]]
"""A shared prompt: its name, its exact tokens, the keys of its media. Two prompts under one name never share."""


@dataclass(slots=True, eq=False)
class Request:
    """`prefilled`: its row holds keys and values of all its tokens but the last, under the weights that sample now.

    `stopped`: its last token is a stop id or completes a stop string. `shared` names its prompt when siblings have the same;
    `waiter` is whatever the engine needs to deliver the result. `positions` are those of the prompt, for a model that reads media;
    from its end on a token stands `delta` further than its place in the row. `error` ends the request after the prefill.
    """

    prompt: list[int]
    sampling: Sampling
    session: Session
    budget: int
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None = None
    shared: Prefix | None = None
    waiter: Any = None
    media: tuple[Medium, ...] = ()
    positions: Positions | None = None
    delta: float = 0.0
    error: EngineError | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int, bool]] = field(default_factory=list)
    prefilled: bool = False
    cancelled: bool = False
    stopped: bool = False

    @property
    def history_length(self) -> int:
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def columns(self) -> int:
        """Positions that the request can come to hold: the last sampled token is never fed."""
        return len(self.prompt) + self.budget - 1

    @property
    def prefix(self) -> Prefix | None:
        """The shared prompt, as long as the prompt is all that has to be prefilled."""
        return None if self.tokens else self.shared

    def history(self) -> Sequence[int]:
        """The tokens to prefill: everything but the last one, which the next decode step feeds."""
        return (self.prompt + self.tokens)[:-1]

    def locate(self, family: Family) -> None:
        """Find the positions of the prompt. Raises what the family raises, InvariantError when it gives them for another length."""
        positions = family.positions(np.asarray(self.prompt, dtype=np.int32), self.media)
        if positions.shape != (3, len(self.prompt)):
            raise InvariantError("MM1", f"{len(self.prompt)} tokens got positions of shape {positions.shape}")
        # A prompt ends with text, which goes on by one; the highest position of all may lie inside a video before it.
        self.positions, self.delta = positions, float(positions[:, -1].max()) + 1 - len(self.prompt)

    def history_positions(self) -> Positions | None:
        """[3, T] of `history`."""
        if self.positions is None:
            return None
        sampled = np.arange(len(self.prompt), self.history_length, dtype=np.float64) + self.delta
        after = np.broadcast_to(sampled.astype(np.float32), (3, len(sampled)))
        return np.concatenate([self.positions, after], axis=1)[:, : self.history_length]

    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    def add(self, token: int, logprob: float) -> None:
        """The next sampled token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = token in self.stop_ids or (
            self.stop_strings is not None and self.stop_strings.completed(self._earlier(), self.tokens)
        )

    @property
    def has_ended(self) -> bool:
        return self.stopped or len(self.tokens) == self.budget

    def _earlier(self) -> list[int]:
        """What another engine has sampled of this completion: a resumed request carries it at the end of its prompt (A7)."""
        offset = self.session.offset
        return self.prompt[-offset:] if offset else []

    def begin(self, version: int, mixed: bool = False) -> None:
        """From the next token on, `version` samples."""
        self.spans.append((len(self.tokens), version, mixed))

    def restart(self) -> None:
        """Forget what was sampled; the random stream starts again at the request's own offset."""
        self.tokens.clear()
        self.logprobs.clear()
        self.spans.clear()
        self.prefilled = self.stopped = False

    def completion(self, stop_reason: StopReason) -> Completion:
        count = len(self.tokens)
        versions, mixed = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.bool_)
        for start, version, is_mixed in self.spans:
            versions[start:], mixed[start:] = version, is_mixed
        return Completion(
            frozen(np.asarray(self.tokens, dtype=np.int32)),
            frozen(np.asarray(self.logprobs, dtype=np.float32)),
            frozen(versions),
            frozen(mixed),
            stop_reason,
        )
