"""What every engine refuses before it does any work, and the errors it refuses with.

Called by each engine at the start of `generate`. A refusal is the request's fault: asking another engine gives the same answer.
"""

import math
from collections.abc import Mapping

from relax.core.completion import GenerateInput, Sampling, Session
from relax.core.error import EngineError
from relax.core.media import Modality, miscounted


class RefusedError(EngineError):
    """The request cannot be served as it was asked, by this engine or any like it."""


class ContextError(RefusedError):
    """The prompt leaves no room for a single token."""


class StaleError(RefusedError):
    """The engine serves a version below the group's base version (ST2): whoever routed the request broke the rule."""


def check_base(session: Session, live: int, name: str) -> None:
    """Raises StaleError when `live`, the engine's version number, is below the base version of the request."""
    if live < session.base:
        raise StaleError(
            f"[ST2] engine {name} serves version {live}, below base version {session.base} of group {session.group};"
            " send the request to an engine at or above the base version"
        )


def checked_budget(input: GenerateInput, sampling: Sampling, context: int, vocabulary_size: int) -> int:
    """Tokens that the request may sample: `max_tokens`, or what of the context is left. Raises RefusedError."""
    token_ids = input.token_ids
    if token_ids.ndim != 1 or len(token_ids) == 0:
        raise RefusedError(f"the prompt has shape {token_ids.shape}; expected int32[T] with at least one token")
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocabulary_size:
        wrong = lowest if lowest < 0 else highest
        raise RefusedError(f"the prompt holds token id {wrong}; the model knows ids 0 to {vocabulary_size - 1}")
    _check_sampling(sampling)
    if len(token_ids) >= context:
        raise ContextError(
            f"the prompt has {len(token_ids)} tokens and the context {context}, so nothing can be sampled;"
            " shorten prompts (data.max_prompt_tokens) or raise rollout.max_context_tokens or the engine's kv_tokens"
        )
    return min(sampling.max_tokens, context - len(token_ids))


def check_media(input: GenerateInput, placeholders: Mapping[Modality, int] | None, name: str) -> None:
    """`placeholders` are the tokens that stand for one feature of each modality; None: engine `name` reads text only.

    Raises RefusedError for media that the model does not read, or that are not what the prompt's placeholders stand for (MM1).
    """
    if placeholders is None:
        if input.media:
            raise RefusedError(f"engine {name} serves text only; the prompt has {len(input.media)} media")
        return
    unread = sorted({medium.modality for medium in input.media} - set(placeholders))
    if unread:
        raise RefusedError(f"the model of engine {name} reads no {', '.join(unread)}, which the prompt holds")
    for modality, count, features in miscounted(input.token_ids, placeholders, input.media):
        raise RefusedError(
            f"[MM1] the prompt has {count} placeholders for {modality} (token {placeholders[modality]}), but its media"
            f" have {features} features; render the prompt and load its media from the same parts"
        )
    if int(input.token_ids[-1]) in placeholders.values():
        raise RefusedError("[MM1] the prompt ends inside a medium; expected a token after its last placeholder")


def _check_sampling(sampling: Sampling) -> None:
    if sampling.max_tokens < 1:
        raise RefusedError(f"max_tokens is {sampling.max_tokens}; expected at least 1")
    if not (sampling.temperature >= 0 and math.isfinite(sampling.temperature)):
        raise RefusedError(f"temperature is {sampling.temperature}; expected 0 (greedy) or a finite number above 0")
    if not 0 < sampling.top_p <= 1:
        raise RefusedError(f"top_p is {sampling.top_p}; expected above 0 and at most 1 (1 is off)")
    if sampling.top_k < 0:
        raise RefusedError(f"top_k is {sampling.top_k}; expected 0 (off) or more")
    if not all(sampling.stop):
        raise RefusedError("a stop string is empty; every text holds it, so nothing could be sampled")
