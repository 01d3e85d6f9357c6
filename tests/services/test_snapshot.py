"""Snapshots and checkpoints: complete or ignored, no larger than they need, and never the end of what was there (RR4, TQ2)."""

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from relax.core.error import UserError
from relax.services.snapshot import KEPT
from relax.training.checkpoint import read_meta
from tests.services.crash_world import Life, Plan, check_the_end, lived, rows_of

PLAN = Plan(11, staleness=2, steps=10)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("every", [1, 3])
def test_rule_tq8_the_journal_holds_what_the_kept_snapshots_need_and_no_more(every: int, tmp_path: Path) -> None:
    life = Life(tmp_path / "run", replace(PLAN, snapshot_every=every))
    sizes: list[int] = []

    def look(number: int) -> None:
        states = {path.name: read_meta(path) for path in life.store.complete()}
        assert len(states) <= KEPT
        names = sorted(path.name for path in (tmp_path / "run" / "journal").iterdir())
        firsts = [int(name.split("-")[1].split(".")[0]) for name in names if name.startswith("events")]
        assert life.journal is not None
        for state in states.values():
            assert life.journal.has(state["event"])
            assert [one.number for one in life.journal.tail(state["event"])] == list(
                range(state["event"] + 1, life.log.last_number + 1)
            )
        if len(states) == KEPT:
            assert min(firsts) == min(state["event"] for state in states.values()) + 1, "nothing older"
        sizes.append(len(names))

    life.fill = look
    check_the_end(lived(life))
    assert len(sizes) == (10 if every == 1 else 4)
    assert max(sizes[2:]) <= 9


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_snapshot_that_the_disk_does_not_take_ends_the_run_and_leaves_the_one_before(
    number: int, tmp_path: Path
) -> None:
    def refuse(written: int) -> None:
        if written == number:
            raise OSError(errno.ENOSPC, "No space left on device")

    life = Life(tmp_path / "run", PLAN, fill=refuse)
    message = rf"cannot write .* of step {number} into .*snapshots: .*No space left .*Earlier .* are untouched"
    with pytest.raises(UserError, match=message):
        lived(life)
    again = Life(tmp_path / "run", PLAN, luck=1)
    again.resume()
    assert (again.state.step if again.state is not None else 0) == number - 1
    again.kill()
    assert not list((tmp_path / "run" / "snapshots").glob(".*"))
    check_the_end(lived(Life(tmp_path / "run", PLAN, luck=1)))


def test_whatever_a_backend_raises_while_it_writes_is_told_as_it_is(tmp_path: Path) -> None:
    def fail(written: int) -> None:
        if written == 3:
            raise ZeroDivisionError("a backend's own")

    with pytest.raises(ZeroDivisionError, match="a backend's own"):
        lived(Life(tmp_path / "run", PLAN, fill=fail))
    check_the_end(lived(Life(tmp_path / "run", PLAN, luck=1)))


def test_rule_ac1_what_is_written_with_a_snapshot_accounts_for_every_group(tmp_path: Path) -> None:
    """Each admitted group is in the ledger, outstanding, or unsettled in the cut; none twice."""
    life = Life(tmp_path / "run", PLAN)
    seen: list[int] = []

    def look(number: int) -> None:
        dump = life.register.dump()
        in_ledger = {id for id in rows_of(life.ledger) if "/" not in id}
        places = [in_ledger, {group for group, *_ in dump["outstanding"]}, {group for group, *_ in dump["unsettled"]}]
        assert sum(map(len, places)) == len(set().union(*places)) == life.register.next_number
        seen.append(len(places[2]))

    life.fill = look
    check_the_end(lived(life))
    assert any(seen), "a snapshot is written before what it covers is settled"


def test_rule_tq2_a_checkpoint_is_preceded_by_a_snapshot_and_holds_nothing_unsettled(tmp_path: Path) -> None:
    plan = replace(PLAN, snapshot_every=5, checkpoint_every=2)
    life = lived(Life(tmp_path / "run", plan))
    check_the_end(life)
    metas = [read_meta(path) for path in life.checkpoints.complete()]
    assert [meta["step"] for meta in metas] == [2, 4, 6, 8, 10]
    for meta in metas:
        assert meta["controller"]["register"]["unsettled"] == []
        assert meta["bus"] is None
        assert meta["segment"] is None
    assert [path.name for path in life.store.complete()] == ["step-000008", "step-000010"]


def test_a_checkpoint_right_after_a_resume_needs_no_new_snapshot(tmp_path: Path) -> None:
    """As when a run is told to stop before its first step: the snapshot that it resumed from is that of this step."""
    life = Life(tmp_path / "run", PLAN, frozenset([150]))
    (folder,) = lived(life).crashes.values()
    again = Life(folder, PLAN)
    again.resume()
    before = [path.name for path in again.store.complete()]

    async def stop() -> None:
        async with again.stage():
            await again.snapshots.checkpoint()

    asyncio.run(stop())
    assert [path.name for path in again.store.complete()] == before
    assert again.state is not None
    assert [path.name for path in again.checkpoints.complete()] == [f"step-{again.state.step:06d}"]
    again.close()
    check_the_end(lived(Life(folder, PLAN, luck=1)))


def test_rule_rr4_both_kept_snapshots_can_be_resumed_after_a_resume_too(tmp_path: Path) -> None:
    (folder,) = lived(Life(tmp_path / "run", PLAN, frozenset([150]))).crashes.values()
    (copy,) = lived(Life(folder, PLAN, frozenset([80]), luck=1)).crashes.values()
    life = Life(copy, PLAN)
    for path in life.store.complete():
        state = read_meta(path)
        assert life.journal is not None
        assert life.journal.has(state["event"])
    life.kill()
