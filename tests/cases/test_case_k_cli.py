"""Cases of section K as far as the command line shows them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from relax.config.base import ComponentConfig
from relax.config.load import load_config
from relax.config.secret import Secret
from relax.services import cli
from relax.services.cli.application import app
from tests.services import fake_run
from tests.services.recorder import Recorder
from tests.services.story import write_recipe

ROOT = Path(__file__).resolve().parents[2]
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


REFUSED = """
import sys
from relax.services.cli import main
try: main(sys.argv[1:])
except SystemExit as end: print("code", end.code, [name for name in ("torch", "transformers") if name in sys.modules], file=sys.stderr)
"""


def test_case_k3_every_rule_is_checked_before_a_model_is_loaded_and_all_are_listed(tmp_path: Path) -> None:
    wrong = [
        "stages.rl.groups_per_step=0",
        "tasks.addition.min_survivors=9",
        "rollout.max_context_tokens=3",
        "bus.max_rows=0",
    ]
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, "train", str(write_recipe(tmp_path)), *wrong],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert lines[-1] == "code 2 []"
    assert lines[0] == "error: 4 problems in the configuration:"
    for place in (
        "stages.1.groups_per_step",
        "tasks.addition.min_survivors",
        "rollout.max_context_tokens",
        "bus.max_rows",
    ):
        assert sum(f": {place}" in line for line in lines) == 1, place
    assert not (tmp_path / "runs").exists()


def test_case_k4_an_explicit_setting_of_a_stage_is_the_one_that_is_shown_and_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("config", "show", write_recipe(tmp_path), "rollout.max_staleness=4", "stages.rl.max_staleness=0") == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capfd.readouterr().out)
    config = load_config([shown])
    assert [config.max_staleness_of(stage) for stage in config.stages] == [4, 0]


def test_case_k5_every_option_of_every_command_has_a_text() -> None:
    """OpenRLHF#1238, Miles#1503."""

    def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        if hasattr(command, "commands"):
            for key, inner in command.commands.items():
                yield from commands(inner, f"{name} {key}")
        else:
            yield name, command

    found = dict(commands(typer.main.get_command(app), "relax"))
    assert {"relax train", "relax show step", "relax export"} <= found.keys()
    for name, command in found.items():
        assert (command.help or "").strip().endswith("."), name
        for parameter in command.params:
            text = getattr(parameter, "help", None)
            assert isinstance(text, str), f"{name} {parameter.name}"
            assert text.strip(), f"{name} {parameter.name}"


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
