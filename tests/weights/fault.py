"""One life of a trainer and two engines under drawn faults, on the real writer, catalog, reader, updater and state machine.

Each seed is a schedule: versions are published, harmed, half-written; engines are killed in the middle of a load, restarted, or fail;
the catalog is killed. What must hold is asserted whenever an engine goes live and when all is at rest (WS3, WS4, WS5, WS7).
"""

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from relax.core.completion import Completion, GenerateInput, Sampling, Session, frozen
from relax.core.error import EngineError
from relax.core.protocol import EngineStatus, LoadMode, WeightReader
from relax.core.version import Version
from relax.core.weight import LoadReport, Probe, TensorSpec, WeightSet
from relax.weights.bucket import Assembly, Bucket, cut
from relax.weights.digest import digest_of
from relax.weights.manifest import Stored, encode
from relax.weights.updater import EngineUpdater
from tests.weights.setting import Node

NAMES = ("embed", "gate", "norm", "out")


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3 + index, generator=generator) for index, name in enumerate(NAMES)}


def logprobs_of(tensors: Any) -> np.ndarray:
    """float32[5]: one number that each tensor shows in, as a model's logprobs do."""
    sums = [0.0, *(float((tensors[name] * torch.arange(1.0, tensors[name].numel() + 1)).sum()) for name in NAMES)]
    return frozen(np.array(sums, dtype=np.float32))


class Engine:
    """Copies tensor by tensor, and can be killed or fail between two of them; a killed one comes back empty."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name, self.chance = name, chance
        self.held: dict[str, torch.Tensor] = {}
        self.version: Version | None = None
        self.paused = False
        self.faults: list[str] = []
        self.on_kill: Callable[[], None] = lambda: None

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        raise NotImplementedError

    async def pause(self, mode: LoadMode) -> None:
        if self._draw("pause"):
            raise EngineError("injected in pause")
        self.paused = True

    async def load(self, version: Version, reader: WeightReader) -> LoadReport:
        assert self.paused, "load while decoding"
        weights = await reader.fetch(version)
        new: dict[str, torch.Tensor] = {}
        for name, tensor in weights.tensors.items():
            await asyncio.sleep(0)
            if self._draw("kill"):
                self.held, self.version, self.paused = {}, None, False
                self.on_kill()
                raise EngineError("the engine's process was killed")
            if self._draw("load"):
                raise EngineError("injected in load")
            new[name] = tensor
        if self._draw("stale"):  # a loader that forgets one tensor and reports success
            new["gate"] = self.held.get("gate", torch.zeros(4))
        self.held, self.version = new, version
        return LoadReport(logprobs_of(self.held), 0.0)

    async def resume(self) -> None:
        if self._draw("resume"):
            raise EngineError("injected in resume")
        self.paused = False

    async def status(self) -> EngineStatus:
        return EngineStatus(self.name, self.version, not self.paused, 0, 0, 1)

    def _draw(self, fault: str) -> bool:
        if fault in self.faults and self.chance.random() < 0.4:
            self.faults.remove(fault)
            return True
        return False


class BucketReader:
    """A reader whose versions go through buckets, harmed on the way as drawn."""

    def __init__(self, inner: WeightReader, chance: random.Random) -> None:
        self.inner, self.chance = inner, chance
        self.harm: str | None = None

    async def fetch(self, version: Version) -> WeightSet:
        sent = [Bucket(one.header, one.payload.clone()) for one in cut(await self.inner.fetch(version), 64)]
        harm, self.harm = self.harm, None
        place = self.chance.randrange(len(sent))
        if harm == "damaged bucket":
            sent[place].payload[0] ^= 1
        elif harm == "lost bucket":
            del sent[place]
        elif harm == "swapped buckets":
            sent[place - 1], sent[place] = sent[place], sent[place - 1]
        elif harm == "cut off":
            del sent[place:]
        assembly = Assembly()
        for bucket in sent:
            payload = assembly.place(bucket.header)
            payload.copy_(bucket.payload)
            assembly.take(bucket.header, payload)
        return assembly.finish()


HARMS = (
    "flipped", "cut", "gone", "re-typed", "missing", "extra", "re-ordered", "torn manifest",
    "damaged bucket", "lost bucket", "swapped buckets", "cut off",
)  # fmt: skip
ENGINE_FAULTS = ("pause", "kill", "load", "stale", "resume")


class Life:
    def __init__(self, folder: Path, seed: int, patience_s: float = 5.0) -> None:
        self.patience_s = patience_s
        self.chance = random.Random(seed)
        self.node = Node(folder, keep=2)
        self.published: dict[Version, str] = {}
        self.harmed: set[Version] = set()
        self.seen: list[str] = []
        self.engines = [Engine(f"engine-{index}", self.chance) for index in range(2)]
        self.readers = [BucketReader(self.node.reader(engine.name), self.chance) for engine in self.engines]
        self.updaters = [
            EngineUpdater(engine.name, engine, reader, on_live=self._on_live, on_failed=self._on_failed, budget=1)
            for engine, reader in zip(self.engines, self.readers, strict=True)
        ]
        self.failed: dict[str, bool] = {}
        for engine, updater in zip(self.engines, self.updaters, strict=True):
            engine.on_kill = updater.restarted

    async def run(self, steps: int = 6) -> None:
        tasks = [asyncio.create_task(updater.run()) for updater in self.updaters]
        try:
            await self._publish(harm=None)
            await self._wait_for_rest()
            for _ in range(steps):
                await self._step()
                await self._wait_for_rest()
                self._check_rest()
            await self._recover()
        finally:
            for updater in self.updaters:
                updater.close()
            async with asyncio.timeout(5):
                await asyncio.gather(*tasks)

    async def _step(self) -> None:
        """One version, with one thing that goes wrong, or none."""
        match self.chance.choice(["harm", "harm", "engine", "engine", "torn", "catalog", "alias", "nothing"]):
            case "harm":
                await self._publish(self.chance.choice(HARMS))
            case "engine":
                self.chance.choice(self.engines).faults = [self.chance.choice(ENGINE_FAULTS)]
                await self._publish(harm=None)
            case "torn":
                await self._die_half_way()
            case "catalog":
                await self._restart_catalog()
                await self._publish(harm=None)
            case "alias":
                version = self.node.writer.latest.next()
                manifest = await self.node.writer.publish_alias(version)
                self._tell(version, manifest.digest)
            case _:
                await self._publish(harm=None)

    async def _publish(self, harm: str | None) -> None:
        latest = self.node.writer.latest
        version = Version(0, 0) if latest is None else latest.next()
        tensors = weights_of(hash((version.incarnation, version.number)) & 0xFFFF)
        probe = Probe(frozen(np.arange(5, dtype=np.int32)), logprobs_of(tensors))
        manifest = await self.node.writer.publish(version, tensors, probe)
        assert manifest.digest == digest_of(tensors)
        if harm is not None:
            self.seen.append(harm)
            self._harm(version, harm)
        self._tell(version, manifest.digest)

    def _tell(self, version: Version, digest: str) -> None:
        self.published[version] = digest
        for updater in self.updaters:
            updater.notify(version)

    def _harm(self, version: Version, harm: str) -> None:
        """What a disk, a bug or a neighbour may do to a published version; the manifest's checksum is made to fit."""
        if harm in HARMS[-4:]:
            self.chance.choice(self.readers).harm = harm
            return
        self.harmed.add(version)
        path, stored = self.node.files.tensors(version), self.node.files.read(version)
        specs, offsets = dict(stored.manifest.specs), dict(stored.offsets)
        name, other = self.chance.sample(NAMES, 2)
        if harm == "flipped":
            data = bytearray(path.read_bytes())
            data[offsets[name] + self.chance.randrange(8)] ^= 1 << self.chance.randrange(8)
            path.write_bytes(data)
        elif harm == "cut":
            os.truncate(path, self.chance.randrange(path.stat().st_size))
        elif harm == "gone":
            path.unlink()
        elif harm == "re-typed":
            specs[name] = TensorSpec(specs[name].shape, "int32")
        elif harm == "missing":
            del specs[name], offsets[name]
        elif harm == "extra":
            specs["zero"], offsets["zero"] = TensorSpec((2,), "float32"), 0
        elif harm == "re-ordered":
            offsets[name], offsets[other] = offsets[other], offsets[name]
        text = encode(Stored(replace(stored.manifest, specs=specs), stored.num_bytes, MappingProxyType(offsets)))
        if harm == "torn manifest":
            text = text[: self.chance.randrange(1, len(text))]
        self.node.files.manifest(version).write_bytes(text)

    async def _die_half_way(self) -> None:
        """The trainer is killed while it writes; its next life goes on from what was whole."""
        self.seen.append("torn")
        version = self.node.writer.latest.next()
        aside = self.node.files.tensors(version)
        moment = self.chance.choice(["aside", "tensors"])
        path = aside.with_name(f".{aside.name}.1") if moment == "aside" else aside
        path.write_bytes(self.chance.randbytes(self.chance.randrange(200)))
        self.node.new_writer()
        await self.node.writer.resume()
        assert not path.exists(), "half a version was left"
        # Its last version may have been harmed after it was published: then a new incarnation begins (WS1).
        known = await self.node.service.versions()
        if self.node.writer.latest != known[-1]:
            self.node.writer.latest = Version(known[-1].incarnation + 1, known[-1].number)
        await self._publish(harm=None)

    async def _restart_catalog(self) -> None:
        self.seen.append("catalog")
        service = self.node.new_service(grace_s=0.0)
        whole = await service.restore()
        self.node.writer._catalog = service
        for reader in self.readers:
            reader.inner._catalog = service  # type: ignore[attr-defined]
            await reader.inner.reattach()  # type: ignore[attr-defined]
        assert set(whole) <= self.published.keys()

    async def _recover(self) -> None:
        """Whatever happened: the next version that is whole is live on every engine (C8)."""
        for engine in self.engines:
            engine.faults = []
        await self._publish(harm=None)
        newest = max(self.published)
        for updater in self.updaters:
            await updater.wait_live(newest, self.patience_s)
        await self._wait_for_rest()
        self._check_rest()
        assert [engine.version for engine in self.engines] == [newest] * 2

    async def _wait_for_rest(self) -> None:
        """Until every engine is at its newest version or given up."""
        newest = max(self.published)
        for updater in self.updaters:
            try:
                await updater.wait_live(newest, self.patience_s)
            except EngineError as error:
                if "given up" not in str(error):
                    raise

    def _check_rest(self) -> None:
        for engine, updater in zip(self.engines, self.updaters, strict=True):
            if updater.live is None:
                assert self.failed[engine.name], f"{engine.name} serves nothing and nobody was told"
                continue
            assert not engine.paused, "paused for ever"
            assert updater.live == engine.version == max(self.published)
            assert engine.version not in self.harmed, "a harmed version is live"
            assert digest_of(engine.held) == self.published[engine.version], "half loaded"

    def _on_live(self, name: str, version: Version) -> None:
        engine = self.engines[int(name[-1])]
        self.failed[name] = False
        assert not engine.paused
        assert engine.version == version
        assert digest_of(engine.held) == self.published[version], "live with other bytes than were published"

    def _on_failed(self, name: str, reason: str, final: bool) -> None:
        self.failed[name] = True
