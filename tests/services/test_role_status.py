"""The rows of roles in status.json: written, read, shown."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from relax.services.cli.roles import role_table
from relax.services.cli.status import fitted, status_table
from relax.services.directory import RunDirectory
from relax.services.role_status import RoleStatus, read_roles
from relax.services.status import read_status
from tests.services.story import story_config, story_directory

ROLES = (
    RoleStatus("controller", "ready", restarts=2, beat_age_s=0.2),
    RoleStatus("trainer", "busy", version=31, rate=8123.4, unit="tokens", beat_age_s=1.0),
    RoleStatus(
        "engine-0",
        "busy",
        version=31,
        rate=912.0,
        unit="tokens",
        restarts=1,
        beat_age_s=0.4,
        error="killed by signal 9",
    ),
    RoleStatus("engine-1", "starting", waits_for="weights v31", beat_age_s=45.0),
    RoleStatus("reward-0", "waiting", waits_for="trajectories", rate=0.25, unit="rows", beat_age_s=0.1),
    RoleStatus("judge", "failed", restarts=5, beat_age_s=200.0, error="RuntimeError: no memory left on the device"),
)


def shown(*parts: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    for part in parts:
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_rows_go_through_json() -> None:
    text = json.dumps([role.to_json() for role in ROLES])
    assert read_roles(json.loads(text)) == (ROLES, 0)
    assert read_roles(None) == ((), 0)


@pytest.mark.parametrize(
    ("found", "bad"),
    [
        ([{"name": "a", "state": "ready", "new": 1}, {"name": "b"}, 3, {"name": "c", "state": "flying"}], 3),
        ([{"name": "a", "state": "ready"}, {"name": "b", "state": "busy", "rate": "fast"}], 1),
        (
            [
                {"name": "a", "state": "ready"},
                {"name": "b", "state": "busy", "version": True},
                {"name": 1, "state": "busy"},
            ],
            2,
        ),
        ([{"name": "a", "state": "ready"}, {"name": "b", "state": ["busy"]}], 1),
    ],
)
def test_what_is_no_row_is_left_out_and_counted(found: Any, bad: int) -> None:
    assert read_roles(found) == ((RoleStatus("a", "ready"),), bad)


@pytest.mark.parametrize("found", ["text", 3, {"a": 1}])
def test_what_is_no_list_is_one_bad_thing(found: Any) -> None:
    assert read_roles(found) == ((), 1)


def test_the_table_says_who_does_what() -> None:
    lines = shown(role_table(ROLES)).splitlines()
    assert max(len(line) for line in lines) <= 80
    rows, blank, sentences = lines[:7], lines[7], lines[8:]
    table = {line.split()[0]: line for line in rows}
    assert table["role"].split() == ["role", "state", "version", "rate", "beat"]
    assert table["trainer"].split() == ["trainer", "busy", "v31", "8,123", "tokens/s", "1", "s"]
    assert " ".join(table["engine-1"].split()) == "engine-1 starting, waits for weights v31 - - 45 s"
    assert " ".join(table["reward-0"].split()) == "reward-0 waiting for trajectories - 0.25 rows/s 0 s"
    assert "3 min" in table["judge"]
    assert not blank.strip()
    assert sentences == [
        "controller: restarted 2 times",
        "engine-0: restarted once; killed by signal 9",
        "judge: failed, restarted 5 times; RuntimeError: no memory left on the device",
    ]


def test_the_table_of_roles_that_share_a_process_has_one_line_for_each_in_80_columns() -> None:
    names = ("rollout", "reward", "advantage", "demonstration")
    roles = [
        RoleStatus(name, "waiting", "stage warm-up to end", beat_age_s=3.0, host="everything-else") for name in names
    ]
    roles += [RoleStatus("engine-12", "busy", version=1234, rate=12345.6, unit="tokens", beat_age_s=0.0)]
    lines = shown(role_table(roles)).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert len(lines) == 1 + len(roles) + 2
    assert " ".join(lines[4].split()) == "demonstration waiting for stage warm-up to end - - 3 s"
    assert lines[-1] == "everything-else: one process of rollout, reward, advantage, demonstration"


def test_a_restart_of_a_process_that_roles_share_is_told_once() -> None:
    roles = [RoleStatus(name, "busy", restarts=1, error="killed", host="light") for name in ("advantage", "reward")]
    assert shown(role_table(roles)).splitlines()[-2:] == [
        "light: one process of advantage, reward",
        "light: restarted once; killed",
    ]


def test_status_has_the_roles_of_a_run_under_way(tmp_path: Path) -> None:
    config = story_config(tmp_path)
    directory = story_directory(config)
    rows = [*(role.to_json() for role in ROLES), {"name": "x"}]
    directory.write_json(directory.status, {"step": 31, "paused": True, "roles": rows})
    written = directory.status.stat().st_mtime
    os.utime(directory.status, (written - 100, written - 100))
    with RunDirectory(directory.root):
        status = read_status(config, directory)
    assert [role.name for role in status.roles] == [role.name for role in ROLES]
    assert status.roles[0].beat_age_s is not None
    assert status.roles[0].beat_age_s >= 100.2
    assert status.notes == ("1 of the roles in status.json cannot be read and are left out",)
    text = shown(status_table(status))
    assert "paused (process" in text
    assert "news 100 s ago" in text
    assert "waiting for trajectories" in text
    over = read_status(config, directory)
    assert over.roles == ()
    assert "beat" not in shown(status_table(over))


METRICS = {
    "reward/mean": 0.61,
    "staleness/max": 1.0,
    "rollout/tokens_per_second": 4785.0,
    "idle/trainer": 0.3,
    "idle/engine-0": 0.1,
}


def dozen(restarts: int = 0) -> tuple[RoleStatus, ...]:
    """Twelve roles, the newest of which fails; `restarts` is how many of the others were restarted."""
    error = "its process 485 ended: killed by signal 9 (SIGKILL), and this sentence is longer than a line is wide"
    names = [*(f"engine-{number}" for number in range(4)), *(f"reward-{number}" for number in range(4))]
    names += ["controller", "trainer", "rollout"]
    working = [
        RoleStatus(name, "waiting", "stage warm-up to end", 12, beat_age_s=0.5, **trouble)  # type: ignore[arg-type]
        for index, name in enumerate(names)
        for trouble in [{"restarts": 2, "error": error} if index < restarts else {}]
    ]
    return (*working, RoleStatus("judge", "failed", restarts=5, beat_age_s=200.0, error=error))


def fitted_lines(tmp_path: Path, roles: tuple[RoleStatus, ...], height: int) -> list[str]:
    config = story_config(tmp_path)
    directory = story_directory(config)
    directory.write_json(directory.status, {"step": 31, "roles": [role.to_json() for role in roles]})
    with RunDirectory(directory.root):
        status = replace(read_status(config, directory), metrics=METRICS, snapshot="snapshots/step-000031")
    console = Console(file=io.StringIO(), width=80, height=height, force_terminal=False)
    console.print(fitted(status, console))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(("restarts", "height"), [(0, 24), (1, 24), (11, 24), (11, 30), (3, 12), (3, 60)])
def test_what_is_watched_fits_into_the_terminal_and_keeps_what_matters(
    tmp_path: Path, restarts: int, height: int
) -> None:
    lines = fitted_lines(tmp_path, dozen(restarts), height)
    text = "\n".join(lines)
    assert len(lines) <= height - 1
    assert max(map(len, lines)) <= 80
    assert "31 of" in text
    assert [line for line in lines if line.startswith("judge  ") and "failed" in line]
    assert "failed: judge" in text or "judge: failed, restarted 5 times" in text
    if height >= 24:
        assert all([line for line in lines if line.startswith(role.name)] for role in dozen())
    assert ("there is more" in text) == (height < 60)
    assert ("sampled tokens/s" in text) == (height >= 30)
