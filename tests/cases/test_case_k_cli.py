"""Cases of section K as far as the command line shows them."""

import sys
from pathlib import Path

import pytest

from relax.config.base import ComponentConfig
from relax.config.load import load_config
from relax.config.secret import Secret
from relax.services import cli
from tests.services import fake_run
from tests.services.recorder import Recorder
from tests.services.story import write_recipe

TOKEN = "hunter2-and-more"
MONITOR = "tests.cases.test_case_k_cli:Tracker"


class Tracker(Recorder):
    """A tracker that needs a secret."""

    class Config(ComponentConfig):
        token: Secret

    def __init__(self, config: Config, **dependencies: object) -> None:
        super().__init__()
        self.token = config.token.reveal()


def run(*arguments: object) -> int:
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)  # type: ignore[arg-type]
    return 0


@pytest.mark.parametrize("command", [["config", "show"], ["config", "check"], ["train"]])
def test_case_k1_an_unknown_key_is_refused_with_a_suggestion(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(*command, write_recipe(tmp_path), "stages.rl.algorithm.group_sise=4") == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "unknown key; did you mean 'group_size'" in err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_case_k1_an_explicit_null_survives_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "relax.services.run", fake_run)
    recipe, overrides = write_recipe(tmp_path), ["training.grad_clip=null", "stages.rl.max_staleness=0"]
    assert run("train", recipe, *overrides) == 0
    kept = load_config([tmp_path / "runs" / "story" / "config.yaml"])
    assert kept.training.grad_clip is None
    assert (kept.stages[0].max_staleness, kept.stages[1].max_staleness) == (None, 0)
    assert kept == load_config([recipe], overrides)


def test_case_k7_a_secret_is_in_no_file_and_on_no_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "relax.services.run", fake_run)
    monkeypatch.setenv("TRACKER_TOKEN", TOKEN)
    recipe, tracker = write_recipe(tmp_path), f"monitors=[{{type: '{MONITOR}', token: 'env:TRACKER_TOKEN'}}]"
    for command in ("show", "check"):
        assert run("config", command, recipe, tracker) == 0
    assert run("train", recipe, tracker) == 0
    out, err = capfd.readouterr()
    assert "token: env:TRACKER_TOKEN" in out
    assert TOKEN not in out + err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("env:TRACKER_TOKEN" in path.read_text() for path in files if path.name == "config.yaml")
    assert all(TOKEN.encode() not in path.read_bytes() for path in files)


def test_case_k7_a_secret_written_out_is_refused_and_not_repeated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("train", write_recipe(tmp_path), f"monitors=[{{type: '{MONITOR}', token: {TOKEN}}}]") == 2
    out, err = capfd.readouterr()
    assert "env:NAME_OF_THE_VARIABLE" in err
    assert TOKEN not in out + err


def test_case_k7_a_missing_secret_is_named_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "relax.services.run", fake_run)
    monkeypatch.delenv("TRACKER_TOKEN", raising=False)
    assert run("train", write_recipe(tmp_path), f"monitors=[{{type: '{MONITOR}', token: 'env:TRACKER_TOKEN'}}]") == 2
    assert "the environment variable TRACKER_TOKEN is not set" in capfd.readouterr().err
