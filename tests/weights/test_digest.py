"""WS3 and case C6: a digest is of names, dtypes, shapes and bytes, whatever the order or layout."""

from types import MappingProxyType

import pytest
import torch

from relax.core.error import TransportError
from relax.core.version import Version
from relax.core.weight import Manifest
from relax.model.name import tensor_specs
from relax.weights.digest import Digest, digest_of, verify


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(3, dtype=torch.int64),
        "c": torch.zeros(0),
        "d": torch.ones(4, dtype=torch.bfloat16),
    }


def manifest_of(given: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(Version(0, 3), MappingProxyType(tensor_specs(given)), digest_of(given))


def test_case_c6_order_and_layout_do_not_matter() -> None:
    plain = tensors()
    turned = dict(reversed(plain.items()))
    turned["a"] = plain["a"].t().contiguous().t()
    assert not turned["a"].is_contiguous()
    assert digest_of(turned) == digest_of(plain)


def test_case_c6_names_out_of_order_are_refused_by_the_running_digest() -> None:
    digest = Digest()
    digest.add("b", torch.zeros(1))
    with pytest.raises(ValueError, match="ascending"):
        digest.add("a", torch.zeros(1))


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held["a"].add_(1e-6),
        lambda held: held.update(a=held["a"].reshape(3, 2)),
        lambda held: held.update(d=held["d"].half()),
        lambda held: held.update(e=held.pop("d")),
        lambda held: held.update(c=torch.zeros(0, 1)),
    ],
)
def test_rule_ws3_every_change_changes_the_digest(change: object) -> None:
    changed = tensors()
    change(changed)  # type: ignore[operator]
    assert digest_of(changed) != digest_of(tensors())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.pop("b"), "'b' arrived as nothing"),
        (lambda held: held.update(z=torch.zeros(1)), "'z'.*published as nothing"),
        (lambda held: held.update(d=held["d"].float()), "'d' arrived as .*float32.*bfloat16"),
        (lambda held: held.update(a=held["a"].reshape(3, 2)), "'a' arrived as"),
        (lambda held: held["a"].view(-1)[5:].mul_(2), "digest .* v3|v3 is refused: digest"),
    ],
)
def test_rule_ws3_missing_extra_retyped_or_damaged_is_refused(change: object, message: str) -> None:
    manifest, arrived = manifest_of(tensors()), tensors()
    verify(manifest, arrived)
    change(arrived)  # type: ignore[operator]
    with pytest.raises(TransportError, match=message):
        verify(manifest, arrived)
