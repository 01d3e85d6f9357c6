"""Published names and binding: ties, buffers, refusals that change nothing, and no copies."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from relax.core.error import TransportError
from relax.core.weight import TensorSpec
from relax.model.load import load_model
from relax.model.name import bind_tensors, published_tensors, tensor_specs

QWEN3 = Path(__file__).parents[2] / "recipes/models/qwen3-char"


class Tied(nn.Module):
    """Two names of one weight, a packed projection, a persistent and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6, bias=False)
        self.embed = nn.Embedding(6, 4)
        self.embed.weight = self.head.weight
        self.packed = nn.Parameter(torch.randn(9, 4))
        self.empty = nn.Parameter(torch.zeros(0))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() + 1 for name, tensor in published_tensors(model).items()}


def test_each_storage_is_published_once_under_sorted_names() -> None:
    names = list(published_tensors(Tied()))
    assert names == ["empty", "head.weight", "packed", "scale"]
    qwen = published_tensors(load_model(QWEN3, "random", "float32"))
    assert "lm_head.weight" not in qwen
    assert not any("inv_freq" in name for name in qwen)
    assert list(qwen) == sorted(qwen)


def test_published_tensors_are_live_and_without_gradient() -> None:
    model = Tied()
    tensors = published_tensors(model)
    assert not any(tensor.requires_grad for tensor in tensors.values())
    with torch.no_grad():
        model.packed.fill_(7)
    assert (tensors["packed"] == 7).all()


def test_binding_shares_storage_and_restores_ties() -> None:
    model = Tied()
    tensors = copies(model)
    bind_tensors(model, tensors)
    assert model.head.weight is model.embed.weight
    assert all(value.data_ptr() == tensors[name].data_ptr() for name, value in published_tensors(model).items())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model.table, torch.arange(3.0))


def test_binding_a_transformers_model_gives_its_logits() -> None:
    source, target = load_model(QWEN3, "random", "float32", 1), load_model(QWEN3, "random", "float32", 2)
    ids = torch.tensor([[1, 2, 3, 4]])
    before = target(input_ids=ids).logits
    bind_tensors(target, published_tensors(source))
    assert target.lm_head.weight is target.model.embed_tokens.weight
    assert torch.equal(target(input_ids=ids).logits, source(input_ids=ids).logits)
    assert not torch.equal(before, source(input_ids=ids).logits)
    bind_tensors(target, copies(source))
    assert target.lm_head.weight is target.model.embed_tokens.weight


def test_a_write_through_a_bound_model_is_seen_on_the_shared_tensor() -> None:
    model = Tied()
    tensors = copies(model)
    bind_tensors(model, tensors)
    before = tensors["packed"]._version
    model.packed.add_(1)
    assert tensors["packed"]._version > before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("packed"), "packed is missing"),
        (lambda tensors: tensors.update({"extra": torch.zeros(1)}), "extra is not a tensor of the model"),
        (lambda tensors: tensors.update(packed=torch.zeros(4, 9)), "packed has shape"),
        (lambda tensors: tensors.update(scale=torch.ones(2, dtype=torch.float64)), "scale has dtype"),
        (lambda tensors: tensors.update(scale=torch.ones(2, device="meta")), "scale has device"),
        (lambda tensors: tensors.update({"embed.weight": tensors.pop("head.weight")}), "head.weight is missing"),
    ],
)
def test_rule_ws3_a_misfit_is_refused_and_changes_nothing(change: object, message: str) -> None:
    model = Tied()
    held = {name: tensor.data_ptr() for name, tensor in published_tensors(model).items()}
    tensors = copies(model)
    change(tensors)  # type: ignore[operator]
    with pytest.raises(TransportError, match=message):
        bind_tensors(model, tensors)
    assert {name: tensor.data_ptr() for name, tensor in published_tensors(model).items()} == held
    assert model.packed.requires_grad


def test_specs_come_under_sorted_names() -> None:
    model = Tied()
    specs = tensor_specs(OrderedDict(reversed(published_tensors(model).items())))
    assert list(specs) == sorted(specs)
    assert specs["packed"] == TensorSpec((9, 4), "float32")
