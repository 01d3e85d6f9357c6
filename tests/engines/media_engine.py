"""Engines of tiny models that read media, and the logprobs that transformers' own forward with raw features gives."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import torch

from relax.core.completion import Completion, GenerateInput, Ints, Sampling, Session, frozen
from relax.core.media import Medium
from relax.engines.torch.engine import TorchEngine
from relax.model.logprob import token_logprobs
from relax.model.name import published_tensors
from relax.model.vocabulary import Vocabulary
from tests.engines.setting import Reader, session, torch_engine
from tests.model.media_setting import EOS, PAD, SIZE, TEXT, StandIn, build, model_of, raw_inputs

ALLOWED = frozen(np.isin(np.arange(SIZE), [EOS, *TEXT]))
WORDS = Vocabulary(SIZE, ALLOWED, PAD, (EOS,), None, False, False, ())
Row = tuple[Ints, Sequence[Medium]]


def reader_of(name: str) -> Reader:
    """Version `n` is the model with seed `n`."""
    return Reader(lambda number: published_tensors(model_of(name, number)))


def media_engine(
    name: str, number: int | None = 0, family: Any = None, **config: Any
) -> AbstractAsyncContextManager[TorchEngine]:
    return torch_engine(
        number,
        build(name, 99),
        words=WORDS,
        family=StandIn(name) if family is None else family,
        reader=reader_of(name),
        **config,
    )


async def ask(engine: Any, row: Row, sampling: Sampling, who: Session | None = None) -> Completion:
    completion: Completion = await engine.generate(GenerateInput(row[0], tuple(row[1])), sampling, who or session())
    return completion


async def ask_many(engine: Any, requests: Sequence[tuple[Row, Sampling, Session]], spread: int = 1) -> list[Completion]:
    """All requests, `spread` event-loop turns apart, so that they join while others run."""
    tasks = []
    for row, sampling, who in requests:
        tasks.append(asyncio.create_task(ask(engine, row, sampling, who)))
        for _ in range(spread):
            await asyncio.sleep(0)
    return await asyncio.gather(*tasks)


def gap(name: str, row: Row, completion: Completion, temperature: float = 1.0) -> float:
    """Largest difference between the logprobs of a completion and those of one raw forward under each of its versions."""
    full = np.concatenate([row[0], completion.token_ids]).astype(np.int32)
    raw, ids, start = raw_inputs(name, [(full, row[1])]), torch.tensor(full).long(), len(row[0])
    worst = 0.0
    for number in set(completion.versions.tolist()):
        with torch.no_grad():
            logits = model_of(name, number)(**raw, use_cache=False).logits[0]
        found = token_logprobs(logits[start - 1 : -1], ids[start:], temperature or 1.0, torch.tensor(ALLOWED)).numpy()
        chosen = completion.versions == number
        worst = max(worst, float(np.abs(found - completion.logprobs)[chosen].max()))
    return worst
