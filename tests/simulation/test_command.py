"""`python -m relax.simulation`: progress, summary, what a failure looks like, exit codes."""

import importlib
import io
import subprocess
import sys

import pytest

from relax.services.gate import Gate

command = importlib.import_module("relax.simulation.__main__")


def run(*arguments: str) -> tuple[int, list[str]]:
    out = io.StringIO()
    code = command.main(list(arguments), out)
    return code, out.getvalue().splitlines()


def test_clean_seeds_end_with_a_summary_and_exit_code_0() -> None:
    code, lines = run("--seeds", "20", "--services", "2", "--first", "5")
    assert code == 0
    assert lines[-1].startswith("20 schedules, 2 service runs: no violation in ")
    assert any(line.startswith("schedule: 20 of 20 seeds, 0 broken") for line in lines)
    assert any(line.startswith("services: 2 of 2 seeds, 0 broken") for line in lines)


def test_a_broken_rule_is_shown_with_its_seed_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "may_close", lambda self: True)
    code, lines = run("--seeds", "20", "--services", "0")
    assert code == 1
    assert any(line.startswith("schedule seed ") and " breaks ST" in line for line in lines)
    assert any("last events:" in line for line in lines)
    assert "20 schedules, 0 service runs: " in lines[-1]
    assert " broken (" in lines[-1]


def test_the_module_runs_with_two_jobs() -> None:
    command = [sys.executable, "-m", "relax.simulation", "--seeds", "8", "--services", "0", "--jobs", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("8 schedules, 0 service runs: no violation")


@pytest.mark.parametrize("arguments", [("--seeds", "-1"), ("--jobs", "0"), ("--unknown",)])
def test_wrong_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        run(*arguments)


@pytest.mark.slow
def test_1000_schedules_and_50_runs_of_the_services_break_no_rule() -> None:
    code, lines = run("--seeds", "1000", "--services", "50")
    assert code == 0, "\n".join(lines)
