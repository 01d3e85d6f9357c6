"""Models that read media as files: loading, capture and export, fused experts, tied embeddings, adapters, whole omni models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax.core.error import UserError
from relax.model.load import load_model, load_model_config
from relax.model.lora import add_adapter
from relax.model.name import bind_tensors, published_tensors
from relax.model.source import ModelOrigin
from relax.training.config import LoraConfig, TorchConfig
from tests.training.media_setting import (
    KINDS,
    OMNI,
    OMNI_25,
    VL,
    VL_25,
    VL_MOE,
    make_backend,
    make_media_row,
    make_model,
    model_folder,
)
from tests.training.setting import LOSS, same_bits, total_weight, weights_of


def step(backend: Any, kind: str, seed: int = 0) -> None:
    rows = [make_media_row(kind, index + 10 * seed) for index in range(3)]
    backend.forward_backward([[tuple(rows)]], LOSS)
    assert backend.optim_step(total_weight(rows)).applied


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    saved, loaded = make_backend(kind), make_backend(kind, seed=1)
    step(saved, kind)
    saved.capture().write(str(tmp_path / "saved"))
    loaded.load(str(tmp_path / "saved"))
    assert same_bits(weights_of(saved), weights_of(loaded))
    assert list(saved.export()) == sorted(saved.export())
    for backend in (saved, loaded):
        step(backend, kind, 1)
    assert same_bits(weights_of(saved), weights_of(loaded))
    # What an engine that loads the folder binds is what was exported.
    other = load_model(tmp_path / "saved", "pretrained", "float32")
    bind_tensors(other, weights_of(saved))
    assert same_bits(published_tensors(other), weights_of(saved))


def test_experts_have_other_names_on_disk_than_in_memory(tmp_path: Path) -> None:
    backend = make_backend(OMNI)
    backend.capture().write(str(tmp_path))
    on_disk, in_memory = load_file(tmp_path / "model.safetensors"), backend.export()
    fused = [name for name in in_memory if name.endswith("experts.gate_up_proj")]
    assert len(fused) == 3
    assert not set(fused) & set(on_disk)
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in on_disk
    assert same_bits(published_tensors(load_model(tmp_path, "pretrained", "float32")), weights_of(backend))


def test_experts_of_published_checkpoints_lie_crosswise(tmp_path: Path) -> None:
    """Qwen3-VL-MoE is published with its experts transposed; either layout gives the same model."""
    model = make_model(VL_MOE)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".mlp.experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert same_bits(published_tensors(load_model(tmp_path, "pretrained", "float32")), published_tensors(model))


@pytest.mark.parametrize(("kind", "tied"), [(VL, True), (VL_MOE, True), (VL_25, True), (OMNI, False), (OMNI_25, False)])
def test_tied_embeddings_are_published_once_and_stay_tied(kind: str, tied: bool, tmp_path: Path) -> None:
    backend = make_backend(kind)
    assert ("lm_head.weight" in backend.export()) is not tied
    backend.capture().write(str(tmp_path))
    loaded = load_model(tmp_path, "pretrained", "float32")
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) is tied


def whole_omni(thinker: Any, kind: str, folder: Path) -> None:
    """A folder as the published omni models have them: the thinker's weights under a prefix, and what speaks beside it."""
    thinker.save_pretrained(folder)
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {"talker.model.norm.weight": torch.zeros(2), "code2wav.x": torch.zeros(2), "token2wav.x": torch.zeros(2)}
    if kind == OMNI:
        tensors.pop("token2wav.x")
    else:
        tensors.pop("code2wav.x")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    names = {
        OMNI: ("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration"),
        OMNI_25: ("qwen2_5_omni", "Qwen2_5OmniModel"),
    }
    model_type, architecture = names[kind]
    document = {"model_type": model_type, "architectures": [architecture], "thinker_config": config}
    (folder / "config.json").write_text(json.dumps(document))


@pytest.mark.parametrize("kind", [OMNI, OMNI_25])
def test_of_a_whole_omni_model_the_thinker_is_loaded(kind: str, tmp_path: Path) -> None:
    thinker = make_model(kind, seed=3)
    whole_omni(thinker, kind, tmp_path)
    config, loaded = load_model_config(tmp_path), load_model(tmp_path, "pretrained", "float32")
    assert config.model_type == thinker.config.model_type == loaded.config.model_type
    assert config.name_or_path == str(tmp_path)
    assert type(loaded) is type(thinker)
    assert same_bits(published_tensors(thinker), published_tensors(loaded))
    again = load_model(tmp_path, "random", "float32", 3)
    assert same_bits(published_tensors(again), published_tensors(thinker))


def test_a_whole_omni_model_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    whole_omni(make_model(OMNI), OMNI, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["thinker.visual.merger.mlp.0.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing_keys .*visual\.merger\.mlp\.0\.weight"):
        load_model(tmp_path, "pretrained", "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_put_into_the_language_model_alone(kind: str) -> None:
    adapted = add_adapter(make_model(kind), 4, 8.0, ("all-linear",), seed=1)
    trained = {name.rpartition(".lora_")[0] for name, one in adapted.named_parameters() if one.requires_grad}
    assert trained
    assert all(".language_model." in name for name in trained)
    assert {name.rpartition(".")[2] for name in trained} >= {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_target_that_only_an_encoder_has_is_refused() -> None:
    with pytest.raises(UserError, match="lora target 'qkv' is no linear layer of the language model; it has down_proj"):
        add_adapter(make_model(VL), 4, 8.0, ("qkv",), seed=1)


@pytest.mark.parametrize("kind", [VL, VL_MOE])
def test_an_adapter_is_exported_and_captured(kind: str, tmp_path: Path) -> None:
    base = make_model(kind)
    base.save_pretrained(tmp_path / "base")
    config = TorchConfig(device="cpu", lora=LoraConfig(rank=4, alpha=8.0))
    arguments: dict[str, Any] = {"config": config, "base": ModelOrigin(str(tmp_path / "base"))}
    saved = make_backend(kind, model=base, **arguments)
    loaded = make_backend(kind, model=load_model(tmp_path / "base", "pretrained", "float32"), **arguments)
    step(saved, kind)
    before, after = published_tensors(base), weights_of(saved)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(".language_model." in name for name in changed)
    saved.capture().write(str(tmp_path / "adapter"))
    loaded.load(str(tmp_path / "adapter"))
    assert same_bits(after, weights_of(loaded))
    assert same_bits(after, published_tensors(load_model(tmp_path / "adapter", "pretrained", "float32")))


def test_every_kind_has_its_own_architecture() -> None:
    assert len({type(make_model(kind)) for kind in KINDS}) == len({model_folder(kind) for kind in KINDS}) == 5


def test_processor_settings_come_from_the_model_whatever_folder_the_tokenizer_lies_in(tmp_path: Path) -> None:
    from relax.training.state import companion_files

    tokenizer, model = tmp_path / "tokenizer", tmp_path / "model"
    for folder, names in (
        (tokenizer, ("tokenizer.json", "preprocessor_config.json")),
        (model, ("tokenizer.json", "preprocessor_config.json", "video_preprocessor_config.json", "config.json")),
    ):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(folder.name)
    found = {file.name: file.read_text() for file in companion_files(tokenizer, model)}
    assert found == {
        "tokenizer.json": "tokenizer",
        "preprocessor_config.json": "model",
        "video_preprocessor_config.json": "model",
    }
    assert companion_files(None, None) == ()
