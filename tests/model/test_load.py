"""Loading a model folder: seeded random weights, safetensors, and every refusal."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax.core.error import UserError
from relax.model.load import load_model, load_model_config, load_tokenizer
from relax.model.name import published_tensors

QWEN3 = Path(__file__).parents[2] / "recipes/models/qwen3-char"


def copy_folder(tmp_path: Path, **changes: object) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(QWEN3, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_random_weights_are_seeded_and_leave_the_global_random_state() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again, other = (load_model(QWEN3, "random", "float32", seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    tensors = [published_tensors(model) for model in (first, again, other)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert not torch.equal(tensors[0]["model.embed_tokens.weight"], tensors[2]["model.embed_tokens.weight"])
    assert not first.training


def test_dtype_is_that_of_every_parameter() -> None:
    model = load_model(QWEN3, "random", "bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_saved_weights_come_back_bit_equal(tmp_path: Path) -> None:
    model = load_model(QWEN3, "random", "float32", 3)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "pretrained", "float32", 4)
    assert all(torch.equal(value, published_tensors(loaded)[name]) for name, value in published_tensors(model).items())


def test_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    load_model(QWEN3, "random", "float32").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing_keys model\.norm\.weight"):
        load_model(tmp_path, "pretrained", "float32")


def test_missing_folder_is_refused() -> None:
    for load in (load_model_config, load_tokenizer):
        with pytest.raises(UserError, match="does not exist"):
            load("no/such/folder")


def test_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(tmp_path, "random", "float32")


def test_missing_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = copy_folder(tmp_path)
    with pytest.raises(UserError, match=r"set model\.weights to random"):
        load_model(folder, "pretrained", "float32")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="convert its pickled weights"):
        load_model(folder, "pretrained", "float32")


def test_unknown_model_type_and_architecture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no_such_type"):
        load_model(copy_folder(tmp_path / "type", model_type="no_such_type"), "random", "float32")
    with pytest.raises(UserError, match="NoSuchForCausalLM"):
        load_model(copy_folder(tmp_path / "architecture", architectures=["NoSuchForCausalLM"]), "random", "float32")


def test_model_without_an_architecture_entry_is_the_causal_one_of_its_type(tmp_path: Path) -> None:
    model = load_model(copy_folder(tmp_path, architectures=None), "random", "float32")
    assert type(model).__name__ == "Qwen3ForCausalLM"


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(UserError, match=r"float8.*use one of float32"):
        load_model(QWEN3, "random", "float8")


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def refusal_of(load: Callable[[], object]) -> str:
    with pytest.raises(UserError) as raised:
        load()
    return str(raised.value)


@pytest.mark.parametrize("cut", ["truncated", "empty", "garbage"])
def test_broken_weights_are_refused_by_the_name_of_the_file(tmp_path: Path, cut: str) -> None:
    load_model(QWEN3, "random", "float32").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes({"truncated": whole[:-1000], "empty": b"", "garbage": b"x" * 1000}[cut])
    message = refusal_of(lambda: load_model(tmp_path, "pretrained", "float32"))
    assert message.startswith(f"{str(file)!r} is no whole safetensors file")
    assert message.endswith("copy or download the file again")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "model.safetensors.index.json' is not valid JSON"),
        ("{}", "model.safetensors.index.json' has no mapping 'weight_map'"),
        ('{"weight_map": {"x": "b.safetensors"}}', "b.safetensors', named in model.safetensors.index.json, does not"),
    ],
)
def test_a_broken_index_is_refused_by_its_name(tmp_path: Path, index: str, message: str) -> None:
    folder = copy_folder(tmp_path)
    save_file({"x": torch.zeros(1)}, folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    assert message in refusal_of(lambda: load_model(folder, "pretrained", "float32"))


@pytest.mark.parametrize("text", [b"", b"{", b"3", b"null", b"[]", b"\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_is_no_json_object_is_refused_by_its_name(tmp_path: Path, name: str, text: bytes) -> None:
    folder = copy_folder(tmp_path)
    (folder / name).write_bytes(text)
    message = refusal_of(lambda: load_model_config(folder) if name == "config.json" else load_tokenizer(folder))
    assert message.startswith(f"{str(folder / name)!r} ")
    assert message.endswith("copy or download the file again")


@pytest.mark.parametrize("text", ['{"a": 1}', '{"added_tokens": [], "model": {}}'])
def test_a_tokenizer_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    folder = copy_folder(tmp_path)
    (folder / "tokenizer.json").write_text(text)
    expected = f"the tokenizer file {str(folder / 'tokenizer.json')!r} cannot be loaded"
    assert refusal_of(lambda: load_tokenizer(folder)).startswith(expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "x"},
        {"hidden_size": -3},
        {"num_attention_heads": 0},
        {"hidden_act": "nope"},
        {"model_type": ["x"]},
        {"architectures": [3]},
        {"architectures": ["AutoConfig"]},
    ],
)
def test_a_configuration_that_describes_no_model_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = copy_folder(tmp_path, **changes)
    assert str(folder) in refusal_of(lambda: load_model(folder, "random", "float32"))
