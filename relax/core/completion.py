"""What goes into an engine and what comes out of it.

Built by tasks (through a renderer), routed by engines. Arrays are read-only numpy; `versions` carries, per sampled token,
the number of the weight version that it was sampled from, `MIXED` where old key-values met new weights (`on_load: keep`).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from relax.core.id import GroupId
from relax.core.media import Medium

Ints: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
Bools: TypeAlias = npt.NDArray[np.bool_]

StopReason: TypeAlias = Literal["stop", "length", "abort"]
"""`stop`: the last token is a stop id, or completes a stop string; `length`: a budget ended it; `abort`: interrupted, may be resumed."""

PROMPT = -1
"""The version of a token that no policy sampled."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy (its logprobs are those of temperature 1). `top_k` 0 and `top_p` 1 are off.

    `stop` are strings of the decoded completion: the token that completes one is the last one.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """Whom a request serves. `base` is the group's base version: an engine below it must refuse (ST2).

    `seed` is the request's own seed (DE1); the engine's choice for token `i` depends on `(seed, offset + i)` only.
    `prefix` names the shared prompt of a group, so that it is prefilled once; None shares nothing.
    """

    group: GroupId
    sibling: int
    turn: int
    base: int
    seed: int
    offset: int = 0
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """Prompt token ids, int32[T], T >= 1; `media` are what its placeholders stand for, in their order."""

    token_ids: Ints
    media: tuple[Medium, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens: `token_ids` int32[N], `logprobs` float32[N] (TK5), `versions` int32[N], `mixed` bool[N]."""

    token_ids: Ints
    logprobs: Floats
    versions: Ints
    mixed: Bools
    stop_reason: StopReason

    def __len__(self) -> int:
        return len(self.token_ids)


def resume(session: Session, sampled: int) -> Session:
    """The session of the same request after `sampled` tokens: the random stream goes on, never starts again."""
    return replace(session, offset=session.offset + sampled)


def join(first: Completion, second: Completion) -> Completion:
    """The completion of a request that was interrupted after `first` and resumed with `second`."""
    return Completion(
        frozen(np.concatenate([first.token_ids, second.token_ids])),
        frozen(np.concatenate([first.logprobs, second.logprobs])),
        frozen(np.concatenate([first.versions, second.versions])),
        frozen(np.concatenate([first.mixed, second.mixed])),
        second.stop_reason,
    )


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same array, marked read-only."""
    array.setflags(write=False)
    return array
