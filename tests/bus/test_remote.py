"""The bus from another process: segments of writers, what goes back, what is sent twice, and recovery (TQ2, TQ4, TQ6, TQ8)."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.bus.index import BusIndex
from relax.bus.log import MemoryLog
from relax.bus.place import SegmentGoneError, SegmentMaps
from relax.bus.queue import TransferQueue
from relax.bus.remote import LeaseAccess, QueueAccess, RemoteQueue
from relax.bus.row import AckedError, Places, Receipt, RowPut, Subscription
from relax.bus.segment_storage import SegmentStorage, segment_files
from relax.bus.shared_storage import SharedStorage
from relax.bus.storage import MemoryStorage
from relax.bus.write import rows_from_json
from relax.core.column import COLUMNS
from relax.core.error import InvariantError, LateError, TransportError
from relax.core.event import Event
from relax.core.id import GroupId, Table, group_id
from tests.bus.conftest import ManualClock
from tests.bus.tearing import COLUMNS as EVERY_KIND
from tests.bus.test_segment_storage import ALL, NONE
from tests.bus.worlds import MAX_BYTES, MAX_ROWS, World, inline, placed, same


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await World.close_all()


ROLLOUT = Subscription("rollout", Table.group, ("prompt",), lease_s=10)
REWARD = Subscription("reward", Table.trajectory, ("prompt", "token_ids"), lease_s=10)
SEGMENT = 1 << 14


async def begin(world: World, *subscriptions: Subscription, groups: int = 1) -> list[GroupId]:
    for subscription in subscriptions or (ROLLOUT, REWARD):
        await world.queue.subscribe(subscription)
    return [await admit(world, number) for number in range(groups)]


async def admit(world: World, number: int) -> GroupId:
    group = group_id(number)
    await world.queue.admit(group, {"prompt": {"n": number}, "base": np.int64(0)}, 2, 5, 1000, timeout_s=0)
    return group


def tokens(length: int, first: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(first, first + length, dtype=np.int32)


def trajectory(group: str, sibling: int, length: int = 3, first: int = 0) -> RowPut:
    return RowPut(f"{group}/{sibling}", {"token_ids": tokens(length, first)}, children=0)


def make(tmp_path: Path, columns: Any = COLUMNS) -> World:
    return placed(columns, ManualClock(), tmp_path, SEGMENT)


def numbers(folder: Path) -> list[int]:
    return [number for number, _ in segment_files(folder)]


async def restarted(
    world: World, folder: Path, dump: dict[str, Any] | None = None, after: int = 0, shared: bool = True
) -> World:
    """The next process with the index, as `services.recovery` makes it: from a snapshot's dump and the events behind it."""
    storage = (SharedStorage if shared else SegmentStorage)(world.columns, folder, segment_bytes=SEGMENT)
    storage.scan(0)
    log = MemoryLog(world.clock)
    if dump is None:
        index = BusIndex(world.columns, log, MAX_ROWS, MAX_BYTES)
    else:
        index = BusIndex.load(dump, world.columns, log, MAX_ROWS, MAX_BYTES)
        for tree in dump["groups"].values():
            for row, known in tree["rows"].items():
                adopt(storage, row, known["cells"], dump.get("batches", {}).get(row, {}))
    for event in world.log.events(after):
        follow(storage, index, event)
    storage.end_scan()
    again = World(world.columns, world.clock, storage, index, log)
    again.faces = world.faces
    world.access.queue = again.queue
    for known in index.dump()["subscriptions"]:
        fields = known | {"columns": tuple(known["columns"]), "table": Table(known["table"])}
        await again.queue.subscribe(Subscription(**fields))
    return again


def follow(storage: SegmentStorage, index: BusIndex, event: Event) -> None:
    data = event.data
    if event.kind == "bus/put":
        for row, cells, _ in rows_from_json(data["rows"]):
            adopt(storage, row, cells, dict.fromkeys(cells, data.get("batch")))
    elif event.kind == "bus/admit":
        adopt(storage, data["group"], data["cells"], {})
    for dropped in index.apply(event.kind, event.data).dropped:
        storage.drop(dropped)


def adopt(storage: SegmentStorage, row: str, columns: Any, batches: dict[str, Any]) -> None:
    for column in columns:
        storage.adopt(row, column, batches.get(column))
    if not columns:
        storage.put({row: {}})


# --- cells ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_calls", [False, True])
async def test_rule_tq6_every_kind_of_cell_crosses_exactly_and_read_only(tmp_path: Path, in_calls: bool) -> None:
    columns = COLUMNS | EVERY_KIND
    world = inline(columns, ManualClock()) if in_calls else make(tmp_path, columns)
    writer, reader = world.faces
    (group,) = await begin(world, ROLLOUT, Subscription("all", Table.sample, ("prompt", *ALL), lease_s=10))
    lease = (await writer.take("rollout", "w")).lease
    large = ALL | {"tokens": tokens(5000), "text": "é" * 5000, "blob": bytes(9000), "tree": {"a": ["b" * 5000]}}
    rows = {f"{group}/0/{i}": cells for i, cells in enumerate((ALL, NONE, large))}
    rows[f"{group}/0/1"] = ALL | NONE | {"grid": np.zeros((2, 0), np.float32)}
    await writer.put([RowPut(f"{group}/0", children=3), *(RowPut(row, cells) for row, cells in rows.items())], lease)
    receipt = await reader.take("all", "r", max_rows=8)
    fetched = await reader.fetch(receipt)
    for row, cells in rows.items():
        for name, value in cells.items():
            assert same(fetched.get(row, name), value), (row, name)
    assert fetched.get(f"{group}/0/0", "prompt") == {"n": 0}
    with pytest.raises(ValueError, match="read-only"):
        fetched.get(f"{group}/0/2", "tokens")[0] = 1
    fetched.get(f"{group}/0/2", "tree")["a"].append(1)
    assert (await reader.fetch(receipt, ["tree"])).get(f"{group}/0/2", "tree") == large["tree"]
    assert same((await world.queue.fetch(receipt, list(ALL))).cells[f"{group}/0/2"], {k: large[k] for k in ALL})


async def test_rule_tq6_rows_that_do_not_fit_into_one_message_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    world = inline(COLUMNS, ManualClock())
    writer, reader = world.faces
    await begin(world, ROLLOUT, Subscription("reward", Table.trajectory, ("prompt", "token_ids"), lease_s=10), groups=3)
    for _ in range(3):
        receipt = await writer.take("rollout", "w")
        await writer.put([trajectory(receipt.ids[0], sibling, 100) for sibling in range(2)], receipt.lease)
    receipt = await reader.take("reward", "r", max_rows=6)
    whole = await world.queue.fetch(receipt)
    for limit, calls in ((10_000, 1), (900, 3), (1, 6)):
        monkeypatch.setattr("relax.bus.queue.PART_BYTES", limit)
        world.access.calls.clear()
        fetched = await reader.fetch(receipt)
        assert world.access.calls == ["fetch_part"] * calls
        assert (fetched.ids, same(fetched.cells, whole.cells)) == (whole.ids, True)
    await world.queue.end(group_id(1))
    assert (await reader.fetch(receipt)).ids == tuple(row for row in receipt.ids if not row.startswith("g000001"))


async def test_rule_tq8_cells_of_a_put_do_not_pass_through_the_index(tmp_path: Path) -> None:
    world = make(tmp_path)
    writer, reader = world.faces
    (group,) = await begin(world)
    lease = (await writer.take("rollout", "w")).lease
    source = tokens(20_000)
    await writer.put([trajectory(group, 0, 20_000)], lease)
    source[:] = 0
    receipt = await reader.take("reward", "r")
    one, other = [(await reader.fetch(receipt)).get(f"{group}/0", "token_ids") for _ in "ab"]
    assert np.shares_memory(one, other)
    assert same(one, tokens(20_000))
    assert "put" not in world.access.calls
    assert "fetch" not in world.access.calls


async def test_rule_tq6_the_remote_face_refuses_what_the_queue_refuses_before_it_writes(tmp_path: Path) -> None:
    world = make(tmp_path)
    writer = world.faces[0]
    (group,) = await begin(world)
    lease = (await writer.take("rollout", "w")).lease
    with pytest.raises(InvariantError, match="'token_ids': expected int32"):
        await writer.put([trajectory(group, 0), RowPut(f"{group}/1", {"token_ids": np.zeros(2)})], lease)
    with pytest.raises(InvariantError, match="belongs to table"):
        await writer.put([RowPut(group, {"token_ids": tokens(2)})], lease)
    assert numbers(tmp_path) == [1], "only the prompt's"


async def test_a_bus_in_memory_has_no_segments_for_others_and_says_what_to_do(tmp_path: Path) -> None:
    world = World(COLUMNS, ManualClock(), MemoryStorage(COLUMNS))
    remote = RemoteQueue(world.access, COLUMNS, tmp_path)
    (group,) = await begin(world)
    receipt = await remote.take("rollout", "w")
    assert (await remote.fetch(receipt)).get(group, "prompt") == {"n": 0}
    with pytest.raises(InvariantError, match=r"\[TQ8\].*shared=True.*without a directory"):
        await remote.put([trajectory(group, 0)], receipt.lease)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("token_ids\t<i4\t9", 1 << 40),
        ("token_ids\t<i4\t9999", 1 << 40),
        ("token_ids\t<i4", 0),
        ("token_ids\tnope\t9", 0),
        ("token_ids\tstr\t9", 1 << 40),
    ],
)
async def test_a_place_that_is_wrong_is_a_typed_error_that_names_the_file(
    tmp_path: Path, text: str, start: int
) -> None:
    world = make(tmp_path)
    await begin(world)
    with pytest.raises(TransportError, match=r"rows-00000001.arrow does not hold"):
        SegmentMaps(tmp_path).read(1, text, start)
    with pytest.raises(TransportError, match=r"rows-00000001.arrow does not hold"):
        SegmentMaps(tmp_path).fetch(Places(["g"], [1], [text], [start], [None]), {})
    with pytest.raises(SegmentGoneError, match=r"rows-00000009.arrow cannot be mapped"):
        SegmentMaps(tmp_path).read(9, text, start)


async def test_the_first_fetch_of_a_take_asks_nobody_and_the_next_does(tmp_path: Path) -> None:
    world = make(tmp_path)
    reader = world.faces[0]
    (group,) = await begin(world)
    receipt = await reader.take("rollout", "r")
    assert (await reader.fetch(receipt)).get(group, "prompt") == {"n": 0}
    assert world.access.calls == ["take_located"]
    await world.queue.end(group)
    with pytest.raises(LateError):
        await reader.fetch(receipt)


async def test_several_leases_come_in_one_call_with_their_cells(tmp_path: Path) -> None:
    world = make(tmp_path)
    reader = world.faces[0]
    groups = await begin(world, groups=4)
    receipts = await reader.take_each("rollout", "r", 3)
    assert [(await reader.fetch(receipt)).get(receipt.ids[0], "prompt") for receipt in receipts] == [
        {"n": number} for number in range(3)
    ]
    assert world.access.calls == ["take_each_located"]
    assert reader.held == {receipt.lease for receipt in receipts}
    await reader.ack(receipts[1].lease)
    world.storage.drop(groups[3])
    await world.queue.release(receipts[0].lease)
    with pytest.raises(TransportError, match="is not in the segments"):
        await world.faces[1].take_each("rollout", "s", 3)
    assert set(world.state()["leases"]) == {receipts[2].lease}, "what could be located goes back too"


async def test_rule_tq2_several_leases_whose_answer_was_lost_go_back(tmp_path: Path) -> None:
    world = make(tmp_path)
    reader = world.faces[0]
    await begin(world, groups=4)
    world.access.lose_answers = frozenset(("take_each_located",))
    receipts = await reader.take_each("rollout", "r", 2)
    assert len(world.state()["leases"]) == 4
    await reader.reattach()
    assert set(world.state()["leases"]) == {receipt.lease for receipt in receipts}


async def test_where_cells_go_in_the_answers_leases_come_one_by_one() -> None:
    world = inline(COLUMNS, ManualClock())
    await begin(world, groups=3)
    assert len(await world.faces[0].take_each("rollout", "r", 3)) == 1


async def test_rule_tq2_rows_that_cannot_be_located_are_not_leased(tmp_path: Path) -> None:
    world = make(tmp_path)
    (group,) = await begin(world)
    world.storage.drop(group)
    with pytest.raises(TransportError, match="is not in the segments"):
        await world.faces[0].take("rollout", "r")
    assert world.state()["leases"] == {}


# --- leases -----------------------------------------------------------------------------------------------------------


async def test_rule_tq4_verbs_may_be_sent_twice(tmp_path: Path) -> None:
    world = make(tmp_path)
    writer, reader = world.faces
    (group,) = await begin(world)
    world.access.lose_answers = frozenset(("commit", "ack", "release", "renew", "open_segment", "reattach"))
    receipt = await writer.take("rollout", "w")
    report = await writer.put([trajectory(group, 0), trajectory(group, 1, 5000)], receipt.lease)
    assert (report.late, report.superseded) == ((), ())
    puts = [event for event in world.log.events() if event.kind == "bus/put" and event.data["rows"]["ids"]]
    assert len(puts) == 1, "the second time is a no-op"
    await writer.renew(receipt.lease)
    await writer.reattach()
    await writer.ack(receipt.lease)
    assert writer.held == set()
    given_back = await reader.take("reward", "r", max_rows=2)
    await reader.release(given_back.lease)
    assert (await reader.take("reward", "r", max_rows=2)).ids == given_back.ids


@pytest.mark.parametrize("verb", ["commit", "put"])
async def test_rule_tq4_a_last_put_whose_answer_was_lost_comes_out_as_done(tmp_path: Path, verb: str) -> None:
    """Also when the process was cut off meanwhile and learned that it has the lease no more; only who had it may believe so."""
    world = make(tmp_path) if verb == "commit" else inline(COLUMNS, ManualClock())
    writer, other = world.faces
    (group,) = await begin(world)
    lease = (await writer.take("rollout", "w")).lease
    puts = [trajectory(group, 0), trajectory(group, 1, 5000)]
    call, answers = getattr(world.queue, verb), []

    async def lost(*args: Any) -> Any:
        answers.append(await call(*args))
        await writer.reattach()
        return await call(*args)

    setattr(world.queue, verb, lost)
    assert (await writer.put(puts, lease, is_last=True)).late == ()
    assert len(answers) == 1
    assert (writer.held, writer._lost) == (set(), set())
    assert (await other.take("reward", "r", max_rows=2)).ids == (f"{group}/0", f"{group}/1")
    for face in world.faces:
        with pytest.raises(AckedError):
            await face.put(puts, lease, is_last=True)


async def test_rule_tq4_a_last_put_is_done_also_when_its_rows_have_left_before_it_is_sent_again(tmp_path: Path) -> None:
    world = make(tmp_path)
    storage: Any = world.storage
    writer, reader = world.faces
    (group,) = await begin(world)
    lease = (await writer.take("rollout", "w")).lease
    commit = world.queue.commit

    async def lost(*args: Any) -> Any:
        await commit(*args)
        await reader.ack((await reader.take("reward", "r", max_rows=2)).lease)
        await world.queue.settle([group])
        await world.queue.drop_holder("one")
        storage.prune(storage.rotate())
        await writer.reattach()
        return await commit(*args)

    world.queue.commit = lost  # type: ignore[method-assign]
    assert await writer.put([trajectory(group, 0), trajectory(group, 1)], lease, is_last=True)
    assert writer.held == set()


async def test_rule_tq4_an_ack_of_an_acked_lease_is_late_and_says_so(tmp_path: Path) -> None:
    world = make(tmp_path)
    writer, other = world.faces
    await begin(world)
    lease = (await writer.take("rollout", "w")).lease
    await writer.ack(lease)
    for queue in (writer, other, world.queue):
        with pytest.raises(AckedError, match="acked"):
            await queue.ack(lease)


async def test_rule_tq4_the_same_again_by_another_writer_is_a_no_op_and_other_content_is_left_out(
    tmp_path: Path,
) -> None:
    world = make(tmp_path)
    one, two = world.faces
    (group,) = await begin(world)
    first = (await one.take("rollout", "w")).lease
    await one.put([trajectory(group, 0, 5000)], first)
    with pytest.raises(InvariantError, match="TQ4"):
        await one.put([trajectory(group, 0, 5000, first=1)], first)
    await one.release(first)
    second = (await two.take("rollout", "v")).lease
    before = world.state()["groups"]
    assert await two.put([trajectory(group, 0, 5000)], second)
    assert world.state()["groups"] == before
    report = await two.put([trajectory(group, 0, 5000, first=1), trajectory(group, 1)], second)
    assert report.superseded == (f"{group}/0",)
    receipt = await two.take("reward", "r", max_rows=2)
    assert same((await two.fetch(receipt)).get(f"{group}/0", "token_ids"), tokens(5000))


async def test_rule_tq2_what_a_holder_does_not_have_goes_back_and_what_it_lost_is_late(tmp_path: Path) -> None:
    world = make(tmp_path)
    writer, other = world.faces
    groups = await begin(world, groups=4)
    kept, lost = [await writer.take("rollout", "w") for _ in "ab"]
    unknown = await world.queue.take("rollout", "w")  # its answer never came
    foreign = await other.take("rollout", "o")
    await world.queue.release(lost.lease)
    world.clock.now += 8.0  # type: ignore[attr-defined]
    await writer.reattach()
    assert writer.held == {kept.lease}
    assert set(world.state()["leases"]) == {kept.lease, foreign.lease}
    world.clock.now += 8.0  # type: ignore[attr-defined]
    world.queue._expire()
    assert set(world.state()["leases"]) == {kept.lease}, "renewed by the reattach"
    before = len(world.access.calls)
    for verb in (writer.renew(lost.lease), writer.ack(lost.lease), writer.put([trajectory(groups[1], 0)], lost.lease)):
        with pytest.raises(LateError, match="cut off"):
            await verb
    await writer.release(lost.lease)
    assert len(world.access.calls) == before, "nobody is asked: the number may be another's by now"
    assert unknown.ids == (groups[2],)


async def test_rule_tq2_a_lease_of_another_holder_is_not_ours_by_saying_so(tmp_path: Path) -> None:
    world = make(tmp_path)
    await begin(world)
    lease = (await world.faces[0].take("rollout", "w")).lease
    assert await world.queue.reattach("thief", [lease]) == ()
    assert await world.queue.reattach("w", [lease]) == (lease,)


async def test_rule_tq2_a_lease_that_was_on_its_way_to_a_cancelled_take_goes_back(tmp_path: Path) -> None:
    world = make(tmp_path)
    writer = world.faces[0]
    (group,) = await begin(world)

    class Slow:
        async def take_located(self, *args: Any) -> Receipt:
            await world.queue.take(*args)
            return await asyncio.Future()

    writer._access, access = Slow(), writer._access
    take = asyncio.create_task(writer.take("rollout", "w"))
    await asyncio.sleep(0)
    take.cancel()
    with pytest.raises(asyncio.CancelledError):
        await take
    writer._access = access
    assert len(world.state()["leases"]) == 1
    assert (await writer.take("rollout", "w", timeout_s=0)).ids == (group,)


async def test_rule_tq2_a_restart_keeps_the_leases_of_holders_that_live_on(tmp_path: Path) -> None:
    world = make(tmp_path)
    await begin(world, groups=2)
    living = await world.faces[0].take("rollout", "lives")
    await world.faces[1].take("rollout", "dies")
    again = await restarted(world, tmp_path)
    again.queue._index.release_all("the process ended", lambda holder: holder == "lives", now=100.0)
    assert list(again.state()["leases"]) == [living.lease]
    assert again.queue._index.next_deadline() == 110.0
    assert again.log.last_number == 2, "both changes are events"
    assert BusIndex.replay(
        [*world.log.events(), *again.log.events()], COLUMNS, again.log, MAX_ROWS, MAX_BYTES
    ).state() == (again.state())


# --- segments ---------------------------------------------------------------------------------------------------------


async def fill(world: World, face: Any, first: int, count: int) -> list[GroupId]:
    """Groups with one trajectory of 6 KB each, acked by the reader: ready to settle."""
    groups = []
    for number in range(first, first + count):
        group = await admit(world, number)
        lease = (await face.take("rollout", "w")).lease
        await face.put([trajectory(group, 0, 1500)], lease)
        await face.ack(lease)
        await face.ack((await face.take("reward", "r")).lease)
        groups.append(group)
    return groups


async def test_rule_tq8_segments_of_others_go_when_their_rows_have_left_and_not_while_they_grow(tmp_path: Path) -> None:
    world = make(tmp_path)
    storage: Any = world.storage
    writer = world.faces[0]
    await begin(world, groups=0)
    groups = await fill(world, writer, 0, 5)
    own = writer._own.number
    assert len(numbers(tmp_path)) == 4, "two of the writer's are full, one grows; the prompts are in the bus's own"
    mark = storage.rotate()
    await world.queue.settle(groups)
    storage.prune(mark)
    assert len(numbers(tmp_path)) == 4, "the snapshot may need them"
    storage.prune(storage.rotate())
    assert numbers(tmp_path) == [own], "it may still grow"
    (group,) = await fill(world, writer, 9, 1)
    assert writer._own.number == own
    await world.queue.drop_holder("one")
    storage.prune(storage.rotate())
    assert own in numbers(tmp_path), "a row lives in it"
    await world.queue.settle([group])
    storage.prune(storage.rotate())
    assert numbers(tmp_path) == []
    await writer.close()


async def test_rule_tq6_views_stay_readable_after_the_segment_is_deleted(tmp_path: Path) -> None:
    world = make(tmp_path)
    storage: Any = world.storage
    writer, reader = world.faces
    await begin(world, groups=0)
    group = await admit(world, 0)
    lease = (await writer.take("rollout", "w")).lease
    await writer.put([trajectory(group, 0, 5000)], lease)
    await writer.ack(lease)
    receipt = await reader.take("reward", "r")
    view = (await reader.fetch(receipt)).get(f"{group}/0", "token_ids")
    await reader.ack(receipt.lease)
    await world.queue.settle([group])
    await world.queue.drop_holder("one")
    storage.prune(storage.rotate())
    assert numbers(tmp_path) == []
    await fill(world, writer, 1, 3)  # the reader maps others meanwhile
    gc.collect()
    assert same(view, tokens(5000))


async def test_a_reader_lets_go_of_segments_that_were_deleted(tmp_path: Path) -> None:
    world = make(tmp_path)
    storage: Any = world.storage
    writer, reader = world.faces
    await begin(world, groups=0)
    for number in range(12):
        group = await admit(world, number)
        lease = (await writer.take("rollout", "w")).lease
        await writer.put([trajectory(group, 0, 3000)], lease)
        await writer.ack(lease)
        receipt = await reader.take("reward", "r")
        await reader.fetch(receipt)
        await reader.ack(receipt.lease)
        await world.queue.settle([group])
        storage.prune(storage.rotate())
        assert len(reader._maps) <= 3


async def test_rule_tq8_a_put_whose_segment_was_deleted_is_written_again(tmp_path: Path) -> None:
    """As after a resume without the journal: the bus begins anew and deletes what was there, while the writer lives on."""
    world = make(tmp_path)
    writer, reader = world.faces
    (group,) = await begin(world)
    lease = (await writer.take("rollout", "w")).lease
    await writer.put([trajectory(group, 0)], lease)
    old = writer._own.number
    storage = SharedStorage(COLUMNS, tmp_path, segment_bytes=SEGMENT)
    storage.discard()
    fresh = World(COLUMNS, world.clock, storage)
    fresh.faces, world.access.queue = world.faces, fresh.queue
    await writer.reattach()
    assert writer.held == set()
    (group,) = await begin(fresh)
    receipt = await writer.take("rollout", "w")
    await writer.put([trajectory(group, 0, 5000), trajectory(group, 1)], receipt.lease)
    assert writer._own.number > old, "a number is never used again"
    await writer.ack(receipt.lease)
    taken = await reader.take("reward", "r", max_rows=2)
    assert same((await reader.fetch(taken)).get(f"{group}/0", "token_ids"), tokens(5000))

    async def always_gone(*args: Any) -> None:
        return None

    writer._commit = always_gone
    with pytest.raises(TransportError, match="lost the segments of 'one' 3 times"):
        await writer.put([trajectory(group, 0)], taken.lease)


async def test_a_writer_never_empties_a_file_that_is_there(tmp_path: Path) -> None:
    world = make(tmp_path)
    await begin(world)
    lease = (await world.faces[0].take("rollout", "w")).lease
    (tmp_path / "rows-00000002.arrow").write_bytes(b"somebody's")
    with pytest.raises(Exception, match=r"rows-00000002.arrow"):
        await world.faces[0].put([trajectory("g000000", 0)], lease)
    assert (tmp_path / "rows-00000002.arrow").read_bytes() == b"somebody's"


async def test_puts_at_the_same_time_share_one_segment_and_one_opening(tmp_path: Path) -> None:
    world = make(tmp_path)
    writer = world.faces[0]
    groups = await begin(world, groups=6)
    leases = [(await writer.take("rollout", "w")).lease for _ in groups]
    await asyncio.gather(
        *(writer.put([trajectory(group, 0, 20)], lease) for group, lease in zip(groups, leases, strict=True))
    )
    assert world.access.calls.count("open_segment") == 1


# --- recovery ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
async def test_rule_tq8_placed_rows_come_back_from_events_and_from_a_snapshot(tmp_path: Path, shared: bool) -> None:
    world = make(tmp_path)
    writer = world.faces[0]
    groups = await begin(world, groups=3)
    leases = [(await writer.take("rollout", "w")).lease for _ in groups]
    await writer.put([trajectory(groups[0], 0, 5000), trajectory(groups[0], 1, 0)], leases[0])
    await world.queue.put([trajectory(groups[1], 0, 5000)], leases[1])  # a role beside the index
    dump, number = world.queue.dump(), world.log.last_number
    await writer.put([trajectory(groups[1], 1, 7)], leases[1])
    for snapshot, after in ((None, 0), (dump, number)):
        again = await restarted(world, tmp_path, snapshot, after, shared)
        assert again.state() == world.state()
        for group in groups:
            assert same((await again.queue.read(group)).cells, (await world.queue.read(group)).cells)
        # And once more from a snapshot of that process: it still names where the cells are.
        third = await restarted(again, tmp_path, again.queue.dump(), again.log.last_number, shared)
        assert same((await third.queue.read(groups[0])).cells, (await world.queue.read(groups[0])).cells)
        third.storage.close()  # type: ignore[attr-defined]


async def test_rule_tq4_what_was_refused_is_never_adopted(tmp_path: Path) -> None:
    world = make(tmp_path)
    one, two = world.faces
    (group,) = await begin(world)
    first = (await one.take("rollout", "w")).lease
    await one.put([trajectory(group, 0, 5000)], first)
    with pytest.raises(InvariantError, match="TQ4"):  # behind it in the same segment
        await one.put([trajectory(group, 0, 5000, first=1)], first)
    await one.release(first)
    second = (await two.take("rollout", "v")).lease
    await two.put([trajectory(group, 0, 5000, first=2), trajectory(group, 1)], second)
    with pytest.raises(LateError):
        await one.put([trajectory(group, 1, 3, first=9)], first)
    again = await restarted(world, tmp_path)
    cells = (await again.queue.read(group)).cells
    assert same(cells[f"{group}/0"]["token_ids"], tokens(5000))
    assert same(cells[f"{group}/1"]["token_ids"], tokens(3))


async def test_rule_tq8_a_cell_that_the_bus_itself_wrote_is_never_taken_from_a_segment_of_others(
    tmp_path: Path,
) -> None:
    world = make(tmp_path)
    writer = world.faces[0]
    (group,) = await begin(world)
    first = (await writer.take("rollout", "w")).lease
    await world.queue.put([trajectory(group, 0, 5000)], first)
    with pytest.raises(InvariantError):
        await writer.put([trajectory(group, 0, 5000, first=1)], first)
    again = await restarted(world, tmp_path)
    cells = (await again.queue.read(group)).cells
    assert same(cells[f"{group}/0"]["token_ids"], tokens(5000))


async def test_rule_tq8_a_missing_segment_is_named(tmp_path: Path) -> None:
    world = make(tmp_path)
    writer = world.faces[0]
    (group,) = await begin(world)
    lease = (await writer.take("rollout", "w")).lease
    await writer.put([trajectory(group, 0)], lease)
    os.unlink(tmp_path / f"rows-{writer._own.number:08d}.arrow")
    with pytest.raises(
        TransportError, match=r"row 'g000000/0': the journal's segment 2 does not hold its cell 'token_ids'"
    ):
        await restarted(world, tmp_path)


async def test_rule_tq8_a_writer_goes_on_with_its_segment_after_the_index_restarted(tmp_path: Path) -> None:
    world = make(tmp_path)
    writer, reader = world.faces
    gone, group = await begin(world, groups=2)
    leases = [(await writer.take("rollout", "w")).lease for _ in "ab"]
    await writer.put([trajectory(gone, 0, 300)], leases[0])
    own = writer._own.number
    again = await restarted(world, tmp_path)
    again.queue._index.release_all("ended", lambda holder: True, 0.0)
    storage: Any = again.storage
    await writer.reattach()
    assert writer.held == set(leases)
    await again.queue.end(gone)
    for _ in range(3):
        storage.prune(storage.rotate())
    assert own in numbers(tmp_path), "no row lives in it, and it may still grow"
    await writer.put([trajectory(group, 0, 300), trajectory(group, 1, 300)], leases[1])
    assert writer._own.number == own
    taken = await reader.take("reward", "r", max_rows=2)
    assert same((await reader.fetch(taken)).get(f"{group}/1", "token_ids"), tokens(300))


@pytest.mark.parametrize("shared", [True, False])
async def test_rule_tq10_a_step_cell_that_is_written_again_elsewhere_comes_back_from_there(
    tmp_path: Path, columns: Any, shared: bool
) -> None:
    world = make(tmp_path, columns)
    one, two = world.faces
    (group,) = await begin(world, ROLLOUT, Subscription("trainer", Table.sample, ("span",), unit="group", lease_s=10))
    lease = (await one.take("rollout", "w")).lease
    span = RowPut(f"{group}/0/0", {"span": np.array([0, 3])})
    others = [RowPut(f"{group}/0", children=1), span, RowPut(f"{group}/1", children=0)]
    await one.put(others, lease)
    for face, value in ((one, 1.0), (two, 2.0), (world.queue, 3.0), (one, 4.0)):
        taken = await face.take("trainer", "t")
        old = np.full(3, value, np.float32)
        await face.put([RowPut(f"{group}/0/0", {"old_logprobs": old})], taken.lease)
        for snapshot in (None, world.queue.dump()):
            after = 0 if snapshot is None else world.log.last_number
            again = await restarted(world, tmp_path, snapshot, after, shared)
            third = await restarted(again, tmp_path, again.queue.dump(), again.log.last_number, shared)
            for one_of_them in (again, third):
                cells = (await one_of_them.queue.read(group)).cells
                assert same(cells[f"{group}/0/0"]["old_logprobs"], old)
                one_of_them.storage.close()  # type: ignore[attr-defined]
            world.access.queue = world.queue
        await face.release(taken.lease)


async def test_rule_tq10_a_step_cell_that_a_local_run_writes_after_a_remote_one_is_its_own(
    tmp_path: Path, columns: Any
) -> None:
    """A run of several processes is resumed in one."""
    world = make(tmp_path, columns)
    remote = world.faces[0]
    (group,) = await begin(world, ROLLOUT, Subscription("trainer", Table.sample, ("span",), unit="group", lease_s=10))
    lease = (await remote.take("rollout", "w")).lease
    row = f"{group}/0/0"
    others = [RowPut(f"{group}/0", children=1), RowPut(f"{group}/1", children=0)]
    await remote.put([*others, RowPut(row, {"span": np.array([0, 3])})], lease)
    taken = await remote.take("trainer", "t")
    await remote.put([RowPut(row, {"old_logprobs": np.full(3, 1, np.float32)})], taken.lease)
    local = await restarted(world, tmp_path, shared=False)
    await local.queue.release(taken.lease)
    taken = await local.queue.take("trainer", "t")
    old = np.full(3, 2, np.float32)
    await local.queue.put([RowPut(row, {"old_logprobs": old})], taken.lease)
    third = await restarted(local, tmp_path, local.queue.dump(), local.log.last_number, shared=False)
    assert same((await third.queue.read(group)).cells[row]["old_logprobs"], old)


def test_the_queue_has_every_verb_that_a_remote_queue_asks_for() -> None:
    asked = {name for protocol in (LeaseAccess, QueueAccess) for name in vars(protocol) if not name.startswith("_")}
    assert asked >= {"take", "commit", "locate", "fetch_part", "reattach"}
    assert all(asyncio.iscoroutinefunction(getattr(TransferQueue, name)) for name in asked)
