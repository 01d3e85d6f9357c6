"""One request of the engine, from its first token to its last, over as many requests to the server as pauses make of it.

Used by the engine. Invariant: tokens are only ever appended, and end where the embedded engine would end them: at the first stop id,
at the first token whose text completes a stop string, or at the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from relax.core.completion import Completion, Sampling, Session, StopReason, frozen
from relax.core.error import EngineError
from relax.core.protocol import Decode
from relax.engines.sglang.answer import Part
from relax.engines.torch.stop import StopStrings


@dataclass(slots=True, eq=False)
class Turn:
    """`sampling` names the stop ids that hold; `budget` is how many tokens there can be. `decode` is needed for stop strings."""

    prompt: list[int]
    sampling: Sampling
    session: Session
    budget: int
    decode: Decode | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def rest(self) -> tuple[list[int], Sampling]:
        """What to send now: everything so far as the prompt, and the budget that is left."""
        return self.prompt + self.tokens, replace(self.sampling, max_tokens=self.budget - len(self.tokens))

    def add(self, part: Part, version: int) -> StopReason | None:
        """Append what was sampled; how the turn ended, or None when it goes on. May decode. Raises EngineError."""
        if isinstance(part.matched, str) and part.matched not in self.sampling.stop:
            raise EngineError(f"the server ended a request with {part.matched!r}, which is no stop string of it")
        count = self._ended(part.token_ids)
        kept = len(part.token_ids) if count is None else count
        self.tokens += part.token_ids[:kept]
        self.logprobs += part.logprobs[:kept]
        self.versions += [version] * kept
        if count is not None:
            return "stop"
        if len(self.tokens) >= self.budget or part.finish == "length":
            return "length"
        if isinstance(part.matched, str):
            raise EngineError(
                f"the server found the stop string {part.matched!r} in tokens that decode to no such text here;"
                " its tokenizer is another one than model.tokenizer"
            )
        # An abort, or a stop id of the server's own that this request does not name: it goes on from here.
        return None

    def completion(self, stop_reason: StopReason) -> Completion:
        return Completion(
            frozen(np.asarray(self.tokens, dtype=np.int32)),
            frozen(np.asarray(self.logprobs, dtype=np.float32)),
            frozen(np.asarray(self.versions, dtype=np.int32)),
            frozen(np.zeros(len(self.tokens), dtype=np.bool_)),
            stop_reason,
        )

    def _ended(self, new: Sequence[int]) -> int | None:
        """How many of the new tokens are part of the completion when one of them ends it."""
        stop_ids = frozenset(self.sampling.stop_ids)
        by_id = next((index + 1 for index, token in enumerate(new) if token in stop_ids), None)
        by_text = self._found(new if by_id is None else new[:by_id])
        return by_id if by_text is None else by_text

    def _found(self, new: Sequence[int]) -> int | None:
        if not self.sampling.stop or not new:
            return None
        assert self.decode is not None
        earlier = self._earlier()
        if not any(string in self.decode([*earlier, *self.tokens, *new]) for string in self.sampling.stop):
            return None
        strings, tokens = StopStrings(self.sampling.stop, self.decode), list(self.tokens)
        for index, token in enumerate(new):
            tokens.append(token)
            if strings.completed(earlier, tokens):
                return index + 1
        return None

    def _earlier(self) -> list[int]:
        """What another engine has sampled of this completion: a resumed request carries it at the end of its prompt (A7)."""
        offset = self.session.offset
        return self.prompt[-offset:] if offset else []
