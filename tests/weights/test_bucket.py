"""Buckets: any size puts the same version together; whatever is lost, doubled, swapped, cut or damaged is refused (WS3, C6)."""

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.core.error import TransportError
from relax.core.version import Version
from relax.core.weight import Manifest, WeightSet
from relax.model.name import tensor_specs
from relax.weights.bucket import Assembly, Bucket, Header, cut
from relax.weights.digest import digest_of
from tests.weights.setting import probe, same, tensors


def weights(given: dict[str, torch.Tensor]) -> WeightSet:
    manifest = Manifest(Version(0, 3), MappingProxyType(tensor_specs(given)), digest_of(given), probe())
    return WeightSet(manifest, given)


def buckets(given: dict[str, torch.Tensor], num_bytes: int) -> list[Bucket]:
    return [Bucket(bucket.header, bucket.payload.clone()) for bucket in cut(weights(given), num_bytes)]


def assemble(sent: list[Bucket]) -> WeightSet:
    """What a receiver does; the image is filled through `place`, as the socket does."""
    assembly = Assembly()
    for bucket in sent:
        payload = assembly.place(bucket.header)
        payload.copy_(bucket.payload[: payload.numel()])
        assembly.take(bucket.header, payload)
    return assembly.finish()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 70), max_size=8),
    bucket_bytes=st.integers(1, 600),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_case_c6_any_sizes_and_any_bucket_size_make_the_same_version(
    sizes: list[int], bucket_bytes: int, dtype: torch.dtype
) -> None:
    made = {f"t{index}": torch.arange(size).to(dtype) for index, size in enumerate(sizes)}
    sent = buckets(dict(reversed(made.items())), bucket_bytes)
    assert all(bucket.payload.numel() <= bucket_bytes for bucket in sent[1:])
    arrived = assemble(sent)
    assert same(arrived.tensors, made)
    assert list(arrived.tensors) == sorted(made)
    assert arrived.manifest.probe is not None


def test_tensors_that_are_no_block_are_sent_as_they_read() -> None:
    assert same(assemble(buckets(tensors(), 33)).tensors, tensors())


def test_the_last_bucket_says_that_it_is_the_last() -> None:
    assembly, ends = Assembly(), []
    for bucket in buckets(tensors(), 100):
        payload = assembly.place(bucket.header)
        payload.copy_(bucket.payload)
        ends.append(assembly.take(bucket.header, payload))
    assert ends == [False] * (len(ends) - 1) + [True]


def damaged(bucket: Bucket) -> Bucket:
    payload = bucket.payload.clone()
    payload[payload.numel() // 2] ^= 1
    return Bucket(bucket.header, payload)


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda sent, index: sent.__setitem__(index, damaged(sent[index])), "cut or damaged|nothing|fit"),
        (lambda sent, index: sent.pop(index), "was due|buckets came|fit"),
        (lambda sent, index: sent.insert(index, sent[index]), "was due"),
        (lambda sent, index: sent.insert(index, sent.pop(index - 1)), "was due|fit|buckets came"),
        (lambda sent, index: sent.__delitem__(slice(index, None)), "buckets came"),
    ],
)
def test_rule_ws3_a_bucket_that_is_damaged_lost_doubled_swapped_or_the_last_to_come_is_refused(
    index: int, harm: object, message: str
) -> None:
    sent = buckets(tensors(), 100)
    assert len(sent) == 5
    harm(sent, index)  # type: ignore[operator]
    with pytest.raises(TransportError, match=message):
        assemble(sent)


def test_rule_ws3_equal_bytes_in_another_place_are_another_bucket() -> None:
    sent = buckets({"a": torch.zeros(64)}, 64)
    sent[1], sent[2] = replace(sent[1], header=sent[2].header), replace(sent[2], header=sent[1].header)
    sent[1], sent[2] = sent[2], sent[1]
    assert same(assemble(sent).tensors, {"a": torch.zeros(64)}), "the same bytes under the right header are right"
    moved = replace(sent[1].header, offset=sent[2].header.offset, index=2)
    with pytest.raises(TransportError, match="damaged"):
        assemble([sent[0], sent[1], Bucket(moved, sent[2].payload), *sent[3:]])


@pytest.mark.parametrize(
    "change", [{"offset": -1}, {"offset": 1 << 40}, {"num_bytes": 1 << 40}, {"num_bytes": -5}, {"index": -1}]
)
def test_rule_ws3_a_header_that_points_outside_is_refused_at_once(change: dict[str, int]) -> None:
    sent = buckets(tensors(), 100)
    assembly = Assembly()
    assembly.place(sent[0].header).copy_(sent[0].payload)
    assembly.take(sent[0].header, sent[0].payload)
    with pytest.raises(TransportError, match="does not fit"):
        assembly.place(replace(sent[1].header, **change))


def test_a_header_round_trips_and_noise_is_none() -> None:
    header = Header(3, 9, 4096, 100, b"0123456789abcdef")
    assert Header.unpack(header.pack()) == header
    with pytest.raises(TransportError, match="out of step"):
        Header.unpack(bytes(Header.FORMAT.size))


def test_rule_ws3_the_whole_is_verified_too() -> None:
    """Buckets that fit one another and are not the manifest's version: the sender's own tensors were written to meanwhile."""
    given = tensors()
    found = weights(tensors())
    given["w"].add_(1)
    sent = [Bucket(one.header, one.payload.clone()) for one in cut(WeightSet(found.manifest, given), 100)]
    with pytest.raises(TransportError, match="digest"):
        assemble(sent)
