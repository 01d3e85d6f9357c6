"""The bus index, rule by rule."""

import json
from dataclasses import replace
from typing import Any

import pytest

from relax.bus.index import BusIndex
from relax.bus.log import MemoryLog
from relax.bus.row import BusStatus, Subscription
from relax.bus.write import CellNote, RowWrite, rows_from_json
from relax.core.column import Column
from relax.core.error import InvariantError, LateError, UserError
from relax.core.id import GroupId, Table

ROLLOUT = Subscription("rollout", Table.group, ("prompt",), lease_s=10)
REWARD = Subscription("reward", Table.trajectory, ("prompt", "token_ids"))
JUDGE = Subscription("judge", Table.trajectory, ("token_ids", "failure"), unit="group")
TRAINER = Subscription("trainer", Table.sample, ("prompt", "kept", "token_ids", "span"), unit="group")
G = GroupId("g000001")


def note(content: object = 0, size: int = 4) -> CellNote:
    return CellNote(str(content), size)


def write(row: str, *names: str, children: int | None = None, content: object = 0, size: int = 4) -> RowWrite:
    return RowWrite(row, {name: note(content, size) for name in names}, children)


def admit(index: BusIndex, group: str = G, children: int = 2, rows: int = 10, num_bytes: int = 100) -> None:
    index.admit(GroupId(group), {"prompt": note(), "base": note()}, children, rows, num_bytes)


def take(index: BusIndex, consumer: str, now: float = 0.0, holder: str = "h", count: int = 100) -> Any:
    chosen = [candidate.id for candidate in index.candidates(consumer)[:count]]
    return index.lease(consumer, holder, chosen, now)


def sibling(number: int, samples: int = 1, group: str = G, content: object = 0) -> list[RowWrite]:
    row = f"{group}/{number}"
    return [
        write(row, "token_ids", children=samples, content=content),
        *(write(f"{row}/{i}", "span", content=content) for i in range(samples)),
    ]


def ids(index: BusIndex, consumer: str) -> list[str]:
    return [candidate.id for candidate in index.candidates(consumer)]


def check_replay(index: BusIndex, columns: dict[str, Column], space: tuple[int, int] = (1000, 1_000_000)) -> None:
    log: Any = index._log
    wire = [type(e)(e.number, e.time_s, e.kind, json.loads(json.dumps(e.data))) for e in log.events()]
    silent = MemoryLog(log._clock)
    assert BusIndex.replay(wire, columns, silent, *space).state() == index.state()
    assert silent.last_number == 0


# --- TQ1 -------------------------------------------------------------------------------------------------------------


def test_rule_tq1_consumers_join_upward_only(index: BusIndex) -> None:
    with pytest.raises(InvariantError, match=r"\[TQ1\].*'token_ids' lies in trajectory, below group"):
        index.subscribe(Subscription("a", Table.group, ("token_ids",)))
    with pytest.raises(InvariantError, match="unknown"):
        index.subscribe(Subscription("a", Table.group, ("nothing",)))
    index.subscribe(Subscription("a", Table.sample, ("prompt", "token_ids", "span")))


def test_rule_tq1_a_column_belongs_to_one_table(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    admit(index)
    lease = take(index, "rollout").lease
    with pytest.raises(InvariantError, match=r"'span' belongs to table sample, not trajectory"):
        index.put(lease, [write(f"{G}/0", "span")], 0)
    with pytest.raises(InvariantError, match="unknown column 'nope'"):
        index.put(lease, [write(f"{G}/0", "nope")], 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([write(f"{G}/2", "token_ids")], "declared 2 children"),
        ([write(f"{G}/0/0", "span")], "no parent row"),
        ([write(f"{G}/0", children=1), write(f"{G}/0/1", "span")], "declared 1 children"),
        ([write(f"{G}/0"), write(f"{G}/0/0", children=1)], "cannot declare 1 children"),
        ([write(f"{G}/0", children=-1)], "cannot declare -1 children"),
    ],
)
def test_rule_tq1_rows_have_their_place_in_the_tree(index: BusIndex, rows: list[RowWrite], message: str) -> None:
    index.subscribe(ROLLOUT)
    admit(index)
    lease = take(index, "rollout").lease
    before = index.state()
    with pytest.raises(InvariantError, match=message):
        index.put(lease, rows, 0)
    assert index.state() == before


def test_rule_tq1_a_declaration_below_the_rows_there_are_is_refused(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    admit(index)
    lease = take(index, "rollout").lease
    index.put(lease, [write(f"{G}/0"), write(f"{G}/0/3", "span")], 0)
    with pytest.raises(InvariantError, match="declares 3 children but has row"):
        index.put(lease, [write(f"{G}/0", children=3)], 0)


# --- TQ2 -------------------------------------------------------------------------------------------------------------


def test_rule_tq2_a_unit_is_leased_by_one_holder_per_consumer_and_by_each_consumer(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(Subscription("other", Table.group, ("prompt",)))
    admit(index)
    assert take(index, "rollout").ids == (G,)
    assert ids(index, "rollout") == []
    with pytest.raises(InvariantError, match=r"\[TQ2\].*it is leased"):
        index.lease("rollout", "h2", [G], 0)
    assert take(index, "other").ids == (G,)


def test_rule_tq2_leases_come_back_on_release_expiry_and_death_at_their_old_place(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    groups = [f"g{number:06d}" for number in range(3)]
    for group in groups:
        admit(index, group)
    for give_back in (
        lambda lease: index.release(lease),
        lambda lease: index.expire(10.0),
        lambda lease: index.drop_holder("h"),
    ):
        lease = index.lease("rollout", "h", [groups[0]], 0.0)
        assert ids(index, "rollout") == groups[1:]
        assert list(give_back(lease.lease).woken) == ["rollout"]
        assert ids(index, "rollout") == groups
        with pytest.raises(LateError, match="no longer held"):
            index.ack(lease.lease)
    assert index.release(lease.lease).woken == {}


def test_rule_tq2_progress_renews_the_deadline(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    admit(index)
    lease = take(index, "rollout", now=0.0).lease
    assert index.next_deadline() == 10.0
    index.renew(lease, 6.0)
    assert index.next_deadline() == 16.0
    index.put(lease, sibling(0), 12.0)
    assert index.next_deadline() == 22.0
    assert index.expire(21.9).woken == {}
    assert list(index.expire(22.0).woken) == ["rollout"]
    assert index.next_deadline() is None


def test_rule_tq2_only_settled_rows_leave_and_acked_ones_can_return(
    index: BusIndex, columns: dict[str, Column]
) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(REWARD)
    admit(index)
    lease = take(index, "rollout").lease
    index.put(lease, sibling(0) + sibling(1), 0)
    with pytest.raises(InvariantError, match=r"\[TQ2\] cannot settle"):
        index.settle([G])
    index.ack(lease)
    reward = take(index, "reward", count=1)
    index.ack(reward.lease)
    assert ids(index, "reward") == [f"{G}/1"]
    assert list(index.unack("reward", [G]).woken) == ["reward"]
    assert ids(index, "reward") == [f"{G}/0", f"{G}/1"]
    change = index.settle([G])
    assert sorted(change.dropped) == [G, f"{G}/0", f"{G}/0/0", f"{G}/1", f"{G}/1/0"]
    assert ids(index, "reward") == []
    assert index.settle([G]).dropped == []
    with pytest.raises(InvariantError, match=r"\[TQ2\] cannot return"):
        index.unack("reward", [G])
    check_replay(index, columns)


@pytest.mark.parametrize("finish", ["ack", "release", "expire"])
def test_rule_tq2_settled_rows_wait_for_the_last_reader(
    index: BusIndex, columns: dict[str, Column], finish: str
) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(REWARD)
    admit(index)
    lease = take(index, "rollout").lease
    index.put(lease, sibling(0) + sibling(1), 0)
    index.ack(lease)
    reader = take(index, "reward", count=1).lease
    assert index.settle([G]).dropped == []
    assert ids(index, "reward") == []
    assert index.rows(reader) == (f"{G}/0",)
    change = {
        "ack": lambda: index.ack(reader),
        "release": lambda: index.release(reader),
        "expire": lambda: index.expire(60.0),
    }[finish]()
    assert len(change.dropped) == 5
    assert index.status(0, {}).groups == 0
    check_replay(index, columns)


def test_rule_tq2_nothing_of_a_settled_group_is_offered_again(index: BusIndex, columns: dict[str, Column]) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(REWARD)
    index.subscribe(Subscription("sink", Table.trajectory, ("reward",)))
    admit(index)
    rollout = take(index, "rollout").lease
    index.put(rollout, sibling(0) + sibling(1), 0)
    index.ack(take(index, "reward", count=1).lease)
    reader = take(index, "reward", count=1).lease
    index.settle([G])
    index.put(reader, [write(f"{G}/1", "reward")], 0)
    assert ids(index, "sink") == []
    assert index.release(reader).woken == {}
    assert ids(index, "reward") == []
    index.subscribe(Subscription("late", Table.trajectory, ("token_ids",)))
    assert ids(index, "late") == []
    check_replay(index, columns)
    assert len(index.release(rollout).dropped) == 5


def test_rule_tq2_a_role_that_restarts_subscribes_again(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    admit(index)
    before = index.state()
    assert index.subscribe(ROLLOUT).woken == {}
    assert index.state() == before
    with pytest.raises(InvariantError, match="is subscribed as"):
        index.subscribe(Subscription("rollout", Table.group, ("base",)))


# --- TQ3 -------------------------------------------------------------------------------------------------------------


def test_rule_tq3_rows_come_when_every_column_is_there(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(Subscription("late", Table.sample, ("kept", "reward", "span")))
    admit(index)
    lease = take(index, "rollout").lease
    index.put(lease, sibling(0, samples=2) + sibling(1), 0)
    assert ids(index, "late") == []
    index.put(lease, [write(f"{G}/0", "reward")], 0)
    assert ids(index, "late") == []
    assert list(index.put(lease, [write(G, "kept")], 0).change.woken) == ["late"]
    assert ids(index, "late") == [f"{G}/0/0", f"{G}/0/1"]
    index.put(lease, [write(f"{G}/1", "reward")], 0)
    assert ids(index, "late") == [f"{G}/0/0", f"{G}/0/1", f"{G}/1/0"]


def test_rule_tq3_a_group_is_offered_whole_when_all_declared_rows_are_complete(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(TRAINER)
    admit(index, children=11)
    lease = take(index, "rollout").lease
    for number in reversed(range(11)):
        assert ids(index, "trainer") == []
        index.put(lease, sibling(number, samples=2 if number == 10 else 1), 0)
    assert ids(index, "trainer") == []
    index.put(lease, [write(G, "kept")], 0)
    receipt = take(index, "trainer")
    assert receipt.ids == (*(f"{G}/{n}/0" for n in range(10)), f"{G}/10/0", f"{G}/10/1")
    assert receipt.groups == (G,)


def test_rule_tq3_a_group_waits_for_declared_samples(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(TRAINER)
    admit(index, children=1)
    lease = take(index, "rollout").lease
    index.put(lease, [write(G, "kept"), write(f"{G}/0", "token_ids")], 0)
    index.put(lease, [write(f"{G}/0/0", "span")], 0)
    assert ids(index, "trainer") == []
    index.put(lease, [write(f"{G}/0", children=2)], 0)
    assert ids(index, "trainer") == []
    index.put(lease, [write(f"{G}/0/1", "span")], 0)
    assert ids(index, "trainer") == [G]


def test_rule_tq3_a_trajectory_that_declared_nothing_holds_its_group_back(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(TRAINER)
    admit(index)
    lease = take(index, "rollout").lease
    index.put(lease, [write(G, "kept"), *sibling(0), write(f"{G}/1", "token_ids")], 0)
    assert ids(index, "trainer") == []
    index.put(lease, [write(f"{G}/1", children=0)], 0)
    assert ids(index, "trainer") == [G]


def test_rule_tq3_a_trajectory_may_have_no_samples(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(TRAINER)
    admit(index)
    lease = take(index, "rollout").lease
    index.put(lease, [write(G, "kept"), write(f"{G}/0", "failure", children=0), *sibling(1)], 0)
    assert take(index, "trainer").ids == (f"{G}/1/0",)


def test_rule_tq3_a_group_without_any_row_is_still_named(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(TRAINER)
    admit(index)
    lease = take(index, "rollout").lease
    index.put(lease, [write(f"{G}/0", "failure", children=0), write(f"{G}/1", "failure", children=0)], 0)
    assert ids(index, "trainer") == []
    index.put(lease, [write(G, "kept")], 0)
    receipt = take(index, "trainer")
    assert (receipt.ids, receipt.groups) == ((), (G,))
    assert index.rows(receipt.lease) == ()
    index.ack(lease)
    index.ack(receipt.lease)
    assert index.settle([G]).dropped == [G, f"{G}/0", f"{G}/1"]


def test_rule_tq3_a_late_subscription_sees_what_is_there(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    admit(index)
    index.put(take(index, "rollout").lease, [*sibling(0), *sibling(1), write(G, "kept")], 0)
    assert list(index.subscribe(REWARD).woken) == ["reward"]
    assert ids(index, "reward") == [f"{G}/0", f"{G}/1"]
    index.subscribe(TRAINER)
    assert ids(index, "trainer") == [G]


# --- TQ4 -------------------------------------------------------------------------------------------------------------


def test_rule_tq4_under_one_lease_equal_content_is_a_no_op_and_other_content_an_error(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    admit(index)
    lease = take(index, "rollout").lease
    index.put(lease, sibling(0), 0)
    before = index.state()
    outcome = index.put(lease, sibling(0), 0)
    assert all(not write.cells for write in outcome.plan.fresh)
    assert index.state() == before
    for bad in (sibling(0, content=1), [write(f"{G}/0", children=2)], [write(G, "base", content=1)]):
        with pytest.raises(InvariantError, match=r"\[TQ4\].*other content"):
            index.put(lease, bad, 0)
    assert index.state() == before


def test_rule_tq4_a_put_under_a_lost_lease_is_refused_and_counted(index: BusIndex, columns: dict[str, Column]) -> None:
    index.subscribe(ROLLOUT)
    admit(index)
    lease = take(index, "rollout").lease
    index.expire(10.0)
    with pytest.raises(LateError, match=r"\[TQ4\].*expired"):
        index.put(lease, sibling(0), 11.0)
    with pytest.raises(LateError):
        index.renew(lease, 11.0)
    assert index.status(0, {}).late == 3
    check_replay(index, columns)


def test_rule_tq8_a_log_that_ends_within_a_last_put_tells_of_a_held_lease_and_written_rows(
    index: BusIndex, columns: dict[str, Column]
) -> None:
    log: Any = index._log
    index.subscribe(ROLLOUT)
    admit(index)
    lease = take(index, "rollout").lease
    plan = index.plan(lease, sibling(0) + sibling(1))
    index.commit(lease, plan, 5.0, is_last=True)
    events = log.events()
    assert [event.kind for event in events[-2:]] == ["bus/put", "bus/ack"]
    whole = BusIndex.replay(events, columns, log, 1000, 1_000_000)
    assert whole.state() == index.state()
    assert whole.status(0, {}).consumers["rollout"].acked == 1
    cut = BusIndex.replay(events[:-1], columns, log, 1000, 1_000_000)
    assert cut.rows(lease) == (G,)
    cut.release_all("the process ended")
    again = take(cut, "rollout").lease
    assert f"{G}/1" in cut.written(again)
    cut.ack(again)
    assert cut.status(0, {}).consumers["rollout"].acked == 1


def test_rule_tq4_a_receipt_says_whether_somebody_has_begun(index: BusIndex, columns: dict[str, Column]) -> None:
    """A cell of the group's own row counts, a row below it too; the admission's cells do not, nor do those of other groups."""
    for subscription in (ROLLOUT, Subscription("any", Table.trajectory, ("prompt",))):
        index.subscribe(subscription)
    for number in range(3):
        admit(index, f"g00000{number}", rows=5)
    other = index.lease("rollout", "h", ["g000000"], 0)
    index.put(other.lease, [RowWrite("g000000/0")], 0)
    fresh = index.lease("rollout", "h", ["g000001", "g000002"], 0)
    assert (other.is_begun, fresh.is_begun) == (False, False)
    assert set(index.written(fresh.lease).values()) == {("prompt", "base")}
    index.put(fresh.lease, [write("g000002", "kept")], 0)
    for lease in (other, fresh):
        index.release(lease.lease)
    again = BusIndex.load(json.loads(json.dumps(index.dump())), columns, MemoryLog(index._log._clock), 1000, 1_000_000)  # type: ignore[attr-defined]
    for one in (index, again):
        for group, is_begun in (("g000000", True), ("g000001", False), ("g000002", True)):
            assert one.lease("rollout", "h", [group], 0).is_begun is is_begun
        assert one.lease("any", "h", ["g000000/0"], 0).is_begun, "a row that is there was written"


def test_rule_tq4_a_lease_past_its_deadline_is_held_until_it_is_handed_back(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    admit(index)
    lease = take(index, "rollout").lease
    index.put(lease, sibling(0), 50.0)
    assert index.expire(50.0).woken == {}


def test_rule_tq4_what_an_earlier_lease_wrote_first_stays(index: BusIndex, columns: dict[str, Column]) -> None:
    index.subscribe(ROLLOUT)
    admit(index)
    first = take(index, "rollout").lease
    index.put(first, sibling(0, samples=1, content="first"), 0)
    index.expire(10.0)
    second = take(index, "rollout", now=10.0).lease
    assert index.written(second) == {
        G: ("prompt", "base"),
        f"{G}/0": ("token_ids",),
        f"{G}/0/0": ("span",),
    }
    outcome = index.put(second, sibling(0, samples=2, content="second") + sibling(1, content="second"), 10.0)
    assert outcome.plan.superseded == (f"{G}/0", f"{G}/0/0", f"{G}/0/1")
    assert [write.id for write in outcome.plan.fresh] == [f"{G}/1", f"{G}/1/0"]
    assert index.status(0, {}).superseded == 3
    with pytest.raises(InvariantError, match="would mix"):
        index.put(second, [write(f"{G}/0", "token_ids", "turns", content="second")], 10.0)
    index.put(second, [write(f"{G}/0", "token_ids", "turns", content="first")], 10.0)
    check_replay(index, columns)


def test_rule_tq4_a_put_stays_within_its_lease(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(REWARD)
    admit(index)
    admit(index, "g000002")
    rollout = index.lease("rollout", "h", [G], 0).lease
    index.put(rollout, sibling(0) + sibling(1), 0)
    reward = take(index, "reward", count=1).lease
    index.put(reward, [write(f"{G}/0", "reward"), write(f"{G}/0/0", "advantages")], 0)
    for lease, row in ((rollout, "g000002/0"), (reward, f"{G}/1"), (rollout, "g000009/0")):
        with pytest.raises(InvariantError, match=r"\[TQ4\].*does not cover"):
            index.put(lease, [write(row, "reward")], 0)
    with pytest.raises(InvariantError, match="does not cover"):
        index.put(reward, [write(G, "kept")], 0)


def test_rule_tq4_a_group_lease_covers_the_group_row(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(JUDGE)
    admit(index, children=1)
    index.put(take(index, "rollout").lease, [write(f"{G}/0", "token_ids", "failure", children=0)], 0)
    index.put(take(index, "judge").lease, [write(G, "kept"), write(f"{G}/0", "reward")], 0)


# --- TQ5 -------------------------------------------------------------------------------------------------------------


def test_rule_tq5_admission_reserves_the_declared_maximum(columns: dict[str, Column], clock: Any) -> None:
    index = BusIndex(columns, MemoryLog(clock), max_rows=20, max_bytes=250)
    index.subscribe(ROLLOUT)
    admit(index, rows=10, num_bytes=100)
    assert index.fits(10, 150)
    assert not index.fits(11, 10)
    assert not index.fits(1, 151)
    with pytest.raises(InvariantError, match=r"\[TQ5\] no space"):
        admit(index, "g000002", rows=11)
    for asked, limit in ({"rows": 21}, "max_rows"), ({"num_bytes": 251}, "max_bytes"):
        with pytest.raises(UserError, match=f"raise bus.{limit}"):
            admit(index, "g000002", **asked)
    with pytest.raises(InvariantError, match=r"\[AC3\]"):
        admit(index)
    index.end(G)
    assert index.fits(20, 250)
    check_replay(index, columns, (20, 250))


def over_bytes(status: BusStatus) -> int:
    return status.charged_bytes - status.reserved_bytes


def test_rule_tq5_later_columns_are_accepted_beyond_the_reservation_and_counted(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    admit(index, rows=2, num_bytes=20)
    lease = take(index, "rollout").lease
    index.put(lease, [write(f"{G}/0", "token_ids", size=5)], 0)
    status = index.status(0, {})
    assert (status.rows, status.num_bytes, status.over_rows, over_bytes(status)) == (2, 13, 0, 0)
    index.put(lease, [write(f"{G}/1", "token_ids", size=2_000_000)], 0)
    status = index.status(0, {})
    assert (status.rows, status.num_bytes, status.over_rows, over_bytes(status)) == (3, 2_000_013, 1, 1_999_993)
    assert not index.fits(1, 1)
    index.end(G)
    status = index.status(0, {})
    assert (status.rows, status.num_bytes, status.charged_rows, status.charged_bytes) == (0, 0, 0, 0)


# --- ends, TQ8, TQ10 --------------------------------------------------------------------------------------------------


def test_a_group_ends_at_any_moment_and_ending_is_idempotent(index: BusIndex, columns: dict[str, Column]) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(REWARD)
    admit(index)
    admit(index, "g000002")
    both = take(index, "rollout").lease
    index.put(both, sibling(0) + sibling(0, group="g000002"), 0)
    single = index.lease("reward", "r", [f"{G}/0"], 0).lease
    assert sorted(index.end(G).dropped) == [G, f"{G}/0", f"{G}/0/0"]
    assert index.end(G).dropped == []
    with pytest.raises(LateError, match=f"group {G} ended"):
        index.put(single, [write(f"{G}/0", "reward")], 0)
    outcome = index.put(both, sibling(1) + sibling(1, group="g000002"), 0)
    assert outcome.plan.late == (f"{G}/1", f"{G}/1/0")
    assert [write.id for write in outcome.plan.fresh] == ["g000002/1", "g000002/1/0"]
    assert index.rows(both) == ("g000002",)
    assert index.status(0, {}).late == 3
    index.ack(both)
    check_replay(index, columns)


def test_rule_tq8_every_change_is_an_event_and_replay_gives_the_same_index(
    index: BusIndex, columns: dict[str, Column]
) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(TRAINER)
    admit(index)
    index.release(take(index, "rollout").lease)
    index.expire(5.0)
    take(index, "rollout", now=0.0)
    index.expire(10.0)
    lease = take(index, "rollout", now=10.0).lease
    index.renew(lease, 11.0)
    index.put(lease, [*sibling(0), *sibling(1), write(G, "kept")], 12.0)
    index.ack(lease)
    index.ack(take(index, "trainer").lease)
    index.unack("trainer", [G])
    index.ack(take(index, "trainer").lease)
    index.settle([G])
    admit(index, "g000002")
    index.end(GroupId("g000002"))
    log: Any = index._log
    assert [event.kind for event in log.events()] == [
        *("bus/subscribe", "bus/subscribe", "bus/admit", "bus/lease", "bus/release", "bus/lease", "bus/expire"),
        *("bus/lease", "bus/renew", "bus/put", "bus/ack", "bus/lease", "bus/ack", "bus/unack", "bus/lease", "bus/ack"),
        *("bus/settle", "bus/admit", "bus/end"),
    ]
    check_replay(index, columns)


def test_rule_tq10_step_columns_go_with_the_take_that_made_them(index: BusIndex, columns: dict[str, Column]) -> None:
    with pytest.raises(InvariantError, match="TQ10"):
        index.subscribe(Subscription("a", Table.sample, ("old_logprobs",)))
    index.subscribe(ROLLOUT)
    index.subscribe(TRAINER)
    admit(index)
    index.put(take(index, "rollout").lease, [*sibling(0), *sibling(1), write(G, "kept")], 0)
    row = f"{G}/0/0"
    undo = (lambda lease: index.release(lease), lambda lease: (index.ack(lease), index.unack("trainer", [G])))
    for content, undo_take in enumerate(undo):
        lease = take(index, "trainer").lease
        index.put(lease, [write(row, "old_logprobs", "advantages", content="a"), write(f"{G}/1/0")], 0)
        assert index.present(row, ["old_logprobs", "advantages"]) == ["old_logprobs", "advantages"], content
        undo_take(lease)
        assert index.present(row, ["old_logprobs", "advantages"]) == ["advantages"]
    index.put(take(index, "trainer").lease, [write(row, "old_logprobs", content="b")], 0)
    check_replay(index, columns)


def test_rule_tq10_a_take_that_is_undone_leaves_the_step_columns_of_another_one(
    index: BusIndex, columns: dict[str, Column]
) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(TRAINER)
    index.subscribe(replace(TRAINER, consumer="second"))
    admit(index)
    index.put(take(index, "rollout").lease, [*sibling(0), *sibling(1), write(G, "kept")], 0)
    first, second = take(index, "trainer").lease, take(index, "second").lease
    index.put(first, [write(f"{G}/0/0", "old_logprobs")], 0)
    index.put(second, [write(f"{G}/1/0", "old_logprobs")], 0)
    index.release(second)
    assert [index.present(f"{G}/{sibling}/0", ["old_logprobs"]) for sibling in (0, 1)] == [["old_logprobs"], []]
    check_replay(index, columns)


def test_rows_that_are_alike_are_told_once_and_stay_what_they_are_when_one_of_them_changes(
    index: BusIndex, columns: dict[str, Column]
) -> None:
    for subscription in (ROLLOUT, Subscription("all", Table.trajectory, ("token_ids", "failure")), TRAINER):
        index.subscribe(subscription)
    admit(index, children=3, rows=20)
    rows = [f"{G}/{number}" for number in range(3)]
    alike, other = {"token_ids": note(size=7)}, {"token_ids": note(size=8)}
    writes = [*(RowWrite(row, alike, 1) for row in rows[:2]), RowWrite(rows[2], other)]
    shared = {"span": note(), "old_logprobs": note()}
    lease = take(index, "rollout").lease
    index.put(lease, [*writes, *(RowWrite(f"{row}/0", shared) for row in rows[:2])], 0)
    log: Any = index._log
    told = log.events()[-1].data["rows"]
    assert [len(told["notes"]), told["which"]] == [3, [0, 0, 1, 2, 2]]
    read = list(rows_from_json(json.loads(json.dumps(told))))
    assert read[0] == (rows[0], {"token_ids": ["0", 7]}, 1)
    assert read[2] == (rows[2], {"token_ids": ["0", 8]}, None)
    index.put(lease, [write(rows[0], "failure")], 0)
    assert ids(index, "all") == [rows[0]], "the other of them does not have it"
    index.put(lease, [write(rows[2], children=0), write(G, "kept"), write(rows[1], "failure")], 0)
    before = index.status(0, {}).num_bytes
    index.put(lease, [write(f"{rows[0]}/0", "reference_logprobs")], 0)
    assert index.present(f"{rows[1]}/0", ["reference_logprobs"]) == []
    assert index.status(0, {}).num_bytes == before + 4
    check_replay(index, columns)
    index.release(lease)
    assert index.present(f"{rows[1]}/0", ["span", "old_logprobs"]) == ["span"]
    assert index.status(0, {}).num_bytes == before - 4
    check_replay(index, columns)
    loaded = BusIndex.load(json.loads(json.dumps(index.dump())), columns, MemoryLog(log._clock), 1000, 1_000_000)
    assert loaded.state() == index.state()


def test_rows_that_are_alike_are_judged_by_their_own_table_and_by_the_rows_above_them(index: BusIndex) -> None:
    index.subscribe(ROLLOUT)
    index.subscribe(Subscription("each", Table.sample, ("failure", "span")))
    admit(index)
    lease = take(index, "rollout").lease
    rows, alike = [f"{G}/0", f"{G}/1"], {"token_ids": note()}
    with pytest.raises(InvariantError, match="belongs to table trajectory, not sample"):
        index.put(lease, [RowWrite(rows[0], alike, 1), RowWrite(f"{rows[0]}/0", alike)], 0)
    index.put(lease, [RowWrite(rows[0], alike | {"failure": note()}), RowWrite(rows[1], alike)], 0)
    span = {"span": note()}
    index.put(lease, [RowWrite(f"{row}/0", span) for row in rows], 0)
    assert ids(index, "each") == [f"{rows[0]}/0"]


def test_a_hundred_thousand_rows_cost_each_call_only_what_it_touches(columns: dict[str, Column], clock: Any) -> None:
    """Counted, not timed: no verb may look at more nodes than its own group has."""
    index = BusIndex(columns, MemoryLog(clock, keep=10), max_rows=200_000, max_bytes=1 << 30)
    for subscription in (ROLLOUT, REWARD, TRAINER):
        index.subscribe(subscription)
    for number in range(6_000):
        group = f"g{number:06d}"
        admit(index, group, children=8, rows=17)
        lease = index.lease("rollout", "h", [group], 0.0).lease
        index.put(lease, [w for s in range(8) for w in sibling(s, group=group)], 0.0)
        index.put(lease, [write(group, "kept")], 0.0)
        index.ack(lease)
    status = index.status(0, {})
    assert (status.rows, status.consumers["reward"].available) == (6_000 * 17, 48_000)
    looked_at = 0
    state: Any = index._state
    nodes = state.trees["g003000"].root.__class__
    plain = nodes.descendants

    def counted(node: Any, table: Table) -> Any:
        nonlocal looked_at
        looked_at += 1
        return plain(node, table)

    nodes.descendants = counted
    try:
        index.ack(take(index, "reward", count=8).lease)
        index.ack(take(index, "trainer", count=1).lease)
        index.settle([GroupId("g000000")])
        index.end(GroupId("g003000"))
        index.expire(5.0)
    finally:
        nodes.descendants = plain
    assert looked_at < 100
    assert index.status(0, {}).rows == 6_000 * 17 - 34
