"""Recovery against whole runs: at any event, what it brings back is what an unkilled run was (TQ8, RR2, RR3, AC1, AC2)."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from relax.core.id import GroupId, index_of
from tests.services.crash_world import Life, Plan, copied, rows_of, takes_of

PLANS = [
    Plan(1),
    Plan(2, groups_per_step=3, staleness=2, snapshot_every=3, siblings=1),
    Plan(3, groups_per_step=2, staleness=0, snapshot_every=2),
    Plan(4, groups_per_step=2, staleness=3, snapshot_every=3, checkpoint_every=2),
]


def whole_run(folder: Path, plan: Plan) -> Life:
    """A run that nothing interrupts, closed."""
    life = Life(folder, plan)
    life.resume()
    asyncio.run(life.run())
    life.close()
    return life


def crashed_run(folder: Path, plan: Plan, points: frozenset[int]) -> Life:
    """The same run; its folder is copied at each point."""
    life = Life(folder, plan, points)
    life.resume()
    asyncio.run(life.run())
    asyncio.run(life.projection.flush())
    return life


def points_of(last: int, count: int, seed: int) -> frozenset[int]:
    """Events, and the first, second and last snapshot while it is written."""
    chosen = Random(f"points {seed}").sample(range(1, last), min(count, last - 1))
    return frozenset([*chosen, last, -1, -2, -3])


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"plan-{plan.seed}")
def test_rule_rr3_recovery_at_any_event_gives_what_the_run_was_at_that_event(plan: Plan, tmp_path: Path) -> None:
    """Gate, bus, account, prompts, unsettled ends, the source, and every row of the ledger."""
    last = max(whole_run(tmp_path / "whole", plan).records)
    whole = crashed_run(tmp_path / "run", plan, points_of(last, 60, plan.seed))
    expected = rows_of(whole.ledger)
    whole.close()
    compared = 0
    for folder in whole.crashes.values():
        life = Life(folder, plan)
        if life.load() is None:
            life.kill()
            continue
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
        assert rows_of(life.ledger) == {id: row for id, row in expected.items() if row[1] <= number}
        life.kill()
        compared += 1
    assert compared > 20


def check_after_recovery(life: Life) -> None:
    """What must hold before the run goes on: nothing outstanding is out of reach."""
    assert life.index is not None
    at_gate = {*life.gate.outstanding_groups(), *(group for take in life.gate.retakes for group in take.groups)}
    assert set(life.index.groups()) == at_gate, "every group of the gate has a row, and no other"
    assert life.gate.taken == 0
    ready = {candidate.id for candidate in life.index.candidates("trainer")}
    assert {group for take in life.gate.retakes for group in take.groups} <= ready
    again = life.controller._again
    outstanding = [group for group, _ in life.register.outstanding()]
    assert sorted(outstanding) == sorted([*at_gate, *again])
    life.controller.account.check(life.gate.outstanding + len(again))
    assert not any(life.index._state.leases.ids())
    assert life.register.unsettled(life.plan.steps) == []


def check_the_end(life: Life) -> None:
    """Every admitted group has exactly one row, every prompt was drawn once, every step was closed once."""
    asyncio.run(life.projection.flush())
    register, rows = life.register, rows_of(life.ledger)
    groups = [id for id in rows if "/" not in id]
    assert sorted(map(index_of, map(GroupId, groups))) == list(range(register.next_number))
    assert sorted(rows[group][4] for group in groups) == list(range(register.next_number))
    counts = life.controller.account.counts()
    assert counts["outstanding"] == 0
    ended = {state: sum(rows[group][10] == state for group in groups) for state in ("trained", "filtered", "failed", "dropped")}
    assert ended == {state: counts[state] for state in ended}
    assert counts["admitted"] == len(groups)
    assert life.gate.step == life.plan.steps
    assert {step for step, _ in life.ledger.metric("train/loss")} == set(range(life.plan.steps))


def taken_of(life: Life, steps: range) -> dict[int, list[str]]:
    """What the ledger says that the steps took, in order."""
    query = "SELECT id FROM group_ WHERE step = ? ORDER BY place"
    return {step: [row["id"] for row in life.ledger._connection.execute(query, (step,))] for step in steps}


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"plan-{plan.seed}")
def test_rule_ac2_a_run_killed_at_any_event_goes_on_to_a_whole_ledger(plan: Plan, torn: bool, tmp_path: Path) -> None:
    last = max(whole_run(tmp_path / "whole", plan).records)
    whole = crashed_run(tmp_path / "run", plan, points_of(last, 10, plan.seed + 100 + torn))
    whole.close()
    retaken = 0
    for point, folder in whole.crashes.items():
        if torn:
            tear(folder)
        life = Life(folder, plan, luck=point)
        life.resume()
        number, start = life.log.last_number, 0
        if life.state is not None:
            check_after_recovery(life)
            number, start = life.state.event, life.state.step
            tail = [event for event in whole.events if event.number <= whole_tail(life)]
            takes = takes_of(tail, whole_tail(life))
            steps = range(start, max([start, *takes]) if takes else start)
        asyncio.run(life.run())
        check_the_end(life)
        if life.state is not None:
            done = {step for step in steps if any(e.kind == "gate/advance" and e.data["step"] == step + 1 for e in tail)}
            again = takes_of(life.events, life.log.last_number)
            for step in sorted(done):
                assert again[step] == takes[step], "the same groups in the same portions (RR2)"
                retaken += 1
        life.close()
    if plan.snapshot_every > 1:
        assert retaken, "the test must see steps that are taken again"


def tear(folder: Path) -> None:
    newest = sorted((folder / "journal").glob("events-*.jsonl"))[-1]
    lines = newest.read_bytes().splitlines(keepends=True)
    if lines:
        newest.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])


def whole_tail(life: Life) -> int:
    """The last event of the killed run that the recovery used: its own begin behind it."""
    return life.first_own_event - 1
