"""One request inside the embedded engine, from submission to completion.

Made by the engine, owned by the batcher on the compute thread. `spans` says from which token on which version samples, so a
token's stamp is that of the weights it was sampled from (WS6).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relax.core.completion import Completion, Sampling, Session, StopReason, frozen
from relax.engines.torch.stop import StopStrings

Prefix = tuple[str, bytes]
"""A shared prompt: its name and its exact tokens. Two prompts under one name never share."""


@dataclass(slots=True, eq=False)
class Request:
    """`prefilled`: its row holds keys and values of all its tokens but the last, under the weights that sample now.

    `stopped`: its last token is a stop id or completes a stop string. `shared` names its prompt when siblings have the same;
    `waiter` is whatever the engine needs to deliver the result.
    """

    prompt: list[int]
    sampling: Sampling
    session: Session
    budget: int
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None = None
    shared: Prefix | None = None
    waiter: Any = None
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
