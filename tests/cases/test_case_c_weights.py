"""Cases C1, C4, C6, C7, C8 and C10 of real trackers, on the store, the updater and a small embedded engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from torch import nn

from relax.core.completion import Completion, GenerateInput, Sampling, Session
from relax.core.error import EngineError, InvariantError
from relax.core.protocol import EngineStatus, LoadMode, WeightReader
from relax.core.version import Version
from relax.core.weight import LoadReport, Probe
from relax.model.logprob import token_logprobs
from relax.model.name import bind_tensors, published_tensors
from relax.weights.digest import digest_of
from relax.weights.proof import check_proof
from relax.weights.store import WeightStore
from relax.weights.updater import EngineUpdater
from tests.training.setting import LORA, make_backend, make_model, make_rows, train_steps

PROBE_IDS = np.array([1, 5, 2, 7, 3], dtype=np.int32)


class Net(nn.Module):
    """A tied head, a packed projection and a persistent buffer: the kinds of tensors that loads get wrong (C1)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(9, 4)
            self.gate_up = nn.Linear(4, 8, bias=False)
            self.head = nn.Linear(4, 9, bias=False)
            self.register_buffer("scale", torch.rand(4) + 0.5)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(self.embed(ids)).chunk(2, dim=-1)
        return self.head(torch.sigmoid(gate) * up * self.scale + self.embed(ids))


@torch.no_grad()
def probe_logprobs(net: Net) -> np.ndarray:
    ids = torch.from_numpy(PROBE_IDS).long()
    values = token_logprobs(net(ids[:-1]), ids[1:])
    return np.concatenate([np.zeros(1, np.float32), values.numpy()])


class NetEngine:
    """An embedded engine without a scheduler. `leaves_out` simulates a loader that forgets one tensor after reporting success."""

    def __init__(self) -> None:
        self.net, self.version, self.paused, self.asleep = Net(seed=99), None, False, False
        self.leaves_out: str | None = None
        self.breaks_in_load = False

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        if self.version is None or self.paused or self.asleep:
            raise EngineError("the engine holds no live version")
        raise NotImplementedError

    async def pause(self, mode: LoadMode) -> None:
        self.paused = True

    async def load(self, version: Version, reader: WeightReader) -> LoadReport:
        assert self.paused
        weights = await reader.fetch(version)
        if self.breaks_in_load:
            raise EngineError("injected")
        tensors = dict(weights.tensors)
        if self.leaves_out is not None:
            tensors[self.leaves_out] = published_tensors(self.net)[self.leaves_out]
        bind_tensors(self.net, tensors)
        self.version, self.asleep = version, False
        return LoadReport(probe_logprobs(self.net), 0.0)

    async def resume(self) -> None:
        self.paused = False

    async def status(self) -> EngineStatus:
        return EngineStatus("engine", self.version, not self.paused, 0, 0, 1)


async def publish(store: WeightStore, trainer: Net, number: int) -> Version:
    version = Version(0, number)
    await store.publish(version, published_tensors(trainer), Probe(PROBE_IDS, probe_logprobs(trainer)))
    return version


@asynccontextmanager
async def updating(engine: NetEngine, store: WeightStore, budget: int = 0) -> AsyncIterator[EngineUpdater]:
    updater = EngineUpdater("engine", engine, store, budget=budget)
    task = asyncio.create_task(updater.run())
    try:
        yield updater
    finally:
        updater.close()
        async with asyncio.timeout(5):
            await task


def train(trainer: Net) -> None:
    with torch.no_grad():
        for value in (*trainer.parameters(), trainer.scale):
            value.mul_(1.25)


async def test_case_c1_engine_weights_equal_trainer_weights_after_every_sync() -> None:
    store, engine, trainer = WeightStore(), NetEngine(), Net(seed=1)
    async with updating(engine, store) as updater:
        for number in range(3):
            version = await publish(store, trainer, number)
            updater.notify(version)
            await updater.wait_live(version, 5)
            assert digest_of(published_tensors(engine.net)) == digest_of(published_tensors(trainer))
            assert engine.net.head.weight is engine.net.embed.weight
            train(trainer)
            assert digest_of(published_tensors(engine.net)) != digest_of(published_tensors(trainer))


@pytest.mark.parametrize("name", ["embed.weight", "gate_up.weight", "scale"])
async def test_case_c1_a_tensor_that_the_loader_forgot_is_found_by_the_proof(name: str) -> None:
    store, engine, trainer = WeightStore(), NetEngine(), Net(seed=1)
    async with updating(engine, store) as updater:
        first = await publish(store, trainer, 0)
        updater.notify(first)
        await updater.wait_live(first, 5)
        train(trainer)
        engine.leaves_out = name
        second = await publish(store, trainer, 1)
        updater.notify(second)
        with pytest.raises(EngineError, match=r"\[WS4\]"):
            await updater.wait_live(second, 5)
        assert updater.live is None


async def test_case_c4_an_engine_that_lost_its_weights_is_live_only_after_a_sync() -> None:
    store, engine, trainer = WeightStore(), NetEngine(), Net(seed=1)
    async with updating(engine, store) as updater:
        version = await publish(store, trainer, 0)
        updater.notify(version)
        await updater.wait_live(version, 5)
        bind_tensors(engine.net, published_tensors(Net(seed=98)))
        engine.version, engine.asleep = None, True
        updater.restarted()
        assert updater.live is None
        await updater.wait_live(version, 5)
        assert not engine.asleep
        assert digest_of(published_tensors(engine.net)) == digest_of(published_tensors(trainer))


async def test_case_c6_names_in_another_order_publish_the_same_version() -> None:
    trainer = Net(seed=1)
    tensors = published_tensors(trainer)
    digests = []
    for ordered in (tensors, dict(reversed(tensors.items()))):
        store = WeightStore()
        manifest = await store.publish(Version(0, 0), ordered)
        digests.append(manifest.digest)
        assert list((await store.fetch(Version(0, 0))).tensors) == sorted(tensors)
    assert digests[0] == digests[1]


async def test_case_c8_an_exception_in_the_middle_of_a_sync_leaves_the_old_version_and_the_next_works() -> None:
    store, engine, trainer = WeightStore(), NetEngine(), Net(seed=1)
    async with updating(engine, store, budget=1) as updater:
        first = await publish(store, trainer, 0)
        updater.notify(first)
        await updater.wait_live(first, 5)
        before = digest_of(published_tensors(engine.net))
        train(trainer)
        engine.breaks_in_load = True
        second = await publish(store, trainer, 1)
        updater.notify(second)
        with pytest.raises(EngineError, match="given up: loading v1: EngineError: injected"):
            await updater.wait_live(second, 5)
        assert digest_of(published_tensors(engine.net)) == before
        assert engine.version == first
        engine.breaks_in_load = False
        train(trainer)
        third = await publish(store, trainer, 2)
        updater.notify(third)
        await updater.wait_live(third, 5)
        assert digest_of(published_tensors(engine.net)) == digest_of(published_tensors(trainer))


async def test_case_c10_a_version_deleted_under_a_slow_reader_is_finished() -> None:
    store, engine, trainer = WeightStore(keep=1), NetEngine(), Net(seed=1)
    first = await publish(store, trainer, 0)
    expected = digest_of(published_tensors(trainer))
    reader_has = await store.fetch(first)
    train(trainer)
    await publish(store, trainer, 1)
    assert store.versions() == (Version(0, 1),)
    await engine.pause("recompute")

    class Slow:
        async def fetch(self, version: Version) -> object:
            return reader_has

    await engine.load(first, Slow())
    assert digest_of(published_tensors(engine.net)) == expected


async def test_case_c10_a_reader_that_comes_too_late_is_told_and_loads_the_newest() -> None:
    """v1 is gone when the engine asks for it; the updater fails that fetch and goes on to what was published since."""
    store, engine, trainer = WeightStore(keep=1), NetEngine(), Net(seed=1)
    await publish(store, trainer, 0)
    await publish(store, trainer, 1)
    async with updating(engine, store, budget=1) as updater:
        updater.notify(Version(0, 0))
        updater.notify(Version(0, 1))
        await updater.wait_live(Version(0, 1), 5)
        assert engine.version == Version(0, 1)


LONG_PROBE = np.arange(1, 26, dtype=np.int32)


@torch.no_grad()
def scores(model: nn.Module) -> np.ndarray:
    """float32[T]: logprobs of the long probe under a whole model."""
    ids = torch.from_numpy(LONG_PROBE).long()
    values = token_logprobs(model(input_ids=ids[None]).logits[0, :-1], ids[1:])
    return np.concatenate([np.zeros(1, np.float32), values.numpy()])


def other_weights(seed: int) -> nn.Module:
    """A whole small model in which every tensor is its own: norms begin as ones everywhere, projections near zero."""
    model = make_model(seed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(torch.rand_like(parameter))
    return model


@pytest.mark.parametrize("name", [*published_tensors(make_model())])
async def test_case_c1_any_tensor_of_a_whole_model_that_was_not_loaded_is_found_by_the_proof(name: str) -> None:
    """Whatever is published shows in the probe's logprobs: one tensor of the version before is beyond the tolerance."""
    trainer, before, engine = other_weights(1), other_weights(2), make_model(seed=3)
    new = published_tensors(trainer)
    manifest = await WeightStore().publish(Version(0, 1), new, Probe(LONG_PROBE, scores(trainer)))
    bind_tensors(engine, {**new, name: published_tensors(before)[name]})
    with pytest.raises(EngineError, match=r"\[WS4\]"):
        check_proof("engine", manifest, LoadReport(scores(engine), 0.0))
    bind_tensors(engine, new)
    assert check_proof("engine", manifest, LoadReport(scores(engine), 0.0)) < 1e-6


async def test_case_c7_a_version_that_is_applied_twice_gives_the_same_state() -> None:
    """Versions are whole, never differences: nothing that is loaded again is added again."""
    store, engine, trainer = WeightStore(), NetEngine(), Net(seed=1)
    first = await publish(store, trainer, 0)
    train(trainer)
    second = await publish(store, trainer, 1)
    await engine.pause("recompute")
    for version in (first, second, second, first, second):
        await engine.load(version, store)
    assert digest_of(published_tensors(engine.net)) == digest_of(published_tensors(trainer))


@pytest.mark.parametrize("base", [None, 0, 5])
async def test_case_c7_what_an_engine_held_before_does_not_matter(base: int | None) -> None:
    """An engine of any past (none, another version, weights of another run) ends with the version and no trace of the past."""
    store, engine, trainer = WeightStore(), NetEngine(), Net(seed=1)
    if base is not None:
        bind_tensors(engine.net, published_tensors(Net(seed=base)))
        engine.version = Version(0, base)
    version = await publish(store, trainer, 0)
    await engine.pause("recompute")
    await engine.load(version, store)
    assert digest_of(published_tensors(engine.net)) == digest_of(published_tensors(trainer))


async def test_case_c7_an_update_that_does_not_follow_is_refused() -> None:
    """The wrong base, for whoever publishes: a number that was left out, one that was there, an alias of nothing."""
    store, trainer = WeightStore(), Net(seed=1)
    with pytest.raises(InvariantError, match="ST7"):
        await store.publish_alias(Version(0, 0))
    await publish(store, trainer, 0)
    for number in (0, 2):
        with pytest.raises(InvariantError, match="WS1"):
            await publish(store, trainer, number)
        with pytest.raises(InvariantError, match="WS1"):
            await store.publish_alias(Version(0, number))
    alias = await store.publish_alias(Version(0, 1))
    again = await store.publish_alias(Version(0, 2))
    assert alias.digest == again.digest == digest_of(published_tensors(trainer))
    assert again.alias_of == Version(0, 0)


async def test_case_c7_an_adapter_is_merged_into_what_is_published_once() -> None:
    """The difference of a LoRA run lies beside its base: however often it is exported, the base is what it was."""
    backend = make_backend(config=LORA)
    train_steps(backend, make_rows(), 1)
    expected = digest_of(backend.export())
    assert [digest_of(backend.export()) for _ in range(3)] == [expected] * 3
    store = WeightStore()
    manifest = await store.publish(Version(0, 0), backend.export())
    for _ in range(2):
        engine = make_model(seed=9)
        bind_tensors(engine, (await store.fetch(Version(0, 0))).tensors)
        assert digest_of(published_tensors(engine)) == manifest.digest == expected
