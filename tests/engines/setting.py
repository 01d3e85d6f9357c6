"""Engines, weights and requests that the tests of engines share, their contract suite and their cases included."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax.core.completion import Completion, GenerateInput, Ints, Sampling, Session, frozen
from relax.core.error import TransportError
from relax.core.id import group_id
from relax.core.protocol import Decode
from relax.core.seed import derive_seed
from relax.core.version import Version
from relax.core.weight import Manifest, Probe, Tensor, WeightSet
from relax.engines.config import TorchEngineConfig
from relax.engines.torch.engine import TorchEngine
from relax.model.load import load_model, load_tokenizer
from relax.model.logprob import token_logprobs
from relax.model.name import published_tensors, tensor_specs
from relax.model.vocabulary import Vocabulary, read_vocabulary
from relax.runtime.compute import ComputeThread

MODEL_PATH = Path(__file__).resolve().parents[2] / "recipes" / "models" / "qwen3-char"
NO_STOP = (-1,)
"""A stop id that no model samples, so that the budget decides the length."""


@cache
def model_of(seed: int) -> Any:
    """A model nobody may change; larger weights than the initial ones, so that distributions differ from uniform."""
    model = load_model(MODEL_PATH, "random", "float32", seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


@cache
def vocabulary() -> Vocabulary:
    return read_vocabulary(load_tokenizer(MODEL_PATH), model_of(0).config)


class Reader:
    """Version `n` is `weights(n)`; versions in `gone` cannot be fetched. `before` runs inside each fetch."""

    def __init__(
        self,
        weights: Callable[[int], dict[str, Tensor]] | None = None,
        probe: Ints | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.temperature = temperature
        self.weights = weights or (lambda number: published_tensors(model_of(number)))
        self.probe = probe
        self.gone: set[int] = set()
        self.before: Callable[[], Any] | None = None

    async def fetch(self, version: Version) -> WeightSet:
        if self.before is not None:
            await self.before()
        if version.number in self.gone:
            raise TransportError(f"{version} is gone")
        tensors = self.weights(version.number)
        probe = None
        if self.probe is not None:
            probe = Probe(self.probe, frozen(np.zeros(len(self.probe), np.float32)), temperature=self.temperature)
        return WeightSet(Manifest(version, tensor_specs(tensors), "", probe), tensors)


@asynccontextmanager
async def torch_engine(
    number: int | None = 0,
    model: Any = None,
    deterministic: bool = False,
    words: Vocabulary | None = None,
    decode: Decode | None = None,
    family: Any = None,
    reader: Reader | None = None,
    **config: Any,
) -> AsyncIterator[TorchEngine]:
    """An engine on its own compute thread, at version `number` of `reader` unless None; closed at the end."""
    compute = ComputeThread("engine")
    own = load_model(MODEL_PATH, "random", "float32", 99) if model is None else model
    engine = TorchEngine(
        TorchEngineConfig(**config), own, words or vocabulary(), compute, "engine-0", deterministic, decode, family
    )
    try:
        if number is not None:
            known = reader or (Reader() if model is None else Reader(lambda _: published_tensors(own)))
            await engine.load(Version(0, number), known)
        yield engine
    finally:
        await engine.close()
        compute.close()


def prompt(length: int, seed: int = 0) -> Ints:
    usable = np.flatnonzero(vocabulary().allowed)[:90]
    return frozen(np.random.default_rng(seed).choice(usable, length).astype(np.int32))


def session(number: int = 0, **changes: Any) -> Session:
    values: dict[str, Any] = {
        "group": group_id(number),
        "sibling": 0,
        "turn": 0,
        "base": 0,
        "seed": derive_seed(7, number),
    }
    return Session(**(values | changes))


def forced(max_tokens: int, **changes: Any) -> Sampling:
    """Sampling that ends by budget only."""
    return Sampling(**({"temperature": 1.0, "max_tokens": max_tokens, "stop_ids": NO_STOP} | changes))


async def ask(engine: Any, token_ids: Ints, sampling: Sampling, who: Session | None = None) -> Completion:
    completion: Completion = await engine.generate(GenerateInput(token_ids), sampling, who or session())
    return completion


async def ask_many(
    engine: Any, requests: Sequence[tuple[Ints, Sampling, Session]], spread: int = 1
) -> list[Completion]:
    """All requests, `spread` event-loop turns apart, so that they join while others run."""
    tasks = []
    for token_ids, sampling, who in requests:
        tasks.append(asyncio.create_task(ask(engine, token_ids, sampling, who)))
        for _ in range(spread):
            await asyncio.sleep(0)
    return await asyncio.gather(*tasks)


async def until_sampled(engine: Any, tokens: int) -> None:
    """Return once the engine has sampled so many tokens in all."""
    async with asyncio.timeout(30):
        while (await engine.status()).sampled_tokens < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def reference_logprobs(
    token_ids: Ints, completion: Completion, temperature: float, model_for: Callable[[int], Any] = model_of
) -> Any:
    """float32[N]: logprobs of the sampled tokens by one full forward per version, as the trainer computes them."""
    full = torch.tensor(np.concatenate([token_ids, completion.token_ids])).long()
    allowed = torch.tensor(vocabulary().allowed)
    values = np.zeros(len(completion), dtype=np.float32)
    for number in set(completion.versions.tolist()):
        with torch.no_grad():
            logits = model_for(number)(input_ids=full[None]).logits[0]
        start = len(token_ids)
        reported = temperature or 1.0  # greedy decoding reports the logprobs of temperature 1
        found = token_logprobs(logits[start - 1 : -1], full[start:], reported, allowed).numpy()
        chosen = completion.versions == number
        values[chosen] = found[chosen]
    return values
