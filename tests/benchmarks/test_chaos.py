"""The harness that kills roles: its plan, what it reads of a journal, and what it makes of both."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

from benchmarks.chaos import ROLES, Shot, draw_plan, pause_of, rows_of
from benchmarks.host import JournalTail, Seen, Story, hosts_of


def line(number: int, kind: str, **data: object) -> bytes:
    return b"%08x %b\n" % (0, json.dumps([number, 0.5, kind, data], separators=(",", ":")).encode())


def test_the_plan_kills_every_kind_in_turn_and_has_as_many_kills_as_asked_for() -> None:
    for seed in range(10):
        plan = draw_plan(60, 900, ROLES, Random(seed))
        assert len(plan) == 60
        assert all(sum(kill.role == role for kill in plan) >= 3 for role in ROLES)
        assert [kill.step for kill in plan] == sorted(kill.step for kill in plan)
        assert all(0 <= kill.step < 898 for kill in plan)
    assert {kill.role for kill in draw_plan(len(ROLES), 30, ROLES, Random(0))} == set(ROLES)
    assert {kill.role for kill in draw_plan(3, 30, ["trainer"], Random(0))} == {"trainer"}


def test_the_journal_is_read_as_it_grows_past_what_is_torn_or_begun_again(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.mkdir()
    first, second = journal / "events-000000000001.jsonl", journal / "events-000000000003.jsonl"
    tail = JournalTail(tmp_path)
    first.write_bytes(line(1, "gate/advance", step=1) + line(2, "bus/put", rows=["gate/advance"]) + b"0000 [3,0.5,")
    assert list(tail.read()) == [("gate/advance", {"step": 1})]
    assert list(tail.read()) == []
    second.write_bytes(line(3, "gate/advance", step=2) + line(4, "bus/release", leases=["a"]))
    assert list(tail.read()) == [("gate/advance", {"step": 2}), ("bus/release", {"leases": ["a"]})]
    second.write_bytes(line(3, "gate/advance", step=3))
    assert list(tail.read()) == [("gate/advance", {"step": 3})]


def told() -> tuple[Story, list[Shot]]:
    """Steps end every second; the trainer is killed at 2.5, comes back at 6, trains a step again, and goes on."""
    story, shots = Story(), list[Shot]()
    for step in (1, 2):
        story.hear("gate/advance", {"step": step}, float(step))
    story.hear("bus/lease", {"lease": "t:0", "consumer": "trainer", "units": ["g1", "g2"]}, 2.2)
    story.hear("bus/lease", {"lease": "t:1", "consumer": "reward", "units": ["g3/0"]}, 2.3)
    shots.append(Shot(Seen("trainer", 1, 7), 2.5, story.step))
    story.hear("bus/release", {"leases": ["t:0"]}, 3.0)
    story.hear("gate/advance", {"step": 2}, 6.0)
    story.hear("gate/advance", {"step": 3}, 7.0)
    shots.append(Shot(Seen("engine-1", 1, 8), 7.5, story.step))
    story.hear("gate/advance", {"step": 4}, 8.0)
    story.hear("gate/advance", {"step": 5}, 11.0)
    return story, shots


def test_a_pause_is_the_longer_of_the_next_two_steps() -> None:
    story, shots = told()
    assert (story.step, story.again) == (4, [6.0])
    assert [pause_of(story, shot) for shot in shots] == [4.5, 3.0]


def test_the_table_says_what_each_role_cost() -> None:
    assert rows_of(*told()) == [
        ["engine", "1", "3.0", "3.0", "0", "none"],
        ["trainer", "1", "4.5", "4.5", "1", "trainer 2"],
    ]


def test_a_host_is_the_process_that_writes_its_log_and_not_a_child_of_it(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    script = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('ready', file=sys.stderr, flush=True); sys.stdin.read()"
    with (logs / "engine-1.3.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    try:
        assert child.stderr is not None
        assert child.stderr.readline() == b"ready\n"
        assert hosts_of(tmp_path) == {"engine-1": Seen("engine-1", 3, child.pid)}
        assert hosts_of(tmp_path)["engine-1"].role == "engine"
    finally:
        os.killpg(child.pid, 9)
        child.communicate()
    assert hosts_of(tmp_path) == {}
