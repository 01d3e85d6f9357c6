"""What goes into SGLang's `/generate` and what its answers say, checked; nothing here waits.

Called by the engine. Ids and logprobs are the server's own, one pair for each sampled token (TK1). Anything of another shape than
documented is an EngineError: a guess would be trained on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from relax.core.completion import Bools, Floats, Ints, Sampling, frozen
from relax.core.error import EngineError
from relax.core.message import Json

FORBIDDEN = -1e9
"""Added to the logits of ids outside the allowed vocabulary, so that they have no share in any distribution (TK5)."""
_SEEDS = 1 << 31
"""A seed of the server is an integer below this."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one request sampled. `matched` is the stop id or string that ended it, as the server says."""

    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    matched: int | str | None = None


def forbidden_bias(allowed: Bools) -> dict[str, float]:
    """SGLang's `logit_bias` that leaves only allowed ids."""
    return {str(token_id): FORBIDDEN for token_id in np.flatnonzero(~allowed).tolist()}


def sampling_params(sampling: Sampling, seed: int, bias: Mapping[str, float]) -> dict[str, Json]:
    """Every parameter that changes a distribution, also those at their neutral value: a server may have defaults of its own.

    `sampling` holds what is left of the request. Without a usable stop id the server ignores its own as well.
    """
    stop_ids = [token_id for token_id in sampling.stop_ids if token_id >= 0]
    params: dict[str, Json] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "sampling_seed": seed % _SEEDS,
        "stop_token_ids": stop_ids,
        "stop": list(sampling.stop),
        "ignore_eos": not stop_ids,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if bias:
        params["logit_bias"] = dict(bias)
    return params


def read_part(answer: Any, label: str, most: int, vocabulary_size: int) -> Part:
    """The answer to a single request for at most `most` tokens, sampled under weight version `label`. Raises EngineError."""
    meta = _meta(answer)
    finish = meta.get("finish_reason")
    if not isinstance(finish, dict) or (kind := finish.get("type")) not in ("stop", "length", "abort"):
        raise EngineError(f"finish_reason is {finish!r}; expected a type of stop, length or abort")
    pairs = meta.get("output_token_logprobs")
    if pairs is None and kind == "abort":
        pairs = []  # it was aborted while it waited
    token_ids, logprobs = _pairs(pairs, "output_token_logprobs", vocabulary_size)
    told = meta.get("completion_tokens", len(token_ids))
    if told != len(token_ids) or len(token_ids) > most:
        raise EngineError(f"{told} tokens are told, {len(token_ids)} have logprobs, at most {most} were asked for")
    if not token_ids and kind != "abort":
        raise EngineError(f"no token was sampled, and the request ended with {kind}")
    if token_ids:
        check_label(meta, label)
    return Part(token_ids, logprobs, kind, finish.get("matched"))


def check_label(meta: Mapping[str, Any], label: str) -> None:
    """Raises EngineError when any token was sampled under another weight version than `label`."""
    spans = meta.get("weight_versions") or []
    found = {meta.get("weight_version"), *(span.get("version") for span in spans)}
    if found != {label}:
        raise MislabelledError(
            f"tokens were sampled from weight version {', '.join(sorted(map(str, found)))}, loaded was {label}:"
            " the server was started again, or somebody else loads weights into it"
        )


class MislabelledError(EngineError):
    """The server does not hold the weights that this engine gave it."""


def probe_request(token_ids: Ints, temperature: float, bias: Mapping[str, float]) -> dict[str, Json]:
    """A batch that samples one token after each prefix and asks for the logprob of the token that really follows.

    So the proof goes through what sampling goes through: temperature, allowed vocabulary, and what the server calls a logprob.
    """
    ids = token_ids.tolist()
    sampling = Sampling(temperature, 1)
    return {
        "input_ids": [ids[:end] for end in range(1, len(ids))],
        "sampling_params": sampling_params(sampling, 0, bias),
        "return_logprob": True,
        "token_ids_logprob": [[token_id] for token_id in ids[1:]],
        "stream": False,
    }


def read_probe(answer: Any, token_ids: Ints, label: str) -> Floats:
    """float32[T] of the answers to `probe_request`; position 0 is 0. Raises EngineError."""
    if not isinstance(answer, list) or len(answer) != len(token_ids) - 1:
        raise EngineError(f"the probe has {len(token_ids) - 1} prefixes; expected as many answers in a list")
    logprobs = [0.0]
    for one, token_id in zip(answer, token_ids[1:].tolist(), strict=True):
        meta = _meta(one)
        check_label(meta, label)
        rows = meta.get("output_token_ids_logprobs")
        if not isinstance(rows, list) or len(rows) != 1:
            raise EngineError(f"output_token_ids_logprobs is {str(rows)[:80]}; expected one row")
        found, values = _pairs(rows[0], "output_token_ids_logprobs", math.inf)
        if found != [token_id]:
            raise EngineError(f"the probe asked for token {token_id} and got {found}")
        logprobs += values
    return frozen(np.asarray(logprobs, dtype=np.float32))


def _meta(answer: Any) -> dict[str, Any]:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise EngineError(f"an answer of the server has no meta_info: {str(answer)[:200]}")
    return meta


def _pairs(rows: Any, what: str, vocabulary_size: float) -> tuple[list[int], list[float]]:
    """Token ids and logprobs of rows [logprob, token id, text]."""
    if not isinstance(rows, list):
        raise EngineError(f"{what} is {str(rows)[:80]}; expected a list, as return_logprob was asked for")
    token_ids, logprobs = [], []
    for row in rows:
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) < 2 or not _is_pair(row[0], row[1]):
            raise EngineError(f"{what} holds {str(row)[:80]}; expected [logprob, token id, text]")
        if not 0 <= row[1] < vocabulary_size:
            raise EngineError(f"{what} holds token id {row[1]}; the model knows ids 0 to {vocabulary_size - 1}")
        token_ids.append(row[1])
        logprobs.append(float(row[0]))
    return token_ids, logprobs


def _is_pair(logprob: Any, token_id: Any) -> bool:
    number = isinstance(logprob, int | float) and not isinstance(logprob, bool) and math.isfinite(logprob)
    return number and isinstance(token_id, int) and not isinstance(token_id, bool)
