"""The in-process store: WS1 order, WS3 verification, WS7 retention, ST7 aliases."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.error import InvariantError, TransportError, UserError
from relax.core.version import Version
from relax.core.weight import Probe
from relax.weights import store as store_module
from relax.weights.store import WeightStore
from relax.weights.transport import build_transport


class SlowCompute:
    """Runs a call when `release` is set: a publish or a verification that takes its time."""

    busy_s = 0.0

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        await self.release.wait()
        return function(*args)

    def close(self) -> None: ...


def weights(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"b": torch.full((2, 3), value), "a": torch.arange(3.0) + value, "steps": torch.tensor(7)}


async def publish(store: WeightStore, *numbers: int, incarnation: int = 0) -> None:
    for number in numbers:
        await store.publish(Version(incarnation, number), weights(number))


async def test_publishing_copies_so_the_trainer_may_go_on_writing() -> None:
    store, live = WeightStore(), weights()
    await store.publish(Version(0, 0), live)
    live["a"].fill_(9)
    assert torch.equal((await store.fetch(Version(0, 0))).tensors["a"], torch.arange(3.0))


async def test_fetching_copies_nothing() -> None:
    store = WeightStore()
    await publish(store, 0)
    first, second = await store.fetch(Version(0, 0)), await store.fetch(Version(0, 0))
    assert first.tensors["a"] is second.tensors["a"]
    with pytest.raises(TypeError):
        first.tensors["a"] = torch.zeros(1)  # type: ignore[index]


async def test_rule_ws3_the_writer_casts_floating_tensors_once() -> None:
    store = WeightStore(dtype="bfloat16")
    manifest = await store.publish(Version(0, 0), weights(1.001))
    held = (await store.fetch(Version(0, 0))).tensors
    assert held["a"].dtype == held["b"].dtype == torch.bfloat16
    assert held["steps"].dtype == torch.int64
    assert manifest.specs["b"].dtype == "bfloat16"


async def test_tensors_made_under_inference_mode_can_be_published() -> None:
    store = WeightStore()
    with torch.inference_mode():
        await publish(store, 0)
    assert torch.equal((await store.fetch(Version(0, 0))).tensors["b"], torch.zeros(2, 3))


@pytest.mark.parametrize("version", [Version(0, 3), Version(0, 5), Version(0, 2), Version(0, 0)])
async def test_rule_ws1_numbers_rise_by_one(version: Version) -> None:
    store = WeightStore()
    await publish(store, 2, 3)
    with pytest.raises(InvariantError, match=r"\[WS1\].*publish v4"):
        await store.publish(version, weights())
    assert store.versions() == (Version(0, 2), Version(0, 3))


async def test_rule_ws1_a_restart_below_a_published_number_starts_an_incarnation() -> None:
    store = WeightStore(keep=3)
    await publish(store, 6, 7)
    await publish(store, 5, 6, incarnation=1)
    assert store.versions() == (Version(0, 7), Version(1, 5), Version(1, 6))
    with pytest.raises(InvariantError, match=r"\[WS1\]"):
        await store.publish(Version(0, 8), weights())


async def test_rule_ws1_there_is_one_writer() -> None:
    compute = SlowCompute()
    store = WeightStore(compute=compute)
    first = asyncio.create_task(store.publish(Version(0, 0), weights()))
    await asyncio.sleep(0)
    with pytest.raises(InvariantError, match="another publish runs"):
        await store.publish(Version(0, 0), weights())
    assert store.latest is None  # visible whole or not at all
    compute.release.set()
    await first
    assert store.latest == Version(0, 0)


async def test_a_failed_publish_leaves_nothing_and_the_next_one_works() -> None:
    store = WeightStore()
    with pytest.raises(AttributeError):
        await store.publish(Version(0, 0), {"a": "not a tensor"})
    assert store.versions() == ()
    await publish(store, 0)
    assert store.latest == Version(0, 0)


async def test_rule_st7_an_alias_shares_tensors_and_names_their_owner() -> None:
    store = WeightStore()
    probe = Probe(np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32))
    first = await store.publish(Version(0, 0), weights(), probe)
    await store.publish_alias(Version(0, 1))
    alias = await store.publish_alias(Version(0, 2))
    assert (alias.alias_of, alias.digest, alias.probe) == (Version(0, 0), first.digest, probe)
    assert store.versions() == (Version(0, 1), Version(0, 2))
    held = [await store.fetch(version) for version in store.versions()]
    assert held[0].tensors["a"] is held[1].tensors["a"]
    assert held[1].manifest.version == Version(0, 2)
    await publish(store, 3)
    with pytest.raises(InvariantError, match=r"\[WS1\]"):
        await store.publish_alias(Version(0, 3))
    with pytest.raises(InvariantError, match=r"\[ST7\]"):
        await WeightStore().publish_alias(Version(0, 0))


async def test_rule_ws3_a_version_is_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Version] = []
    verify = store_module.verify
    monkeypatch.setattr(store_module, "verify", lambda *args: (calls.append(args[0].version), verify(*args)))
    store = WeightStore()
    await publish(store, 0)
    await asyncio.gather(*(store.fetch(Version(0, 0)) for _ in range(4)))
    await store.publish_alias(Version(0, 1))
    await store.fetch(Version(0, 1))
    assert calls == [Version(0, 0)]


@pytest.mark.parametrize("fetched_before", [False, True])
async def test_rule_ws3_a_write_after_publication_is_seen(fetched_before: bool) -> None:
    store = WeightStore()
    await publish(store, 0, 1)
    good = await store.fetch(Version(0, 1))
    shared = good.tensors["b"] if fetched_before else store._entries[Version(0, 1)].payload.tensors["b"]
    shared.add_(1)
    for _ in range(2):
        with pytest.raises(TransportError, match=r"v1 is refused: digest"):
            await store.fetch(Version(0, 1))
    await store.fetch(Version(0, 0))
    shared.sub_(1)
    await store.fetch(Version(0, 1))


async def test_rule_ws7_only_the_newest_and_the_pinned_stay() -> None:
    store = WeightStore(keep=2)
    await publish(store, 0)
    store.pin(Version(0, 0))
    store.pin(Version(0, 0))
    await publish(store, 1, 2, 3)
    assert store.versions() == (Version(0, 0), Version(0, 2), Version(0, 3))
    store.unpin(Version(0, 0))
    assert Version(0, 0) in store.versions()
    store.unpin(Version(0, 0))
    assert store.versions() == (Version(0, 2), Version(0, 3))
    with pytest.raises(TransportError, match=r"v1 is not in the store \(it holds v2, v3\)"):
        await store.fetch(Version(0, 1))
    with pytest.raises(TransportError, match="fetch the newest"):
        store.pin(Version(0, 1))
    for version in (Version(0, 1), Version(0, 3)):
        with pytest.raises(InvariantError, match=r"\[WS7\]"):
            store.unpin(version)


async def test_rule_ws7_a_version_being_fetched_is_not_deleted() -> None:
    store = WeightStore(keep=1)
    await publish(store, 0)
    compute = SlowCompute()
    store._compute = compute
    reading = asyncio.create_task(store.fetch(Version(0, 0)))
    await asyncio.sleep(0)
    store._compute = None
    await publish(store, 1)
    assert store.versions() == (Version(0, 0), Version(0, 1))
    compute.release.set()
    assert torch.equal((await reading).tensors["a"], torch.arange(3.0))
    assert store.versions() == (Version(0, 1),)


async def test_a_cancelled_fetch_releases_its_hold_and_its_lock() -> None:
    store = WeightStore(keep=1)
    await publish(store, 0)
    store._compute = SlowCompute()
    reading = asyncio.create_task(store.fetch(Version(0, 0)))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    store._compute = None
    await store.fetch(Version(0, 0))
    await publish(store, 1)
    assert store.versions() == (Version(0, 1),)


def test_settings_are_checked() -> None:
    assert isinstance(build_transport("auto", keep=1), WeightStore)
    with pytest.raises(UserError, match=r"weights\.keep is 0"):
        build_transport("memory", keep=0)
    with pytest.raises(UserError, match="use auto or one of memory"):
        build_transport("carrier-pigeon")
