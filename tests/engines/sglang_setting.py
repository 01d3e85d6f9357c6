"""An engine in front of a fake server, and versions whose probes say what a trainer would say."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from relax.core.completion import frozen
from relax.core.protocol import Decode
from relax.core.version import Version
from relax.core.weight import Manifest, Probe, WeightSet
from relax.engines.config import SglangEngineConfig
from relax.engines.sglang.engine import SglangEngine
from relax.model.load import load_model
from relax.model.name import published_tensors, tensor_specs
from relax.runtime.compute import ComputeThread
from tests.engines.setting import MODEL_PATH, Reader, model_of, prompt, vocabulary
from tests.engines.sglang_server import FakeServer, digest, expected_logprobs

PROBE = prompt(6, 3)


class LoopClock:
    """The services' own, without the services."""

    def time(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def weights_of(number: int) -> int:
    """What the fake server's model is under version `number`."""
    return digest({name: value.numpy() for name, value in published_tensors(model_of(number)).items()})


class ProvenReader(Reader):
    """Versions with the probe that their trainer would publish."""

    async def fetch(self, version: Version) -> WeightSet:
        weights = await super().fetch(version)
        logprobs = frozen(expected_logprobs(weights_of(version.number), PROBE, self.temperature))
        probe = Probe(PROBE, logprobs, temperature=self.temperature)
        return WeightSet(Manifest(version, tensor_specs(weights.tensors), "", probe), weights.tensors)


@asynccontextmanager
async def sglang_engine(
    fake: FakeServer, folder: Path, number: int | None = 1, decode: Decode | None = None, **config: Any
) -> AsyncIterator[SglangEngine]:
    """At version `number` unless None; closed at the end."""
    compute = ComputeThread("engine")
    node = SglangEngineConfig(url=fake.url, folder=str(folder), **config)
    model = load_model(MODEL_PATH, "random", "float32", 99)
    engine = SglangEngine(node, model, vocabulary(), compute, "engine-0", LoopClock(), decode, mark="")
    try:
        if number is not None:
            await engine.load(Version(0, number), ProvenReader())
        yield engine
    finally:
        await engine.close()
        compute.close()


def same(left: Any, right: Any) -> bool:
    return bool(np.allclose(left, right, atol=1e-5))
