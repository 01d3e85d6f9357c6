"""Sampled tokens per second of the embedded engine against transformers `generate`, on one model, in one run.

    python -m benchmarks.engine [--quick] [--threads N] [--rounds N]

64 prompts of 24-40 tokens x 8 siblings, completion lengths forced, log-uniform in 8-128. `generate` runs each batch to its
longest row and only wanted tokens count; its best of batch 32, 64 and 128 is compared. Last line: one JSON object.
"""

import argparse
import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from benchmarks.outcome import Aim, report
from relax.core.completion import GenerateInput, Sampling, Session, frozen
from relax.core.id import group_id
from relax.core.seed import derive_seed
from relax.core.version import Version
from relax.core.weight import Manifest, WeightSet
from relax.engines.config import TorchEngineConfig
from relax.engines.torch.engine import TorchEngine
from relax.model.load import load_model, load_tokenizer
from relax.model.name import published_tensors, tensor_specs
from relax.model.vocabulary import Vocabulary, read_vocabulary
from relax.runtime.compute import ComputeThread

MODEL = Path(__file__).parent.parent / "recipes" / "models" / "qwen3-char"
PROMPTS, SIBLINGS, BATCHES, AIM = 64, 8, (32, 64, 128), 2.0


@dataclass(frozen=True)
class Work:
    """One request: `prompt` is shared by the siblings of a group; `length` tokens are forced."""

    group: int
    sibling: int
    prompt: list[int]
    length: int


class MemoryReader:
    """Weights that are already here."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    async def fetch(self, version: Version) -> WeightSet:
        return WeightSet(Manifest(version, tensor_specs(self._tensors), digest=""), self._tensors)


def make_work(vocabulary: Vocabulary, prompts: int, seed: int = 0) -> list[Work]:
    random = np.random.default_rng(seed)
    usable = np.flatnonzero(vocabulary.allowed)
    work = []
    for group in range(prompts):
        prompt = random.choice(usable, random.integers(24, 41)).tolist()
        lengths = np.exp(random.uniform(np.log(8), np.log(128), SIBLINGS)).round().astype(int)
        work += [Work(group, sibling, prompt, int(length)) for sibling, length in enumerate(lengths)]
    return work


def time_generate(model: Any, vocabulary: Vocabulary, work: list[Work], batch: int) -> float:
    """Seconds for all the work in batches, left-padded, each run to its longest row."""
    started = time.perf_counter()
    for start in range(0, len(work), batch):
        rows = work[start : start + batch]
        width = max(len(row.prompt) for row in rows)
        ids = torch.tensor([[vocabulary.pad_id] * (width - len(row.prompt)) + row.prompt for row in rows])
        mask = torch.tensor([[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in rows])
        longest = max(row.length for row in rows)
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=vocabulary.pad_id,
        )
    return time.perf_counter() - started


async def time_engine(engine: TorchEngine, work: list[Work]) -> float:
    """Seconds for all the work, submitted at once."""

    async def sample(row: Work) -> int:
        session = Session(
            group_id(row.group), row.sibling, 0, 0, derive_seed(0, row.group, row.sibling), 0, f"g{row.group}"
        )
        # A stop id that no model samples: lengths are forced.
        sampling = Sampling(temperature=1.0, max_tokens=row.length, stop_ids=(-1,))
        token_ids = frozen(np.array(row.prompt, dtype=np.int32))
        return len(await engine.generate(GenerateInput(token_ids), sampling, session))

    started = time.perf_counter()
    lengths = await asyncio.gather(*(sample(row) for row in work))
    assert lengths == [row.length for row in work]
    return time.perf_counter() - started


async def measure(threads: int, rounds: int, prompts: int) -> dict[str, float]:
    """Best seconds of each contender over interleaved rounds, so that a busy neighbour hits all alike."""
    model = load_model(str(MODEL), "random", "float32", seed=0)
    vocabulary = read_vocabulary(load_tokenizer(str(MODEL)), model.config)
    work = make_work(vocabulary, prompts)
    compute = ComputeThread("engine", threads)
    own = load_model(str(MODEL), "random", "float32", seed=0)
    engine = TorchEngine(TorchEngineConfig(), own, vocabulary, compute, "engine")
    await engine.load(Version(), MemoryReader(published_tensors(model)))
    warm = work[: BATCHES[0]]
    await time_engine(engine, warm)
    await compute.run(time_generate, model, vocabulary, warm, BATCHES[0])
    best: dict[str, float] = {}
    for _ in range(rounds):
        for batch in BATCHES:
            seconds = await compute.run(time_generate, model, vocabulary, work, batch)
            best[f"generate_{batch}"] = min(seconds, best.get(f"generate_{batch}", seconds))
        seconds = await time_engine(engine, work)
        best["engine"] = min(seconds, best.get("engine", seconds))
    await engine.close()
    compute.close()
    tokens = sum(row.length for row in work)
    return {name: tokens / seconds for name, seconds in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few prompts, one round: does it run?")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads, for both")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds; the best of each counts")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rounds, prompts = (1, 4) if arguments.quick else (arguments.rounds, PROMPTS)
    rates = asyncio.run(measure(arguments.threads, rounds, prompts))
    for name, rate in rates.items():
        print(f"{name:14s} {rate:10,.0f} tokens/s")
    ratio = rates["engine"] / max(rate for name, rate in rates.items() if name != "engine")
    reason = "the batch is small, or the machine is busy; larger batches hide the cost of a decode step's Python"
    aims = [Aim("sampled tokens/s, engine / best generate", ratio, AIM, reason=reason, unit="x")]
    report("engine", aims, quick=arguments.quick, threads=arguments.threads, tokens_per_s=rates)


if __name__ == "__main__":
    main()
