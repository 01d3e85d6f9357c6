"""Cases of section B (checkpoint and resume) as far as the command line and the run directory show them."""

import subprocess
import sys
from pathlib import Path

import pytest

from relax.config.load import load_config
from relax.services import cli
from relax.training.checkpoint import CheckpointStore
from relax.training.config import AdamWConfig, LinearConfig
from tests.services import fake_run
from tests.services.story import write_recipe
from tests.training.setting import LOSS, make_backend, make_rows

ROOT = Path(__file__).resolve().parents[2]
ROWS = make_rows()


def run(*arguments: object) -> int:
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)  # type: ignore[arg-type]
    return 0


def test_case_b8_a_setting_given_on_resume_wins_over_the_checkpoint(tmp_path: Path) -> None:
    """slime#2236: the learning rate and its schedule are those of the command line, the position in it that of the checkpoint."""
    schedule = LinearConfig(warmup_steps=2)
    first = make_backend(optimizer=AdamWConfig(lr=0.5), schedule=schedule, total_steps=10)
    for _ in range(4):
        first.forward_backward([[tuple(ROWS[:2])]], LOSS)
        first.optim_step(1.0)
    first.capture().write(str(tmp_path / "saved"))
    rates = []
    for rate in (0.5, 0.1):
        again = make_backend(optimizer=AdamWConfig(lr=rate), schedule=schedule, total_steps=10)
        again.load(str(tmp_path / "saved"))
        again.forward_backward([[tuple(ROWS[:2])]], LOSS)
        rates.append(again.optim_step(1.0).learning_rate)
    assert rates[1] == pytest.approx(rates[0] / 5)
    assert 0 < rates[0] < 0.5


def test_case_b8_what_the_checkpoint_must_win_is_refused_instead_of_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "relax.services.run", fake_run)
    monkeypatch.setenv("FAKE_RUN", "error")
    recipe, root = write_recipe(tmp_path), tmp_path / "runs" / "story"
    assert run("train", recipe) == 1
    assert run("train", "--resume", root, "stages.rl.steps=77", "training.optimizer.lr=1e-3") == 1
    kept = load_config([root / "config.yaml"])
    assert (kept.stages[1].steps, kept.training.optimizer.lr) == (77, 1e-3)  # type: ignore[attr-defined]
    capfd.readouterr()
    assert run("train", "--resume", root, "stages.rl.algorithm.group_size=8") == 2
    assert "stages.rl.algorithm.group_size: 2 -> 8 (the groups in flight" in capfd.readouterr().err
    assert load_config([root / "config.yaml"]) == kept


def test_case_b8_the_step_that_a_resume_names_is_that_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Miles#2682: not that of the ledger, nor of a newer directory that is not complete."""
    monkeypatch.setitem(sys.modules, "relax.services.run", fake_run)
    monkeypatch.setenv("FAKE_RUN", "error")
    recipe, root = write_recipe(tmp_path), tmp_path / "runs" / "story"
    assert run("train", recipe) == 1
    CheckpointStore(root / "checkpoints").write(12, lambda folder: None)
    (root / "checkpoints" / "step-000055").mkdir()
    capfd.readouterr()
    assert run("train", "--resume", root) == 1
    err = capfd.readouterr().err
    assert "newest checkpoint at step 30" in err
    assert "(goes on from step 30)" in err


OWNER = """
import sys, time
from pathlib import Path
from relax.core.error import UserError
from relax.services.directory import RunDirectory

root, gate = Path(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
while not gate.exists():
    time.sleep(0.001)
try:
    with RunDirectory(root / "deep" / "run"):
        print("owner", flush=True)
        sys.stdin.read()
except UserError as error:
    print(error, flush=True)
"""


def test_case_b15_of_many_that_make_the_same_directory_one_owns_it(tmp_path: Path) -> None:
    """prime-rl#2699: the folders above do not exist either; the others are told who owns it."""
    gate = tmp_path / "go"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path / "runs"), str(gate)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(6)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        gate.touch()
        answers = [process.stdout.readline().strip() for process in processes if process.stdout is not None]
        owners = [process.pid for process, answer in zip(processes, answers, strict=True) if answer == "owner"]
        assert len(owners) == 1
        refused = [answer for answer in answers if answer != "owner"]
        assert len(refused) == 5
        assert all("is owned by process" in answer for answer in refused)
    finally:
        for process in processes:
            process.communicate()
