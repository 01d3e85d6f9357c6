"""Recovery against whole runs: at any event, what it brings back is what an unkilled run was (TQ8, RR2, RR3, AC1, AC2)."""

import asyncio
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from relax.bus.queue import read_group
from relax.bus.row import RowPut
from relax.core.error import UserError
from relax.core.event import Event
from relax.core.id import GroupId
from relax.core.message import Prompt
from tests.bus.tearing import Disk
from tests.services.crash_world import Learner, Life, Plan, check_the_end, copied, finished, lived, rows_of, takes_of

PLANS = [
    Plan(1),
    Plan(2, groups_per_step=3, staleness=2, snapshot_every=3, siblings=1),
    Plan(3, groups_per_step=2, staleness=0, snapshot_every=2),
    Plan(4, groups_per_step=2, staleness=3, snapshot_every=4, checkpoint_every=3, steps=9),
]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill leaves what was written; what a power cut leaves is for the tests of the journal's files."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


by_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"plan-{plan.seed}")


def first_life(folder: Path, plan: Plan, count: int, seed: int, records_all: bool = False) -> Life:
    """A run that nothing interrupts; its folder is copied at `count` events, at the last one, and while snapshots are written."""
    dry = lived(Life(folder / "dry", plan))
    chosen = Random(f"points {seed}").sample(range(len(dry.events)), min(count, len(dry.events)))
    return lived(Life(folder / "run", plan, frozenset([*chosen, len(dry.events) - 1, -1, -2]), records_all=records_all))


@by_plan
def test_rule_rr3_recovery_at_any_event_gives_what_the_run_was_at_that_event(plan: Plan, tmp_path: Path) -> None:
    """Gate, bus, account, prompts, unsettled ends, the source, and every row of the ledger."""
    whole = first_life(tmp_path, plan, 40, plan.seed, records_all=True)
    compared = 0
    for folder in whole.crashes.values():
        life = Life(folder, plan)
        if life.load() is not None:
            recovery = life.recovery()
            recovered = recovery.run()
            number = life.log.last_number
            record = whole.records[number]
            assert copied(life.gate.dump()) == record.gate
            assert copied(recovered.index.state()) == record.bus
            if whole.events[number - 1].kind in ("bus/put", "bus/ack"):  # others are in the middle of something
                assert recovery._steps.lost == record.lost
            if record.register is not None:  # the last event has none after it
                assert copied(life.register.dump()) == record.register
                assert life.source.mood == record.mood
            assert life.source.drawn == life.register.next_number
            asyncio.run(life.projection.flush())
            assert rows_of(life.ledger) == {id: row for id, row in whole.rows.items() if row[1] <= number}
            compared += 1
        life.kill()
    assert compared > 15


def check_after_recovery(life: Life) -> None:
    """What must hold before the run goes on: nothing outstanding is out of reach."""
    assert life.index is not None
    portions = {group for take in life.gate.retakes for group in take.groups}
    at_gate = {*life.gate.outstanding_groups(), *portions}
    assert set(life.index.groups()) == at_gate, "every group of the gate has a row, and no other"
    assert life.gate.taken == 0
    assert portions <= {candidate.id for candidate in life.index.candidates("trainer")}
    again = life.controller._again
    assert sorted(group for group, _ in life.register.outstanding()) == sorted([*at_gate, *again])
    life.controller.account.check(life.gate.outstanding + len(again))
    assert not life.index._state.leases.ids()
    assert life.register.unsettled(life.plan.steps) == []


def retaken(life: Life, killed: Sequence[Event]) -> int:
    """Steps that no snapshot covered take the same groups in the same portions (RR2); returns how many there were."""
    assert life.state is not None
    first = life.events[0].number if life.events else killed[-1].number + 1
    tail = [event for event in killed if event.number < first]
    before, again = takes_of(tail), takes_of(life.events)
    closed = {event.data["step"] - 1 for event in tail if event.kind == "gate/advance"}
    steps = [step for step in sorted(closed) if step >= life.state.step]
    for step in steps:
        assert again.get(step) == before.get(step)
    return len(steps)


@pytest.mark.parametrize("torn", [False, True])
@by_plan
def test_rule_ac2_a_run_killed_at_any_event_goes_on_to_a_whole_ledger(plan: Plan, torn: bool, tmp_path: Path) -> None:
    whole = first_life(tmp_path, plan, 8, plan.seed + 100 * torn)
    steps = 0
    for point, folder in whole.crashes.items():
        if torn:
            tear(folder)
        life = Life(folder, plan, luck=point)
        life.resume()
        if life.state is not None:
            check_after_recovery(life)
        check_the_end(finished(life))
        steps += retaken(life, whole.events) if life.state is not None else 0
    assert steps or plan.snapshot_every == 1, "the test must see steps that are taken again"


def tear(folder: Path) -> None:
    """Half of the last event was written."""
    newest = sorted((folder / "journal").glob("events-*.jsonl"))[-1]
    lines = newest.read_bytes().splitlines(keepends=True)
    if lines:
        newest.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])


@by_plan
def test_rule_rr3_recovery_may_be_killed_at_any_event_and_after(plan: Plan, tmp_path: Path) -> None:
    """The second process dies in its recovery or while it trains steps again, with snapshots between those; then a third."""
    whole = first_life(tmp_path, plan, 2, plan.seed + 7)
    points = frozenset([*range(6), 20, 45, -1, -2])
    thirds = 0
    for point, folder in whole.crashes.items():
        second = lived(Life(folder, replace(plan, snapshot_every=1), points, luck=point))
        check_the_end(second)
        for other, copy in second.crashes.items():
            third = Life(copy, plan, luck=other)
            third.resume()
            if third.state is not None:
                check_after_recovery(third)
            check_the_end(finished(third))
            thirds += 1
    assert thirds > 15


def is_trainers_ack(event: Event) -> bool:
    return event.kind == "bus/ack" and event.data["lease"].startswith("trainer:")


def test_rule_rr2_what_was_acked_and_never_trained_is_taken_once_by_whoever_comes_next(tmp_path: Path) -> None:
    """Killed between the last ack and the end of the step; the second life takes other portions, and dies after that end."""
    plan = Plan(31, groups_per_step=3, staleness=2)
    first = lived(Life(tmp_path / "run", plan, crash_when=is_trainers_ack))
    thirds = 0
    for point, folder in first.crashes.items():
        second = Life(folder, plan, luck=point, crash_when=lambda event: event.kind == "gate/advance")
        check_the_end(lived(second))
        for copy in [*second.crashes.values()][:1]:
            third = Life(copy, plan, luck=-point)
            third.resume()
            if third.state is not None:
                check_after_recovery(third)
                groups = [group for take in third.gate.retakes for group in take.groups]
                assert len(groups) == len(set(groups))
                thirds += bool(groups)
            check_the_end(finished(third))
    assert thirds > 3


# --- a tail that cannot be used to its end ---------------------------------------------------------------------------


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "journal").glob("rows-*.arrow"))


def test_rule_rr3_rows_that_are_gone_end_the_tail_with_a_warning_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine crash may lose the rows of events that it kept."""
    plan = replace(PLANS[1], snapshot_every=2)
    whole = first_life(tmp_path, plan, 12, 3)
    warned = 0
    for point, folder in whole.crashes.items():
        life = Life(folder, plan, luck=point)
        state = life.load()
        if state is not None and state.segment is not None:
            for path in segments(folder):
                if int(path.stem.split("-")[1]) > state.segment:
                    written = path.read_bytes().rstrip(b"\0")
                    path.write_bytes(written[: len(written) // 2])
            caplog.clear()
            life.resume()
            check_after_recovery(life)
            warned += "which cannot be used: row " in caplog.text
            check_the_end(finished(life))
        else:
            life.kill()
    assert warned > 2


def test_rows_that_the_snapshot_itself_needs_and_are_gone_are_a_clear_error(tmp_path: Path) -> None:
    plan = PLANS[1]
    whole = first_life(tmp_path, plan, 0, 1)
    folder = whole.crashes[len(whole.events) - 1]
    for path in segments(folder):
        path.unlink()
    life = Life(folder, plan)
    message = "the journal does not hold what the snapshot of step 6 needs: row .*remove the whole folder journal"
    with pytest.raises(UserError, match=message):
        life.resume()
    life.kill()


def test_a_row_without_cells_is_a_row_after_recovery_too(tmp_path: Path) -> None:
    """A role may declare children before it writes anything."""
    life = Life(tmp_path / "run", Plan(1))
    life.resume()

    async def work() -> None:
        async with life.stage():
            assert life.bus is not None
            life.snapshots._last_step = -1
            await life.snapshots.begin()
            await life.snapshots.complete()
            admission = asyncio.create_task(life.controller.admit(iter(life.source)))
            await asyncio.sleep(0)
            receipt = await life.bus.take("rollout", "roller")
            await life.bus.put([RowPut(f"{receipt.groups[0]}/0", {}, children=0)], receipt.lease)
            admission.cancel()
            await asyncio.gather(admission, return_exceptions=True)

    asyncio.run(work())
    life.kill()
    again = Life(tmp_path / "run", Plan(1))
    again.resume()
    assert again.index is not None
    fetched = read_group(again.index, again.journal.storage, GroupId("g000000"))  # type: ignore[union-attr]
    assert fetched.cells["g000000/0"] == {}
    again.kill()


# --- without the journal ---------------------------------------------------------------------------------------------


def ended_run(tmp_path: Path, plan: Plan) -> tuple[Life, Path]:
    """A run, and its folder as a kill in the middle of a later step left it."""
    whole = first_life(tmp_path, plan, 0, 1)
    dry = lived(Life(tmp_path / "again", plan, frozenset([len(whole.events) * 2 // 3])))
    (folder,) = dry.crashes.values()
    return dry, folder


@pytest.mark.parametrize("plan", [PLANS[0], replace(PLANS[1], snapshot_every=2)], ids=["every-step", "every-second"])
def test_without_the_journal_folder_groups_in_flight_run_again(
    plan: Plan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The snapshot's own ends are in the ledger, without the rows of their trajectories."""
    _, folder = ended_run(tmp_path, plan)
    shutil.rmtree(folder / "journal")
    life = Life(folder, plan, luck=1)
    life.resume()
    assert life.index is None
    assert life.state is not None
    assert "journal" in caplog.text
    dump = life.state.controller["register"]
    assert life.controller._again == [group for group, *_ in dump["outstanding"]]
    assert life.gate.outstanding == 0
    unsettled = [group for group, *_ in dump["unsettled"]]
    assert unsettled
    check_the_end(finished(life))
    assert {group for group in unsettled if group in life.rows} == set(unsettled)


def test_bus_journal_false_settles_at_once_and_resumes_from_the_snapshot_alone(tmp_path: Path) -> None:
    plan = replace(PLANS[1], journal=False, snapshot_every=2)
    _, folder = ended_run(tmp_path, plan)
    assert not (folder / "journal").exists()
    life = Life(folder, plan, luck=1)
    life.resume()
    assert life.state is not None
    assert life.state.bus is None
    assert life.state.controller["register"]["unsettled"] == []
    check_the_end(finished(life))


@pytest.mark.parametrize("first", [True, False])
def test_the_journal_may_be_switched_off_and_on_between_two_lives(first: bool, tmp_path: Path) -> None:
    plan = replace(PLANS[1], journal=first, snapshot_every=2)
    _, folder = ended_run(tmp_path, plan)
    other = lived(Life(folder, replace(plan, journal=not first), frozenset([2, 30, -1]), luck=1))
    check_the_end(other)
    for point, copy in other.crashes.items():
        check_the_end(lived(Life(copy, plan, luck=point)))


# --- other snapshots -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[2]], ids=["every-step", "every-second"])
def test_rule_rr4_with_the_newest_snapshot_removed_the_one_before_is_used_and_more_steps_are_taken_again(
    plan: Plan, tmp_path: Path
) -> None:
    whole = first_life(tmp_path, plan, 12, 9)
    steps, lives = 0, 0
    for folder in whole.crashes.values():
        snapshots = sorted((folder / "snapshots").glob("step-*"))
        if len(snapshots) == 2:
            shutil.rmtree(snapshots[-1])
            life = Life(folder, plan, luck=1)
            life.resume()
            check_after_recovery(life)
            check_the_end(finished(life))
            steps += retaken(life, whole.events)
            lives += 1
    assert lives >= 3
    assert steps >= lives, "each trains again what the snapshot that is gone covered"


def test_a_damaged_snapshot_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    _, folder = ended_run(tmp_path, PLANS[0])
    newest = sorted((folder / "snapshots").glob("step-*"))[-1]
    weights = newest / "model" / "weights"
    weights.write_text("x" * weights.stat().st_size)
    life = Life(folder, PLANS[0])
    with pytest.raises(
        UserError, match=f"snapshot {newest} is damaged: .*remove that folder to resume from the one before"
    ):
        life.resume()
    life.kill()
    weights.unlink()
    life = Life(folder, PLANS[0])
    with pytest.raises(UserError, match=f"snapshot {newest} is damaged: weights is missing"):
        life.resume()
    life.kill()
    shutil.rmtree(newest)
    check_the_end(lived(Life(folder, PLANS[0], luck=1)))


def test_a_checkpoint_stands_alone(tmp_path: Path) -> None:
    """Without snapshots and journal a run goes on from it, and the groups in flight come again under their own numbers."""
    plan = Plan(6, staleness=2, snapshot_every=1, checkpoint_every=2)
    _, folder = ended_run(tmp_path, plan)
    for name in ("snapshots", "journal"):
        shutil.rmtree(folder / name)
    life = Life(folder, plan, luck=1)
    life.resume()
    assert life.state is not None
    assert life.state.bus is None
    assert life.state.controller["register"]["unsettled"] == []
    assert life.controller._again
    check_the_end(finished(life))


# --- changed data ----------------------------------------------------------------------------------------------------


def test_case_b5_other_data_is_found_at_the_first_prompt_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Learner.__iter__

    def other(self: Learner) -> Iterator[Prompt]:
        for prompt in draw(self):
            yield replace(prompt, key=replace(prompt.key, record=prompt.key.record + 1))

    whole = first_life(tmp_path, PLANS[1], 20, 4)
    monkeypatch.setattr(Learner, "__iter__", other)
    messages: list[str] = []
    for folder in whole.crashes.values():
        life = Life(folder, PLANS[1])
        if life.load() is not None:
            try:
                life.recovery().run()
            except UserError as error:
                messages.append(str(error))
        life.kill()
    assert len(messages) > 3
    for message in messages:
        assert "the data has changed since the run was interrupted: group g0" in message
        assert "bring back data.sources as it was" in message


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", [0, 3_000, 20_000, 45_000, 60_001])
def test_a_journal_that_the_disk_does_not_take_ends_the_run_and_space_lets_it_go_on(free: int, tmp_path: Path) -> None:
    plan = PLANS[1]
    disk = Disk(free)
    with pytest.raises(UserError, match=r"cannot write the journal in .*No space left on device.*relax train --resume"):
        lived(Life(tmp_path / "run", plan, open_file=disk.open))
    check_the_end(lived(Life(tmp_path / "run", plan, luck=1)))
