"""Property: whatever roles do, a bus that is told of places is the same bus: equal index, equal reports, equal cells (TQ4, TQ6, TQ8)."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.bus.row import Receipt, RowPut, Subscription
from relax.core.column import COLUMNS, Column, Scope
from relax.core.error import RelaxError
from relax.core.id import Table, group_id
from tests.bus.conftest import ManualClock
from tests.bus.worlds import World, direct, inline, placed, same

OLD = Column("old_logprobs", Table.sample, "float32", ("T",), Scope.step, "logprobs under version k")
EVERY = COLUMNS | {
    "old_logprobs": OLD,
    "half": Column("half", Table.trajectory, "bfloat16", ("T", "3"), Scope.trajectory, "test"),
    "note": Column("note", Table.trajectory, "str", (), Scope.trajectory, "test", nullable=True),
}
LEASE_S = 7.0
SUBSCRIPTIONS = (
    Subscription("rollout", Table.group, ("prompt",), lease_s=LEASE_S),
    Subscription("reward", Table.trajectory, ("prompt", "token_ids"), lease_s=LEASE_S),
    Subscription("trainer", Table.sample, ("kept", "span", "reward"), unit="group", lease_s=LEASE_S),
)
FETCHED = ["prompt", "media", "kept", "token_ids", "half", "note", "turns", "reward", "span", "old_logprobs"]


class Schedule:
    """One random history, told to every world in lockstep; each outcome is compared with the first world's."""

    def __init__(self, seed: int, worlds: list[World], clock: ManualClock) -> None:
        self.random = random.Random(seed)
        self.worlds, self.clock = worlds, clock
        self.admitted = 0
        self.receipts: list[tuple[int, Receipt]] = []
        self.written: dict[str, dict[str, Any]] = {}
        self.outcomes: dict[str, int] = {}

    async def tell(self, name: str, verb: Callable[[World], Awaitable[Any]]) -> Any:
        """The outcome, which is the same everywhere, errors included."""
        outcomes = []
        for world in self.worlds:
            try:
                outcomes.append(await verb(world))
            except (RelaxError, TimeoutError) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        for world, outcome in zip(self.worlds[1:], outcomes[1:], strict=True):
            assert same(outcome, outcomes[0]) or outcome == outcomes[0], (name, outcome, outcomes[0])
            assert world.state() == self.worlds[0].state(), name
        self.outcomes[name] = self.outcomes.get(name, 0) + (type(outcomes[0]) is not str)
        return outcomes[0]

    async def run(self, steps: int) -> None:
        for subscription in SUBSCRIPTIONS:
            await self.tell("subscribe", lambda world, given=subscription: world.queue.subscribe(given))  # type: ignore[misc]
        verbs = [
            *[self.admit] * 2,
            *[self.take] * 4,
            *[self.put] * 6,
            *[self.fetch] * 3,
            self.end_lease,
            self.end_lease,
        ]
        verbs += [self.end_group, self.time, self.drop, self.reattach, self.read]
        for _ in range(steps):
            await self.random.choice(verbs)()

    async def admit(self) -> None:
        group = group_id(self.admitted)
        self.admitted += 1
        media = None if self.random.random() < 0.5 else bytes(self.random.choice((0, 10, 9000)))
        cells = {"prompt": {"text": "é" * self.random.randrange(4000)}, "base": np.int64(1), "media": media}
        await self.tell("admit", lambda world: world.queue.admit(group, cells, 2, 8, 1000, timeout_s=0))

    async def take(self) -> None:
        face, consumer = self.random.randrange(2), self.random.choice(SUBSCRIPTIONS).consumer
        holder = f"{consumer} {face}"
        rows = self.random.randint(1, 3)
        taken = await self.tell("take", lambda world: world.faces[face].take(consumer, holder, rows, 0))
        if isinstance(taken, Receipt):
            self.receipts.append((face, taken))
            written = await self.tell("written", lambda world: world.faces[face].written(taken.lease))
            assert taken.is_begun == any(
                "/" in row or not {"prompt", "base", "media"}.issuperset(names) for row, names in written.items()
            )
            await self.tell("fetch", lambda world: self._fetched(world.faces[face], taken, None))

    def some_lease(self) -> tuple[int, Receipt] | None:
        return self.random.choice(self.receipts[-4:]) if self.receipts else None

    async def put(self) -> None:
        held = self.some_lease()
        if held is None:
            return
        face, receipt = held
        rows = list(dict.fromkeys((*receipt.ids, *receipt.groups)))
        rows = [below for row in rows for below in self.below(row)]
        count = self.random.randint(1, len(rows))
        chosen = rows[:count] if self.random.random() < 0.8 else self.random.sample(rows, count)
        puts = [self.random_put(row) for row in chosen]
        puts.sort(key=lambda put: put.id.count("/"))
        is_last = self.random.random() < 0.1
        name = "last_put" if is_last else "put"
        await self.tell(name, lambda world: world.faces[face].put(puts, receipt.lease, is_last))

    def below(self, row: str) -> list[str]:
        if row.count("/") == 0:
            return [row, *(f"{row}/{i}" for i in range(2)), *(f"{row}/{i}/0" for i in range(2))]
        return [row, f"{row}/0"] if row.count("/") == 1 else [row]

    def random_put(self, row: str) -> RowPut:
        """Mostly the cells that this row had before, sometimes others or wrong ones."""
        if self.random.random() < 0.8 and row in self.written:
            return RowPut(
                row, dict(self.written[row]), self.random.choice((1,) * 9 + (2,)) if row.count("/") == 1 else None
            )
        length = self.random.choice((0, 1, 5, 2000))
        numbers = np.random.default_rng(self.random.randrange(1 << 30))
        made: list[dict[str, Any]] = [
            {"kept": True},
            {
                "token_ids": numbers.integers(0, 9, length, dtype=np.int32),
                "half": numbers.integers(0, 9, (length, 3), dtype=np.uint16),
                "note": self.random.choice((None, "", "a\0é\ud800", "x\n\ty" * 2000)),
                "turns": [{"text": "t" * self.random.randrange(3000), "n": length}],
                "reward": self.random.choice((None, 0.5, float("nan"), np.float64(2.0))),
            },
            {"span": np.array([0, length]), "old_logprobs": numbers.random(length, dtype=np.float32)},
        ]
        cells = made[row.count("/")]
        cells = {name: cells[name] for name in cells if self.random.random() < 0.7}
        if self.random.random() < 0.02:
            cells["token_ids"] = np.zeros(3)
        self.written.setdefault(row, {}).update(cells)
        return RowPut(row, cells, 1 if row.count("/") == 1 else None)

    async def fetch(self) -> None:
        held = self.some_lease()
        if held is not None:
            face, receipt = held
            columns = self.random.choice((None, FETCHED, ["token_ids"]))
            await self.tell("fetch", lambda world: self._fetched(world.faces[face], receipt, columns))
            await self.tell("written", lambda world: world.faces[face].written(receipt.lease))

    async def _fetched(self, face: Any, receipt: Receipt, columns: list[str] | None) -> Any:
        fetched = await face.fetch(receipt, columns)
        for cells in fetched.cells.values():
            for cell in cells.values():
                assert not isinstance(cell, np.ndarray) or not cell.flags.writeable
        return [list(fetched.ids), {row: dict(sorted(cells.items())) for row, cells in fetched.cells.items()}]

    async def end_lease(self) -> None:
        held = self.some_lease()
        if held is not None:
            face, receipt = held
            verb = self.random.choice(("ack", "ack", "release", "renew"))
            await self.tell(verb, lambda world: getattr(world.faces[face], verb)(receipt.lease))

    async def end_group(self) -> None:
        if self.admitted and self.random.random() < 0.4:
            group = group_id(self.random.randrange(self.admitted))
            verb = self.random.choice(("end", "settle", "settle"))
            await self.tell(
                verb, lambda world: world.queue.end(group) if verb == "end" else world.queue.settle([group])
            )

    async def time(self) -> None:
        self.clock.now += self.random.random() * LEASE_S / 6

        async def expire(world: World) -> None:
            world.queue._expire()

        await self.tell("expire", expire)

    async def drop(self) -> None:
        if self.random.random() < 0.3:
            holder = f"{self.random.choice(SUBSCRIPTIONS).consumer} {self.random.randrange(2)}"
            await self.tell("drop_holder", lambda world: world.queue.drop_holder(holder))

    async def reattach(self) -> None:
        if self.random.random() < 0.3:
            face = self.random.randrange(2)
            holder, held = f"rollout {face}", [receipt.lease for owner, receipt in self.receipts if owner == face]
            await self.tell("reattach", lambda world: world.queue.reattach(holder, held))

    async def read(self) -> None:
        if self.admitted:
            group = group_id(self.random.randrange(self.admitted))

            async def read(world: World) -> Any:
                fetched = await world.queue.read(group)
                return [list(fetched.ids), {row: dict(cells) for row, cells in fetched.cells.items()}]

            await self.tell("read", read)


def play(seed: int, folder: Path, steps: int = 120) -> dict[str, int]:
    async def main() -> dict[str, int]:
        clock = ManualClock()
        worlds = [direct(EVERY, clock), placed(EVERY, clock, folder), inline(EVERY, clock)]
        schedule = Schedule(seed, worlds, clock)
        await schedule.run(steps)
        await World.close_all()
        return schedule.outcomes

    return asyncio.run(main())


@pytest.mark.parametrize("seed", range(40))
def test_rule_tq8_a_put_by_place_is_the_put_itself(seed: int, tmp_path: Path) -> None:
    play(seed, tmp_path)


def test_the_schedules_reach_every_verb(tmp_path: Path) -> None:
    total: dict[str, int] = {}
    for seed in range(12):
        for name, count in play(100 + seed, tmp_path / str(seed)).items():
            total[name] = total.get(name, 0) + count
    verbs = "admit take put last_put fetch written ack release renew end settle expire drop_holder reattach read"
    assert {verb: total.get(verb, 0) for verb in verbs.split() if total.get(verb, 0) < 3} == {}
