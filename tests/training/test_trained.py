"""What is trained: the whole model, all but what is frozen, or an adapter beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from relax.core.error import UserError
from relax.model.load import load_model
from relax.model.lora import merged_tensors
from relax.model.name import published_tensors
from relax.model.source import ModelOrigin
from relax.training.config import LoraConfig, TorchConfig
from tests.training.setting import (
    FROZEN,
    LORA,
    LOSS,
    MODEL_PATH,
    gradients_of,
    make_backend,
    make_model,
    make_rows,
    same_bits,
    train_steps,
    weights_of,
)

ROWS = make_rows()
ORIGIN = ModelOrigin(str(MODEL_PATH), weights="random", seed=0)


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_frozen_embeddings_stay_and_the_rest_is_trained() -> None:
    backend = make_backend(config=FROZEN)
    before = weights_of(backend)
    train_steps(backend, ROWS, 2)
    assert changed(before, weights_of(backend)) == set(before) - {"model.embed_tokens.weight"}
    assert "model.embed_tokens.weight" in backend.export(), "what is frozen is published all the same"


def test_frozen_parameters_change_no_gradient_of_the_others() -> None:
    whole, frozen = make_backend(), make_backend(config=FROZEN)
    for backend in (whole, frozen):
        backend.forward_backward([[tuple(ROWS)]], LOSS)
    expected = gradients_of(whole)
    del expected["model.embed_tokens.weight"]
    assert same_bits(expected, gradients_of(frozen))


def test_patterns_freeze_by_name() -> None:
    backend = make_backend(config=TorchConfig(device="cpu", freeze=("model.layers.0.*", "*norm*")))
    assert set(backend._parameters) == {
        name
        for name, _ in make_model().named_parameters()
        if not name.startswith("model.layers.0.") and "norm" not in name
    }


def test_a_pattern_that_freezes_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"freeze names 'transformer\.\*', which is no parameter.*such as model\.embed"):
        make_backend(config=TorchConfig(device="cpu", freeze=("transformer.*",)))


def test_a_model_that_is_frozen_whole_cannot_be_trained() -> None:
    with pytest.raises(UserError, match="no parameter that needs a gradient"):
        make_backend(config=TorchConfig(device="cpu", freeze=("*",)))


def test_freezing_beside_an_adapter_and_mixed_targets_are_refused() -> None:
    from relax.config.base import check_rules

    for node, message in (
        (TorchConfig(lora=LoraConfig(), freeze=("embeddings",)), "has no effect with `lora`"),
        (TorchConfig(lora=LoraConfig(targets=("all-linear", "q_proj"))), "names 'all-linear' beside other layers"),
    ):
        with pytest.raises((ValidationError, Exception), match=message):
            check_rules(node)


def test_an_adapter_learns_and_the_base_stays() -> None:
    model = make_model()
    base = {name: tensor.clone() for name, tensor in published_tensors(model).items()}
    backend = make_backend(model=model, config=LORA)
    assert list(backend.export()) == list(base)
    train_steps(backend, ROWS, 3)
    assert same_bits(base, dict(published_tensors(model)))
    linear = {name for name in base if "proj" in name}
    assert changed(base, dict(backend.export())) == linear


def test_an_adapter_scores_as_the_merged_weights_do() -> None:
    """Engines sample from what is published; the trainer must speak of the same policy (WS4)."""
    backend = make_backend(config=LORA)
    train_steps(backend, ROWS, 5)
    merged = make_model()
    with torch.no_grad():
        for name, tensor in published_tensors(merged).items():
            tensor.copy_(backend.export()[name])
    ours, theirs = (one.logprobs([[tuple(ROWS)]])[0][0] for one in (backend, make_backend(model=merged)))
    assert max(abs(one - other).max() for one, other in zip(ours, theirs, strict=True)) < 1e-5


def test_an_adapters_folder_is_a_model_and_can_be_trained_further(tmp_path: Path) -> None:
    backend = make_backend(config=LORA, base=ORIGIN, tokenizer_path=MODEL_PATH)
    train_steps(backend, ROWS, 3)
    backend.capture().write(str(tmp_path))
    assert not (tmp_path / "model.safetensors").exists()
    loaded = load_model(tmp_path, "pretrained", "float32")
    assert same_bits(weights_of(backend), dict(published_tensors(loaded)))
    again = make_backend(model=loaded)
    train_steps(again, ROWS, 1)


def refused(backend: Any, folder: Path, message: str) -> None:
    before = weights_of(backend)
    with pytest.raises(UserError, match=message):
        backend.load(str(folder))
    assert same_bits(before, weights_of(backend))


def test_checkpoints_of_another_kind_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    whole, adapter = make_backend(), make_backend(config=LORA, base=ORIGIN)
    whole.capture().write(str(tmp_path / "whole"))
    adapter.capture().write(str(tmp_path / "adapter"))
    refused(make_backend(seed=3), tmp_path / "adapter", "holds an adapter, this run trains the whole model")
    refused(make_backend(config=LORA), tmp_path / "whole", "holds a whole model, this run trains an adapter")
    refused(make_backend(seed=3, config=LORA), tmp_path / "adapter", "the weights of this run's model .* are others")
    other = TorchConfig(device="cpu", lora=LoraConfig(rank=4, alpha=16.0))
    refused(make_backend(config=other), tmp_path / "adapter", r"has alpha 8\.0, this run 16\.0")
    other = TorchConfig(device="cpu", lora=LoraConfig(rank=2, alpha=8.0))
    refused(make_backend(config=other), tmp_path / "adapter", "another rank or other targets")


def test_a_checkpoint_with_other_frozen_parameters_is_refused(tmp_path: Path) -> None:
    backend = make_backend(config=FROZEN)
    train_steps(backend, ROWS, 1)
    backend.capture().write(str(tmp_path))
    refused(make_backend(seed=1), tmp_path, r"1 parameters are trained in only one of them \(model\.embed_tokens")


def test_the_adapters_files_name_the_base(tmp_path: Path) -> None:
    backend = make_backend(config=LORA, base=ORIGIN)
    backend.capture().write(str(tmp_path))
    base = json.loads((tmp_path / "base.json").read_text())
    assert (base["path"], base["weights"], base["seed"]) == (str(MODEL_PATH), "random", 0)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == "all-linear"
    assert same_bits(weights_of(backend), merged_tensors(backend._trained.model))
