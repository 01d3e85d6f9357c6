"""The contract of WeightWriter and WeightReader, run on every transport."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.error import InvariantError, TransportError
from relax.core.version import Version
from relax.weights.digest import digest_of
from relax.weights.transport import TRANSPORTS
from tests.weights.setting import probe, same, tensors, transport


@pytest.fixture(params=sorted(TRANSPORTS))
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Any, Any]]:
    async with transport(request.param, tmp_path / "weights") as pair:
        yield pair


async def test_rule_ws3_what_is_fetched_is_bit_for_bit_what_was_published(pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    given = tensors()
    manifest = await writer.publish(Version(0, 0), given, probe())
    arrived = await reader.fetch(Version(0, 0))
    assert same(arrived.tensors, given)
    assert arrived.manifest.version == manifest.version == Version(0, 0)
    assert arrived.manifest.specs == manifest.specs
    assert arrived.manifest.digest == manifest.digest == digest_of(given)
    found = arrived.manifest.probe
    assert found is not None
    for name in ("token_ids", "logprobs"):
        value, expected = getattr(found, name), getattr(probe(), name)
        assert value.dtype == expected.dtype
        assert np.array_equal(value, expected)
        assert not value.flags.writeable
    assert (found.tolerance, found.temperature) == (probe().tolerance, probe().temperature)


async def test_publishing_lets_the_trainer_go_on_writing(pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    live = tensors()
    await writer.publish(Version(0, 0), live)
    live["w"].fill_(9)
    assert torch.equal((await reader.fetch(Version(0, 0))).tensors["w"], tensors()["w"])


async def test_rule_ws1_an_older_version_stays_as_it_was_after_the_next(pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    await writer.publish(Version(0, 4), tensors(4))
    older = await reader.fetch(Version(0, 4))
    await writer.publish(Version(0, 5), tensors(5))
    assert torch.equal(older.tensors["w"], tensors(4)["w"])
    assert torch.equal((await reader.fetch(Version(0, 4))).tensors["w"], tensors(4)["w"])
    assert torch.equal((await reader.fetch(Version(0, 5))).tensors["w"], tensors(5)["w"])
    assert writer.latest == Version(0, 5)


async def test_rule_ws1_a_gap_or_a_repeat_is_refused(pair: tuple[Any, Any]) -> None:
    writer, _ = pair
    await writer.publish(Version(0, 0), tensors())
    for number in (0, 2):
        with pytest.raises(InvariantError, match=r"\[WS1\]"):
            await writer.publish(Version(0, number), tensors())


async def test_rule_ws1_a_restart_below_a_published_number_is_a_new_incarnation(pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    await writer.publish(Version(0, 7), tensors(7))
    await writer.publish(Version(1, 6), tensors(6))
    assert same((await reader.fetch(Version(1, 6))).tensors, tensors(6))
    with pytest.raises(InvariantError, match=r"\[WS1\]"):
        await writer.publish(Version(0, 8), tensors())


async def test_rule_st7_an_alias_is_a_version_with_the_tensors_of_another(pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    first = await writer.publish(Version(0, 0), tensors(), probe(-2.0))
    for number in (1, 2, 3):  # more than are kept: the tensors outlive the version that they came with
        await writer.publish_alias(Version(0, number))
    arrived = await reader.fetch(Version(0, 3))
    assert same(arrived.tensors, tensors())
    assert (arrived.manifest.version, arrived.manifest.alias_of) == (Version(0, 3), Version(0, 0))
    assert arrived.manifest.digest == first.digest
    assert arrived.manifest.probe is not None
    assert arrived.manifest.probe.logprobs[1] == -2.0
    await writer.publish(Version(0, 4), tensors(4))
    assert same((await reader.fetch(Version(0, 4))).tensors, tensors(4))


async def test_rule_st7_an_alias_of_nothing_is_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(InvariantError, match="ST7"):
        await pair[0].publish_alias(Version(0, 0))


async def test_rule_ws7_unknown_and_forgotten_versions_are_transport_errors(pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    with pytest.raises(TransportError, match="v0"):
        await reader.fetch(Version(0, 0))
    for number in range(3):
        await writer.publish(Version(0, number), tensors())
    with pytest.raises(TransportError, match="v0"):
        await reader.fetch(Version(0, 0))
    assert same((await reader.fetch(Version(0, 2))).tensors, tensors())


async def test_a_failed_publish_leaves_nothing_and_the_next_one_works(pair: tuple[Any, Any]) -> None:
    writer, reader = pair
    with pytest.raises(AttributeError):
        await writer.publish(Version(0, 0), {"a": "not a tensor"})
    assert writer.latest is None
    with pytest.raises(TransportError):
        await reader.fetch(Version(0, 0))
    await writer.publish(Version(0, 0), tensors())
    assert same((await reader.fetch(Version(0, 0))).tensors, tensors())
