"""The contract of WeightWriter and WeightReader, run on every transport."""

import numpy as np
import pytest
import torch

from relax.core.error import InvariantError, TransportError
from relax.core.version import Version
from relax.core.weight import Probe
from relax.weights.digest import digest_of
from relax.weights.store import WeightStore
from relax.weights.transport import TRANSPORTS, build_transport


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> WeightStore:
    return build_transport(request.param, keep=2)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(5, 3, generator=generator),
        "half": torch.randn(4, generator=generator).bfloat16(),
        "count": torch.tensor(seed),
        "empty": torch.zeros(0, 2),
    }


async def test_rule_ws3_what_is_fetched_is_bit_for_bit_what_was_published(transport: WeightStore) -> None:
    given = tensors()
    probe = Probe(np.array([1, 2], np.int32), np.array([0, -1], np.float32))
    manifest = await transport.publish(Version(0, 0), given, probe)
    arrived = await transport.fetch(Version(0, 0))
    assert arrived.manifest == manifest
    assert arrived.manifest.probe is not None
    assert np.array_equal(arrived.manifest.probe.logprobs, probe.logprobs)
    assert set(arrived.tensors) == set(given)
    for name, tensor in given.items():
        assert arrived.tensors[name].dtype == tensor.dtype
        assert torch.equal(arrived.tensors[name], tensor)
    assert manifest.digest == digest_of(given)


async def test_rule_ws1_an_older_version_stays_as_it_was_after_the_next(transport: WeightStore) -> None:
    await transport.publish(Version(0, 4), tensors(4))
    older = await transport.fetch(Version(0, 4))
    await transport.publish(Version(0, 5), tensors(5))
    assert torch.equal(older.tensors["w"], tensors(4)["w"])
    assert torch.equal((await transport.fetch(Version(0, 4))).tensors["w"], tensors(4)["w"])
    assert torch.equal((await transport.fetch(Version(0, 5))).tensors["w"], tensors(5)["w"])


async def test_rule_ws1_a_gap_or_a_repeat_is_refused(transport: WeightStore) -> None:
    await transport.publish(Version(0, 0), tensors())
    for number in (0, 2):
        with pytest.raises(InvariantError, match=r"\[WS1\]"):
            await transport.publish(Version(0, number), tensors())


async def test_unknown_and_forgotten_versions_are_transport_errors(transport: WeightStore) -> None:
    with pytest.raises(TransportError, match="v0"):
        await transport.fetch(Version(0, 0))
    for number in range(3):
        await transport.publish(Version(0, number), tensors())
    with pytest.raises(TransportError, match="v0"):
        await transport.fetch(Version(0, 0))
