"""Adapters beside a frozen model: no effect at first, merged names, files that peft reads."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from relax.core.error import UserError
from relax.model.load import load_model
from relax.model.lora import (
    adapter_config,
    adapter_tensors,
    add_adapter,
    base_fingerprint,
    copy_adapter,
    fingerprint,
    merged_tensors,
    write_adapter,
)
from relax.model.name import published_tensors
from relax.model.source import ModelOrigin

QWEN3 = Path(__file__).parents[2] / "recipes/models/qwen3-char"
IDS = torch.arange(3, 20)[None]


@pytest.fixture
def model() -> Any:
    return load_model(QWEN3, "random", "float32", 5)


def trained(model: Any, *targets: str) -> Any:
    """An adapter with something in both of its factors."""
    adapted = add_adapter(model, 4, 8.0, targets or ("all-linear",), seed=1)
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in adapter_tensors(adapted).values():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    return adapted


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_a_fresh_adapter_changes_nothing_and_leaves_the_model_alone(model: Any) -> None:
    before = {name: tensor.clone() for name, tensor in published_tensors(model).items()}
    modules = [type(one) for one in model.modules()]
    adapted = add_adapter(model, 4, 8.0, ("all-linear",), seed=1)
    assert torch.equal(logits(adapted), logits(model))
    merged = merged_tensors(adapted)
    assert list(merged) == list(before)
    assert all(torch.equal(merged[name], before[name]) for name in before)
    assert [type(one) for one in model.modules()] == modules
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_only_the_adapter_needs_a_gradient_and_the_base_is_shared(model: Any) -> None:
    adapted = add_adapter(model, 4, 8.0, ("q_proj",), seed=1)
    needing = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(needing) == 2 * 2
    assert all(".q_proj.lora_" in name for name in needing)
    assert adapted.model.embed_tokens.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert adapted.lm_head.weight is adapted.model.embed_tokens.weight, "ties stay ties"


def test_seeds_decide_the_adapter_and_the_global_random_state_stays(model: Any) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again, other = (adapter_tensors(add_adapter(model, 4, 8.0, ("q_proj",), seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_merged_weights_are_the_adapted_policy(model: Any) -> None:
    adapted = trained(model)
    merged = merged_tensors(adapted)
    layer = adapted.model.layers[0].self_attn.q_proj
    by_hand = layer.base_layer.weight + (layer.lora_B["default"].weight @ layer.lora_A["default"].weight) * (8.0 / 4)
    assert torch.equal(merged["model.layers.0.self_attn.q_proj.weight"], by_hand.detach())
    plain = load_model(QWEN3, "random", "float32", 5)
    with torch.no_grad():
        for name, tensor in published_tensors(plain).items():
            tensor.copy_(merged[name])
    assert (logits(adapted) - logits(model)).abs().max() > 0.1
    assert (logits(adapted) - logits(plain)).abs().max() < 1e-5


def write(adapted: Any, folder: Path, base: ModelOrigin) -> None:
    config = adapter_config(4, 8.0, ("all-linear",), base)
    write_adapter(folder, adapter_tensors(adapted), config, base, base_fingerprint(adapted))
    adapted.config.save_pretrained(folder)


@pytest.mark.parametrize("weights", ["random", "pretrained"])
def test_a_folder_with_an_adapter_is_loaded_as_the_merged_model(model: Any, weights: Any, tmp_path: Path) -> None:
    path = QWEN3
    if weights == "pretrained":
        path = tmp_path / "base"
        model.save_pretrained(path)
    adapted = trained(model)
    write(adapted, tmp_path / "adapter", ModelOrigin(str(path), weights=weights, seed=5))
    loaded = load_model(tmp_path / "adapter", "pretrained", "float32")
    found, expected = published_tensors(loaded), merged_tensors(adapted)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    half = load_model(tmp_path / "adapter", "pretrained", "bfloat16")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # peft asks transformers so
def test_peft_itself_loads_what_was_written(model: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    adapted = trained(model)
    write(adapted, tmp_path, ModelOrigin(str(QWEN3)))
    theirs = PeftModel.from_pretrained(load_model(QWEN3, "random", "float32", 5), str(tmp_path))
    assert torch.equal(logits(theirs), logits(adapted))


def test_an_adapter_of_another_base_is_refused(model: Any, tmp_path: Path) -> None:
    write(trained(model), tmp_path, ModelOrigin(str(QWEN3), weights="random", seed=6))
    with pytest.raises(UserError, match=r"was trained beside .*qwen3-char', whose weights have changed since"):
        load_model(tmp_path, "pretrained", "float32")


def test_an_adapter_that_names_no_base_is_refused(model: Any, tmp_path: Path) -> None:
    write(trained(model), tmp_path, ModelOrigin(str(QWEN3)))
    (tmp_path / "base.json").unlink()
    with pytest.raises(UserError, match=r"its base\.json does not say beside which model"):
        load_model(tmp_path, "pretrained", "float32")


def test_an_adapter_of_another_shape_changes_nothing(model: Any) -> None:
    wide, narrow = trained(model), add_adapter(model, 2, 8.0, ("q_proj",), seed=1)
    before = {name: tensor.clone() for name, tensor in adapter_tensors(narrow).items()}
    with pytest.raises(UserError, match=r"another rank or other targets: .*only in one of them"):
        copy_adapter(narrow, adapter_tensors(wide), Path("somewhere"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter_tensors(narrow).items())


def test_an_unknown_target_names_the_layers_that_there_are(model: Any) -> None:
    with pytest.raises(
        UserError, match=r"lora target 'query' is no linear layer of the language model; it has down_proj, .*q_proj"
    ):
        add_adapter(model, 4, 8.0, ("q_proj", "query"), seed=1)
    with pytest.raises(UserError, match="'lm_head' is no linear layer"):
        add_adapter(model, 4, 8.0, ("lm_head",), seed=1)


def test_without_peft_the_command_is_told(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"LoRA needs the package 'peft'.*pip install 'relax\[lora\]'"):
        add_adapter(model, 4, 8.0, ("q_proj",), seed=1)


def test_a_fingerprint_tells_models_apart(model: Any) -> None:
    tensors = published_tensors(model)
    first = fingerprint(tensors)
    assert first == fingerprint(dict(reversed(tensors.items()))) == base_fingerprint(trained(model))
    with torch.no_grad():
        tensors["model.norm.weight"][0] += 1e-3
    assert fingerprint(tensors) != first
