"""The async shell: wake-ups, fairness, cancellation, expiry, closing (TQ2, TQ5, TQ7)."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from relax.bus.row import AckedError, QueueClosedError, RowPut, Subscription
from relax.core.error import InvariantError, LateError, TransportError, UserError
from relax.core.id import GroupId, Table, group_id
from relax.core.protocol import Candidate

ROLLOUT = Subscription("rollout", Table.group, ("prompt",), lease_s=10)
REWARD = Subscription("reward", Table.trajectory, ("prompt", "token_ids"))
TRAINER = Subscription("trainer", Table.sample, ("prompt", "kept", "token_ids", "span"), unit="group")
PROMPT = {"key": ["toy", 0, 0, 0], "task": "add"}


async def admit(queue: Any, number: int, children: int = 2, rows: int = 5, timeout_s: float | None = 100.0) -> GroupId:
    group = group_id(number)
    cells = {"prompt": {**PROMPT, "number": number}, "base": 0}
    await queue.admit(group, cells, children, rows, 1000, timeout_s=timeout_s)
    return group


def sibling(group: str, number: int, length: int = 3) -> list[RowPut]:
    row = f"{group}/{number}"
    tokens = np.arange(length, dtype=np.int32) + 10 * number
    return [
        RowPut(row, {"token_ids": tokens}, children=1),
        RowPut(f"{row}/0", {"span": np.array([0, length], np.int64)}),
    ]


async def settle_down() -> None:
    """Let every task that can run do so, without moving time."""
    for _ in range(5):
        await asyncio.sleep(0)


# --- data round trip --------------------------------------------------------------------------------------------------


async def test_rule_tq1_a_fetch_joins_upward_and_carries_a_shared_cell_once(make_bus: Any) -> None:
    bus = make_bus()
    queue = bus.queue
    await queue.subscribe(ROLLOUT)
    await queue.subscribe(TRAINER)
    group = await admit(queue, 7)
    lease = (await queue.take("rollout", "r")).lease
    await queue.put([*sibling(group, 1, 2), *sibling(group, 0), RowPut(group, {"kept": True})], lease)
    receipt = await queue.take("trainer", "t")
    assert receipt.ids == (f"{group}/0/0", f"{group}/1/0")
    fetched = await queue.fetch(receipt)
    assert set(fetched.cells) == {group, *(f"{group}/{i}" for i in (0, 1)), *receipt.ids}
    assert sum("prompt" in cells for cells in fetched.cells.values()) == 1
    for row, expected in zip(receipt.ids, ([0, 1, 2], [10, 11]), strict=True):
        assert fetched.get(row, "token_ids").tolist() == expected
        assert fetched.get(row, "prompt")["number"] == 7
        assert fetched.get(row, "kept") is True
    assert not fetched.has(row, "base")
    with pytest.raises(InvariantError, match=r"\[TQ3\] column 'base' was not fetched"):
        fetched.get(row, "base")
    chosen = await queue.fetch(receipt, ["base", "advantages"])
    assert chosen.get(row, "base") == 0
    assert not chosen.has(row, "advantages")
    with pytest.raises(InvariantError, match="unknown column"):
        await queue.fetch(receipt, ["nope"])
    await queue.ack(receipt.lease)
    with pytest.raises(LateError):
        await queue.fetch(receipt)


async def test_rule_tq6_a_bad_cell_refuses_the_whole_put(make_bus: Any) -> None:
    bus = make_bus()
    await bus.queue.subscribe(ROLLOUT)
    group = await admit(bus.queue, 0)
    lease = (await bus.queue.take("rollout", "r")).lease
    before = bus.log.last_number
    with pytest.raises(InvariantError, match="'token_ids': expected int32"):
        await bus.queue.put([*sibling(group, 0), RowPut(f"{group}/1", {"token_ids": np.zeros(2)})], lease)
    assert bus.log.last_number == before
    assert len(bus.storage) == 1


async def test_rule_tq4_the_same_arrays_again_are_a_no_op_and_others_an_error(make_bus: Any) -> None:
    bus = make_bus()
    await bus.queue.subscribe(ROLLOUT)
    group = await admit(bus.queue, 0)
    lease = (await bus.queue.take("rollout", "r")).lease
    await bus.queue.put(sibling(group, 0), lease)
    size = bus.storage.num_bytes
    await bus.queue.put(sibling(group, 0), lease)
    assert bus.storage.num_bytes == size == (await bus.queue.status()).num_bytes
    with pytest.raises(InvariantError, match="TQ4"):
        await bus.queue.put(sibling(group, 0, length=4), lease)


# --- waiting ----------------------------------------------------------------------------------------------------------


async def test_rule_tq7_the_write_that_completes_a_row_wakes_the_reader(make_bus: Any) -> None:
    queue = make_bus().queue
    await queue.subscribe(ROLLOUT)
    await queue.subscribe(REWARD)
    waiting = asyncio.create_task(queue.take("reward", "w", max_rows=4))
    group = await admit(queue, 0)
    lease = (await queue.take("rollout", "r")).lease
    await queue.put([RowPut(f"{group}/0", children=1)], lease)
    await settle_down()
    assert not waiting.done()
    await queue.put(sibling(group, 1) + sibling(group, 0), lease)
    await settle_down()
    assert waiting.done()
    assert (await waiting).ids == (f"{group}/1", f"{group}/0")


async def test_rule_tq7_waiting_readers_are_served_in_order_and_get_disjoint_rows(make_bus: Any) -> None:
    queue = make_bus().queue
    await queue.subscribe(ROLLOUT)
    order: list[str] = []

    async def work(name: str) -> str:
        receipt = await queue.take("rollout", name)
        order.append(name)
        return receipt.ids[0]

    tasks = [asyncio.create_task(work(name)) for name in "abc"]
    await settle_down()
    assert (await queue.status()).consumers["rollout"].waiting == 3
    groups = [await admit(queue, number) for number in range(3)]
    assert await asyncio.gather(*tasks) == groups
    assert order == ["a", "b", "c"]


async def test_rule_tq7_a_poke_asks_the_sampler_again(make_bus: Any) -> None:
    class Gate:
        open = False

        def choose(self, candidates: Sequence[Candidate], max_rows: int) -> Sequence[str]:
            return [candidates[-1].id] if self.open else []

    queue, gate = make_bus().queue, Gate()
    await queue.subscribe(ROLLOUT, gate)
    waiting = asyncio.create_task(queue.take("rollout", "r"))
    await admit(queue, 0)
    last = await admit(queue, 1)
    await settle_down()
    assert not waiting.done()
    gate.open = True
    await queue.poke("rollout")
    assert (await waiting).ids == (last,)


async def test_a_sampler_that_fails_fails_its_consumer_and_not_the_producer(make_bus: Any) -> None:
    class Broken:
        def choose(self, candidates: Sequence[Candidate], max_rows: int) -> Sequence[str]:
            return [candidates[0].id, candidates[0].id][:max_rows] if max_rows > 1 else ["g999999"]

    queue = make_bus().queue
    await queue.subscribe(ROLLOUT, Broken())
    waiting = [asyncio.create_task(queue.take("rollout", "r", max_rows=rows)) for rows in (1, 2)]
    await settle_down()
    await admit(queue, 0)
    for task, message in zip(waiting, ("not complete", "one twice"), strict=True):
        with pytest.raises(InvariantError, match=message):
            await task


def test_rule_tq2_expiry_wakes_the_next_reader(make_bus: Any, run_virtual: Any) -> None:
    async def main() -> None:
        bus = make_bus()
        queue, loop = bus.queue, asyncio.get_running_loop()
        await queue.subscribe(ROLLOUT)
        group = await admit(queue, 0)
        first = await queue.take("rollout", "dead")
        second = await queue.take("rollout", "alive")
        assert second.ids == (group,)
        assert loop.time() == pytest.approx(10.0)
        with pytest.raises(LateError, match="expired"):
            await queue.put(sibling(group, 0), first.lease)
        await queue.put(sibling(group, 0), second.lease)
        assert (await queue.status()).late == 2
        assert bus.kinds().count("bus/expire") == 1

    run_virtual(main)


def test_rule_tq2_a_holder_that_makes_progress_keeps_its_lease(make_bus: Any, run_virtual: Any) -> None:
    async def main() -> None:
        queue, loop = make_bus().queue, asyncio.get_running_loop()
        await queue.subscribe(ROLLOUT)
        group = await admit(queue, 0)
        lease = (await queue.take("rollout", "slow")).lease
        other = asyncio.create_task(queue.take("rollout", "other"))
        await asyncio.sleep(8)
        await queue.renew(lease)
        await asyncio.sleep(8)
        await queue.put(sibling(group, 0), lease)
        assert (await other).ids == (group,)
        assert loop.time() == pytest.approx(26.0)

    run_virtual(main)


async def test_rule_tq2_a_dead_holders_leases_and_waits_end(make_bus: Any) -> None:
    queue = make_bus().queue
    await queue.subscribe(ROLLOUT)
    group = await admit(queue, 0)
    await queue.take("rollout", "dead")
    waiting = asyncio.create_task(queue.take("rollout", "dead"))
    other = asyncio.create_task(queue.take("rollout", "alive"))
    await settle_down()
    await queue.drop_holder("dead")
    with pytest.raises(LateError, match="'dead' was dropped"):
        await waiting
    assert (await other).ids == (group,)


# --- cancellation and time limits -------------------------------------------------------------------------------------


async def test_a_cancelled_take_loses_nothing(make_bus: Any) -> None:
    queue = make_bus().queue
    await queue.subscribe(ROLLOUT)
    waiting = asyncio.create_task(queue.take("rollout", "cancelled"))
    granted = asyncio.create_task(queue.take("rollout", "granted"))
    await settle_down()
    waiting.cancel()
    group = await admit(queue, 0)
    granted.cancel()  # the lease was granted by the admission, but the take has not run since
    assert (await queue.status()).consumers["rollout"].leased == 1
    await asyncio.gather(waiting, granted, return_exceptions=True)
    assert waiting.cancelled()
    assert granted.cancelled()
    counts = (await queue.status()).consumers["rollout"]
    assert (counts.available, counts.leased, counts.waiting) == (1, 0, 0)
    assert (await queue.take("rollout", "next")).ids == (group,)


def test_rule_rr7_take_and_admit_end_at_their_deadline(make_bus: Any, run_virtual: Any) -> None:
    async def main() -> None:
        queue, loop = make_bus(max_rows=5).queue, asyncio.get_running_loop()
        await queue.subscribe(ROLLOUT)
        with pytest.raises(TimeoutError, match="'rollout': nothing to take within 3 s"):
            await queue.take("rollout", "r", timeout_s=3)
        await admit(queue, 0)
        with pytest.raises(TimeoutError, match=r"g000001.*no space for 5 rows"):
            await admit(queue, 1, timeout_s=4)
        assert loop.time() == pytest.approx(7.0)
        status = await queue.status()
        assert (status.groups, status.blocked_admissions, status.consumers["rollout"].waiting) == (1, 0, 0)
        assert (await queue.take("rollout", "r", timeout_s=0)).ids == ("g000000",)

    run_virtual(main)


# --- admission --------------------------------------------------------------------------------------------------------


async def test_rule_tq5_admission_waits_for_space_first_come_first_served(make_bus: Any) -> None:
    queue = make_bus(max_rows=10).queue
    await queue.subscribe(ROLLOUT)
    first, second = await admit(queue, 0), await admit(queue, 1)
    large = asyncio.create_task(admit(queue, 2, rows=8))
    small = asyncio.create_task(admit(queue, 3, rows=2))
    await settle_down()
    assert (await queue.status()).blocked_admissions == 2
    await queue.end(first)
    await settle_down()
    assert not large.done()
    assert not small.done(), "a small group must not overtake a large one"
    assert not await queue.has_space(1, 1), "nor a group that does not wait in line"
    await queue.end(second)
    assert await large == group_id(2)
    assert await small == group_id(3)
    assert not await queue.has_space(1, 1)


async def test_rule_tq5_a_cancelled_admission_lets_the_next_one_through(make_bus: Any) -> None:
    bus = make_bus(max_rows=10)
    queue = bus.queue
    first = await admit(queue, 0)
    large = asyncio.create_task(admit(queue, 1, rows=10))
    small = asyncio.create_task(admit(queue, 2, rows=5))
    await settle_down()
    large.cancel()
    assert await small == group_id(2)
    woken = asyncio.create_task(admit(queue, 3, rows=5))
    last = asyncio.create_task(admit(queue, 4, rows=5))
    await settle_down()
    await queue.end(first)
    woken.cancel()  # it was told to look again, but has not run since
    assert await last == group_id(4)
    assert (await queue.status()).groups == 2
    assert bus.kinds().count("bus/admit") == 3


async def test_rule_tq5_space_that_later_columns_took_is_not_given_twice(make_bus: Any) -> None:
    queue = make_bus(max_rows=10).queue
    await queue.subscribe(ROLLOUT)
    first, second = await admit(queue, 0, children=20), await admit(queue, 1)
    lease = (await queue.take("rollout", "r")).lease
    waiting = asyncio.create_task(admit(queue, 2))
    await settle_down()
    await queue.end(second)
    await queue.put([RowPut(f"{first}/{i}", children=0) for i in range(8)], lease)
    await settle_down()
    assert not waiting.done()
    assert (await queue.status()).over_rows == 4
    await queue.end(first)
    assert await waiting == group_id(2)


async def test_rule_tq5_a_group_that_can_never_fit_is_refused_at_once(make_bus: Any) -> None:
    queue = make_bus(max_rows=10).queue
    with pytest.raises(UserError, match=r"bus\.max_rows is 10"):
        await admit(queue, 0, rows=11)


async def test_rule_tq5_a_full_queue_from_which_nothing_can_be_taken_shows(make_bus: Any) -> None:
    class Never:
        def choose(self, candidates: Sequence[Candidate], max_rows: int) -> Sequence[str]:
            return []

    queue = make_bus(max_rows=5).queue
    await queue.subscribe(ROLLOUT, Never())
    await admit(queue, 0)
    assert not (await queue.status()).stalled
    blocked = asyncio.create_task(admit(queue, 1))
    await settle_down()
    assert not (await queue.status()).stalled, "a consumer may still come and take"
    taking = asyncio.create_task(queue.take("rollout", "r"))
    await settle_down()
    assert (await queue.status()).stalled
    await queue.end(group_id(0))
    await settle_down()
    assert not (await queue.status()).stalled
    assert await blocked == group_id(1)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)


# --- several at once --------------------------------------------------------------------------------------------------


async def test_rule_tq2_what_is_there_together_is_taken_together_and_each_has_its_own_lease(make_bus: Any) -> None:
    queue = make_bus().queue
    await queue.subscribe(ROLLOUT)
    waiting = asyncio.create_task(queue.take_each("rollout", "r", 9))
    await settle_down()
    groups = [await admit(queue, number) for number in range(3)]
    receipts = await waiting
    assert [receipt.ids for receipt in receipts] == [(group,) for group in groups]
    await queue.ack(receipts[1].lease)
    await queue.release(receipts[2].lease)
    assert (await queue.status()).consumers["rollout"].leased == 1
    assert [receipt.ids for receipt in await queue.take_each("rollout", "r", 9)] == [(groups[2],)]
    more = [await admit(queue, number) for number in (3, 4)]
    assert [receipt.ids for receipt in await queue.take_each("rollout", "r", 0)] == [(more[0],)], "never none"
    assert [receipt.ids for receipt in await queue.take_each("rollout", "r", 2)] == [(more[1],)]
    with pytest.raises(TimeoutError):
        await queue.take_each("rollout", "r", 2, timeout_s=0.0)


class Choosy:
    """Gives one unit, then declines or fails."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.asked = fails, 0

    def choose(self, candidates: Sequence[Candidate], max_units: int) -> list[str]:
        self.asked += 1
        if self.asked > 1 and self.fails:
            raise InvariantError("TEST", "no more")
        return [candidates[0].id] if self.asked == 1 else []


@pytest.mark.parametrize("fails", [False, True])
async def test_rule_tq2_a_sampler_that_declines_ends_the_taking_and_one_that_fails_leaves_nothing_leased(
    make_bus: Any, fails: bool
) -> None:
    queue = make_bus().queue
    await queue.subscribe(ROLLOUT, Choosy(fails))
    for number in range(3):
        await admit(queue, number)
    if fails:
        with pytest.raises(InvariantError, match="no more"):
            await queue.take_each("rollout", "r", 3)
    else:
        assert len(await queue.take_each("rollout", "r", 3)) == 1
    assert (await queue.status()).consumers["rollout"].leased == (0 if fails else 1)


# --- leaving ----------------------------------------------------------------------------------------------------------


async def test_rule_tq2_storage_keeps_rows_until_they_settle(make_bus: Any) -> None:
    bus = make_bus()
    queue = bus.queue
    await queue.subscribe(ROLLOUT)
    await queue.subscribe(TRAINER)
    group = await admit(queue, 0)
    lease = (await queue.take("rollout", "r")).lease
    await queue.put([*sibling(group, 0), *sibling(group, 1), RowPut(group, {"kept": True})], lease)
    await queue.ack(lease)
    await queue.ack((await queue.take("trainer", "t")).lease)
    assert len(bus.storage) == 5
    await queue.unack("trainer", [group])
    again = await queue.take("trainer", "t2")
    assert (await queue.fetch(again)).get(f"{group}/1/0", "token_ids").tolist() == [10, 11, 12]
    await queue.ack(again.lease)
    await queue.settle([group])
    await queue.settle([group])
    assert (len(bus.storage), bus.storage.num_bytes) == (0, 0)
    assert (await queue.status()).charged_rows == 0


async def test_rule_tq2_the_last_put_writes_and_acks_in_one_moment(make_bus: Any) -> None:
    bus = make_bus()
    queue = bus.queue
    await queue.subscribe(ROLLOUT)
    await queue.subscribe(REWARD)
    group = await admit(queue, 0)
    seen: list[int] = []
    waiting = asyncio.create_task(queue.take("reward", "w", max_rows=2))
    await settle_down()
    waiting.add_done_callback(lambda task: seen.append(queue._index.status(0, {}).consumers["rollout"].acked))
    lease = (await queue.take("rollout", "r")).lease
    bad = [RowPut(f"{group}/0", {"token_ids": "text"}, children=0)]
    with pytest.raises(InvariantError):
        await queue.put(bad, lease, is_last=True)
    assert (await queue.status()).consumers["rollout"].leased == 1, "a put that is refused acks nothing"
    await queue.put(sibling(group, 0) + sibling(group, 1), lease, is_last=True)
    assert (await queue.status()).consumers["rollout"].acked == 1
    assert (await waiting).ids == (f"{group}/0", f"{group}/1")
    await settle_down()
    assert seen == [1]
    for is_last in (True, False):
        with pytest.raises(AckedError):
            await queue.put(sibling(group, 0), lease, is_last)


async def test_rule_tq4_a_last_put_under_a_lease_that_went_back_writes_nothing(make_bus: Any) -> None:
    queue = make_bus().queue
    await queue.subscribe(ROLLOUT)
    group = await admit(queue, 0)
    lease = (await queue.take("rollout", "r")).lease
    await queue.release(lease)
    with pytest.raises(LateError) as late:
        await queue.put(sibling(group, 0), lease, is_last=True)
    assert type(late.value) is LateError
    status = await queue.status()
    assert (status.consumers["rollout"].available, status.rows) == (1, 1)


async def test_rule_tq5_the_last_put_frees_what_was_settled_before_it(make_bus: Any) -> None:
    bus = make_bus()
    queue = bus.queue
    await queue.subscribe(ROLLOUT)
    await queue.subscribe(REWARD)
    group = await admit(queue, 0)
    lease = (await queue.take("rollout", "r")).lease
    await queue.put(sibling(group, 0), lease)
    await queue.ack((await queue.take("reward", "w")).lease)
    await queue.settle([group])
    await queue.put(sibling(group, 1), lease, is_last=True)
    assert (len(bus.storage), (await queue.status()).rows) == (0, 0)


async def test_closing_ends_every_wait_with_a_typed_error(make_bus: Any) -> None:
    queue = make_bus(max_rows=5).queue
    await queue.subscribe(ROLLOUT)
    await queue.subscribe(REWARD)
    group = await admit(queue, 0)
    lease = (await queue.take("rollout", "r")).lease
    waits = [asyncio.create_task(queue.take("reward", "w")), asyncio.create_task(admit(queue, 1))]
    await settle_down()
    await queue.close()
    await queue.close()
    for wait in waits:
        with pytest.raises(QueueClosedError):
            await wait
    with pytest.raises(TransportError):
        await queue.take("rollout", "r")
    with pytest.raises(QueueClosedError):
        await admit(queue, 2)
    await queue.put(sibling(group, 0), lease)
    await queue.release(lease)
    assert (await queue.status()).consumers["rollout"].available == 1


async def test_an_unknown_consumer_is_named(make_bus: Any) -> None:
    queue = make_bus().queue
    await queue.subscribe(ROLLOUT)
    with pytest.raises(InvariantError, match=r"unknown consumer 'nobody'; subscribed: \['rollout'\]"):
        await queue.take("nobody", "x")


async def test_a_ledger_reads_every_row_and_of_the_cells_those_that_it_names(make_bus: Any) -> None:
    queue = make_bus().queue
    await queue.subscribe(ROLLOUT)
    group = await admit(queue, 0)
    lease = (await queue.take("rollout", "a")).lease
    await queue.put(sibling(group, 0), lease)
    whole, part = await queue.read(group), await queue.read(group, {"span", "base", "reward"})
    assert part.ids == whole.ids == (group, f"{group}/0", f"{group}/0/0")
    assert part.cells[group] == {"base": 0}
    assert part.cells[f"{group}/0"] == {}
    assert part.cells[f"{group}/0/0"]["span"].tolist() == [0, 3]
    assert set(whole.cells[f"{group}/0"]) == {"token_ids"}
    assert (await queue.read(group_id(9), {"span"})).ids == ()


async def test_written_tells_the_next_holder_what_is_done(make_bus: Any) -> None:
    queue = make_bus().queue
    await queue.subscribe(ROLLOUT)
    group = await admit(queue, 0)
    receipt = await queue.take("rollout", "a")
    assert not receipt.is_begun
    first = receipt.lease
    await queue.put(sibling(group, 1), first)
    await queue.release(first)
    receipt = await queue.take("rollout", "b")
    assert receipt.is_begun
    second = receipt.lease
    assert await queue.written(second) == {
        group: ("prompt", "base"),
        f"{group}/1": ("token_ids",),
        f"{group}/1/0": ("span",),
    }
    report = await queue.put(sibling(group, 0) + sibling(group, 1, length=9), second)
    assert report.superseded == (f"{group}/1", f"{group}/1/0")
