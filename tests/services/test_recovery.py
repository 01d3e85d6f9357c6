"""Recovery against whole runs: at any event, what it brings back is what an unkilled run was (TQ8, RR2, RR3, AC1, AC2)."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from relax.core.event import Event
from relax.core.id import GroupId, index_of
from tests.services.crash_world import Life, Plan, copied, rows_of, takes_of

PLANS = [
    Plan(1),
    Plan(2, groups_per_step=3, staleness=2, snapshot_every=3, siblings=1),
    Plan(3, groups_per_step=2, staleness=0, snapshot_every=2),
    Plan(4, groups_per_step=2, staleness=3, snapshot_every=4, checkpoint_every=3, steps=9),
]
by_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"plan-{plan.seed}")


def first_life(folder: Path, plan: Plan, count: int, seed: int, records_all: bool = False) -> Life:
    """A run that nothing interrupts; its folder is copied at `count` events, at the last one, and while snapshots are written."""
    dry = lived(Life(folder / "dry", plan))
    chosen = Random(f"points {seed}").sample(range(len(dry.events)), min(count, len(dry.events)))
    return lived(Life(folder / "run", plan, frozenset([*chosen, len(dry.events) - 1, -1, -2]), records_all=records_all))


def lived(life: Life) -> Life:
    """From resume to the end, all in the ledger, closed."""
    life.resume()
    return finished(life)


def finished(life: Life) -> Life:
    asyncio.run(life.run())
    asyncio.run(life.projection.flush())
    life.rows = rows_of(life.ledger)
    life.close()
    return life


@by_plan
def test_rule_rr3_recovery_at_any_event_gives_what_the_run_was_at_that_event(plan: Plan, tmp_path: Path) -> None:
    """Gate, bus, account, prompts, unsettled ends, the source, and every row of the ledger."""
    whole = first_life(tmp_path, plan, 40, plan.seed, records_all=True)
    compared = 0
    for folder in whole.crashes.values():
        life = Life(folder, plan)
        if life.load() is not None:
            recovered = life.recovery().run()
            number = life.log.last_number
            record = whole.records[number]
            assert copied(life.gate.dump()) == record.gate
            assert copied(recovered.index.state()) == record.bus
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


def check_the_end(life: Life) -> None:
    """Every admitted group has exactly one row, every prompt was drawn once, every step was closed once."""
    register, groups = life.register, {id: row for id, row in life.rows.items() if "/" not in id}
    numbers = list(range(register.next_number))
    assert sorted(index_of(GroupId(group)) for group in groups) == numbers
    assert sorted(row[4] for row in groups.values()) == numbers, "the records of the data"
    counts = life.controller.account.counts()
    assert (counts["outstanding"], counts["admitted"]) == (0, len(groups))
    for state in ("trained", "filtered", "failed", "dropped"):
        assert sum(row[10] == state for row in groups.values()) == counts[state]
    assert life.gate.step == life.plan.steps


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
    whole = first_life(tmp_path, plan, 4, plan.seed + 7)
    points = frozenset([*range(8), 20, 45, 70, -1, -2])
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
    assert thirds > 20
