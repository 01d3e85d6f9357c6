"""GGUF files as model sources: the same numbers and tokens, one conversion, a cache that is whole or absent."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from relax.core.error import UserError
from relax.model import gguf as module
from relax.model.gguf import CACHE_VARIABLE, cache_folder, convert_gguf
from relax.model.load import load_model, load_tokenizer
from relax.model.name import published_tensors
from relax.model.source import model_folder
from relax.model.vocabulary import read_vocabulary
from tests.model.gguf_file import LINE, SPACE, TEMPLATE, make_llama, write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", make_llama())


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_gguf(file, str(tmp_path_factory.mktemp("cache")))


def test_the_weights_are_those_of_the_file(folder: Path) -> None:
    loaded, original = (
        published_tensors(model) for model in (load_model(folder, "pretrained", "float32"), make_llama())
    )
    assert loaded.keys() == original.keys()
    assert all(torch.equal(loaded[name], original[name]) for name in original)


def test_logits_are_those_of_the_original(folder: Path) -> None:
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected, found = (model(ids).logits for model in (make_llama(), load_model(folder, "pretrained", "float32")))
    assert (expected - found).abs().max() <= 1e-6


def test_the_folder_is_a_plain_model(folder: Path) -> None:
    """No entry that would make the next reader quantise it again."""
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config


def test_tokenizer_template_and_stops_come_from_the_file(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    vocabulary = read_vocabulary(tokenizer, load_model(folder, "pretrained", "float32").config)
    assert tokenizer.chat_template == TEMPLATE
    assert (vocabulary.stop_ids, vocabulary.pad_id, vocabulary.bos_id, vocabulary.adds_bos) == ((2,), 2, 1, False)
    assert tokenizer("<|im_start|>a<|im_end|>").input_ids[0] == 1


def test_text_is_split_by_the_rules_that_the_file_names(folder: Path, file: Path, tmp_path: Path) -> None:
    """Digits stand alone, so the spaces before one are one token; by GPT-2's rules the last space goes to the digit."""
    assert load_tokenizer(folder).tokenize("a  17") == ["a", SPACE + SPACE, "1", "7"]
    assert load_tokenizer(folder).tokenize("a\n\n1") == ["a", LINE + LINE, "1"]
    plain = convert_gguf(write_gguf(tmp_path / "plain.gguf", make_llama(), "gpt-2"), str(tmp_path / "cache"))
    assert load_tokenizer(plain).tokenize("a  17") == ["a", SPACE, SPACE, "1", "7"]


def test_unknown_splitting_rules_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    convert_gguf(write_gguf(tmp_path / "odd.gguf", make_llama(), "no-such-rules"), str(tmp_path / "cache"))
    assert "splits text by the rules 'no-such-rules'" in caplog.text
    assert "set model.tokenizer" in caplog.text


def refuse(*arguments: object) -> None:
    raise AssertionError("converted again")


def test_a_file_is_converted_once_and_again_when_it_changed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.gguf"
    shutil.copyfile(file, own)
    first = convert_gguf(own, str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "_convert", refuse)
        assert convert_gguf(own, str(tmp_path / "cache")) == first
        os.utime(own, ns=(1, 1))
        with pytest.raises(AssertionError, match="converted again"):
            convert_gguf(own, str(tmp_path / "cache"))
    assert convert_gguf(own, str(tmp_path / "cache")) != first


def test_a_failed_conversion_leaves_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(source: Path, aside: Path) -> None:
        (aside / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_convert", half)
    with pytest.raises(
        UserError, match=r"cannot write the converted model .*No space left.*set model\.cache or RELAX_CACHE"
    ):
        convert_gguf(file, str(tmp_path))
    assert list((tmp_path / "gguf").iterdir()) == []


def test_what_a_killed_conversion_left_is_cleared(file: Path, tmp_path: Path) -> None:
    left, running = tmp_path / "gguf" / ".writing-tiny-999999999", tmp_path / "gguf" / f".writing-tiny-{os.getppid()}"
    left.mkdir(parents=True)
    running.mkdir()
    convert_gguf(file, str(tmp_path))
    assert not left.exists()
    assert running.exists(), "the folder of a process that lives is its own"


def test_the_cache_is_where_it_is_told_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/user")
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert cache_folder() == Path("/user/relax")
    monkeypatch.setenv(CACHE_VARIABLE, "/variable")
    assert cache_folder() == Path("/variable")
    assert cache_folder("/own") == Path("/own")


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def write_text(file: Path) -> None:
    file.write_text("this is no model")


@pytest.mark.parametrize(
    ("damage", "message"), [(cut_short, "cannot be read"), (write_text, "is no GGUF file")], ids=["cut", "text"]
)
def test_a_damaged_file_is_refused_by_name(
    damage: Callable[[Path], None], message: str, file: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    shutil.copyfile(file, broken)
    damage(broken)
    with pytest.raises(UserError, match=rf"broken\.gguf'? {message}"):
        model_folder(str(broken), cache=str(tmp_path / "cache"))


def test_the_missing_package_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(UserError, match="needs the package 'gguf'; pip install gguf"):
        convert_gguf(file, str(tmp_path))
