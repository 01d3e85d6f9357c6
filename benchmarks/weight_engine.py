"""One engine process of the weights benchmark: follows the catalog of the parent, maps each version, and says what that cost.

Started by `benchmarks.weights`. Two kinds: `layers` is a pile of linear layers of any size that serves nobody, `torch` the embedded
engine on a tiny model with requests that never end. Both are driven by the real updater.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from relax.core.completion import Completion, GenerateInput, Sampling, Session, frozen
from relax.core.error import EngineError
from relax.core.id import group_id
from relax.core.protocol import EngineStatus, LoadMode, WeightReader
from relax.core.version import Version
from relax.core.weight import LoadReport
from relax.engines.config import TorchEngineConfig
from relax.engines.torch.engine import TorchEngine
from relax.model.load import load_model, load_tokenizer
from relax.model.name import bind_tensors, copy_tensors, published_tensors
from relax.model.vocabulary import read_vocabulary
from relax.runtime.compute import ComputeThread
from relax.runtime.wire_client import WireClient
from relax.weights.service import follow
from relax.weights.shared import SharedReader
from relax.weights.updater import EngineUpdater

MODEL = Path(__file__).parent.parent / "recipes" / "models" / "qwen3-char"
ROWS, REQUESTS, TOKENS = 8, 16, 200


def make_layers(count: int, width: int) -> nn.Module:
    """Square linear layers whose memory is not touched before it is written to."""
    return nn.Sequential(*(nn.utils.skip_init(nn.Linear, width, width, bias=False) for _ in range(count)))


class LayerEngine:
    """Binds what it is given; between `pause` and `resume` it serves nobody."""

    def __init__(self, model: nn.Module, width: int) -> None:
        self.model, self.width = model, width
        self.version: Version | None = None
        self.figures: dict[str, float] = {}
        self._paused_at = 0.0

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        raise EngineError("this engine loads weights for a benchmark and serves nobody")

    async def pause(self, mode: LoadMode) -> None:
        self._paused_at = time.perf_counter()

    async def load(self, version: Version, reader: WeightReader) -> LoadReport:
        weights = await reader.fetch(version)
        started = time.perf_counter()
        bind_tensors(self.model, weights.tensors)
        bound = time.perf_counter() - started
        self.version = version
        return LoadReport(None, bound)

    async def resume(self) -> None:
        self.figures["pause_s"] = time.perf_counter() - self._paused_at
        self.figures["first_forward_s"] = self.forward()
        self.figures["next_forward_s"] = self.forward()

    async def status(self) -> EngineStatus:
        return EngineStatus("layers", self.version, True, 0, 0, 1)

    @torch.inference_mode()
    def forward(self) -> float:
        """Seconds to go once through all weights."""
        started = time.perf_counter()
        self.model(torch.ones(ROWS, self.width))
        return time.perf_counter() - started

    def copy(self) -> float:
        """Seconds that the swap would take if the engine copied the version into weights of its own."""
        own = make_layers(len(self.model), self.width)  # type: ignore[arg-type]
        tensors = published_tensors(self.model)
        copy_tensors(tensors, own)  # its pages are made here
        started = time.perf_counter()
        copy_tensors(tensors, own)
        return time.perf_counter() - started


def anonymous_bytes() -> int:
    """Memory of this process alone: no file and no shared memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


async def serve(kind: str, address: str, folder: Path, name: str, count: int, width: int) -> None:
    """Load every version until the parent says that it is enough."""
    client = WireClient(address, name)
    desk: Any = client.proxy("desk")
    reader = SharedReader(folder, client.proxy("weights"), name)
    make = make_layer_seat if kind == "layers" else make_torch_seat
    engine, figures, load = make(name, count, width)

    async def on_live(name: str, version: Version) -> None:
        cost = reader.counters
        found = {
            "live_at": time.monotonic(),
            "anonymous_bytes": anonymous_bytes(),
            "verify_s": cost.seconds.get("verify", 0.0),
            "map_s": cost.seconds.get("map", 0.0),
            "wait_s": cost.seconds.get("wait", 0.0),
            **{name: measure.value for name, measure in updater.counters.measures().items()},
            **figures(),
        }
        await desk.live(name, version.number, found)

    updater = EngineUpdater(name, engine, reader, on_live=on_live)
    tasks = [
        asyncio.create_task(updater.run()),
        asyncio.create_task(follow(client.proxy("weights"), updater.notify)),
        asyncio.create_task(load(updater)),
    ]
    await desk.ready(name, float(anonymous_bytes()))
    # The parent ends the measurement; when it dies, or a task fails, this ends too.
    enough = asyncio.create_task(desk.enough())
    done, _ = await asyncio.wait([enough, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    if isinstance(engine, LayerEngine):
        await desk.copied(name, engine.copy())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()


def make_layer_seat(name: str, count: int, width: int) -> tuple[Any, Any, Any]:
    """An engine, what it measures itself, and the load on it."""
    engine = LayerEngine(make_layers(count, width), width)

    async def nothing(updater: EngineUpdater) -> None:
        await asyncio.Event().wait()  # no load; cancelled at the end

    return engine, lambda: dict(engine.figures), nothing


def make_torch_seat(name: str, count: int, width: int) -> tuple[Any, Any, Any]:
    """The embedded engine with `REQUESTS` requests under way at any moment."""
    model = load_model(str(MODEL), "random", "float32", seed=1)
    vocabulary = read_vocabulary(load_tokenizer(str(MODEL)), model.config)
    compute = ComputeThread("engine", 1)
    engine = TorchEngine(TorchEngineConfig(slots=REQUESTS), model, vocabulary, compute, name)

    async def ask(index: int) -> None:
        ids = frozen(np.flatnonzero(vocabulary.allowed)[:24].astype(np.int32))
        sampling = Sampling(temperature=1.0, max_tokens=TOKENS, stop_ids=(-1,))
        number = 0
        while True:
            number += 1
            await engine.generate(GenerateInput(ids), sampling, Session(group_id(index), 0, 0, 0, number))

    async def load(updater: EngineUpdater) -> None:
        await updater.wait_live(Version(), 60)
        await asyncio.gather(*(ask(index) for index in range(REQUESTS)))

    return engine, lambda: {"sampled_tokens": float(engine._batcher.sampled_tokens)}, load
