"""RR2: what was trained since the last snapshot is trained again as the take log says, not as it would come today."""

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax.config.load import load_config
from tests.e2e.test_kill import outcome, play, recipe
from tests.e2e.tiny import run_root, tiny_tree, train

SNAPSHOT, STEPS = 2, 4
"""The last snapshot before the kill is that of step 2; the run dies within step 3, after step 2."""
SHARES = (0.5, 0.7, 0.3, 0.9, 0.1)
"""Where in the last step to kill. Two runs do not have quite the same events, so one that was killed elsewhere is tried again."""


def events(path: Path, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The journal's events of one kind, numbered."""
    for file in sorted((run_root(load_config([path])) / "journal").glob("events-*.jsonl")):
        for line in file.read_text().splitlines():
            number, _, found, data = json.loads(line.split(" ", 1)[1])
            if found == kind:
                yield number, data


def last_step(path: Path) -> int:
    """Steps that were closed, as far as the journal goes back."""
    return max((data["step"] for _, data in events(path, "gate/advance")), default=0)


def takes(path: Path, step: int) -> list[str]:
    return [data["group"] for _, data in events(path, "gate/take") if data["step"] == step]


def trained(path: Path, step: int) -> list[str]:
    """The groups that a step trained, in the order in which it took them, as the ledger has them in the end."""
    ledger = sqlite3.connect(run_root(load_config([path])) / "ledger.sqlite")
    try:
        return [id for (id,) in ledger.execute("SELECT id FROM group_ WHERE step = ? ORDER BY place", (step,))]
    finally:
        ledger.close()


def test_rule_rr2_acked_groups_are_trained_again_by_the_take_log(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    training = {**tree["training"], "snapshot_every": 2, "checkpoint": {"every": 9, "keep_last": 1}}
    sections = {"training": training, "stages": [{**tree["stages"][1], "steps": STEPS}]}
    path = recipe(tmp_path, "whole", 1, False, **sections)
    asyncio.run(train(load_config([path])))
    expected = outcome(path)
    ends = {data["step"]: number for number, data in events(path, "gate/advance")}
    for share in SHARES:
        killed = recipe(tmp_path, f"killed-{share}", 1, False, **sections)
        point = ends[STEPS - 1] + int(share * (ends[STEPS] - ends[STEPS - 1]))
        if play([(killed, False, point, False)]) == ["killed"] and last_step(killed) == SNAPSHOT + 1:
            break
    first = {step: takes(killed, step) for step in (SNAPSHOT, SNAPSHOT + 1)}
    assert len(first[SNAPSHOT]) == 4
    assert last_step(killed) == SNAPSHOT + 1

    assert play([(killed, True, None, False)]) == ["ended"]
    (rollback,) = [data for _, data in events(killed, "gate/rollback")]
    assert rollback["step"] == SNAPSHOT
    for step, groups in first.items():
        assert trained(killed, step)[: len(groups)] == groups
    assert outcome(killed) == expected
