"""Device turns on a real loop and on a virtual one: bursts, cancelled calls, moves, refusals, many roles at once."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from relax.core.error import EngineError, InvariantError
from relax.runtime.clock import LoopClock
from relax.runtime.compute import ComputeThread
from relax.runtime.device import DeviceTurns, SharedDevices
from relax.runtime.local import LocalLauncher
from relax.runtime.turn_compute import Turn, TurnCompute, refuse_inside_turn
from relax.simulation.virtual import StandstillError, run_virtual


class Bench:
    """Roles on one device `a` by name, each with calls of virtual length; `seen` is what happened."""

    def __init__(self, *names: str, min_turn_s: float = 5.0) -> None:
        self.seen: list[str] = []
        self.turns = DeviceTurns(LoopClock(), min_turn_s)
        self.computes = {name: self._compute(name) for name in names}
        self.running: str | None = None
        self.fails: set[str] = set()

    def _compute(self, name: str) -> TurnCompute:
        turn = Turn(name, self.turns)
        self.turns.join(name, "a", turn)
        compute = TurnCompute(_Timed(), turn)
        compute.add(_Moves(self, name))
        return compute

    async def call(self, name: str, seconds: float = 1.0) -> None:
        await self.computes[name].run(self._call, name, seconds)

    def _call(self, name: str, seconds: float) -> tuple[str, float]:
        self.seen.append(name)
        return name, seconds

    def moves(self, name: str) -> list[int]:
        measures = self.turns.measures()
        return [int(measures[f"device/{name}/{what}"]) for what in ("onloads", "offloads")]


class _Timed:
    """Core's `Compute` on virtual time: a call takes the seconds that it returns last; moves take one."""

    busy_s = 0.0

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        result = function(*args)
        await asyncio.sleep(result[1] if isinstance(result, tuple) else 1.0)
        return result

    def close(self) -> None: ...


class _Moves:
    def __init__(self, bench: Bench, name: str) -> None:
        self._bench, self._name = bench, name

    def onload(self) -> None:
        self._note("onload")

    def offload(self) -> None:
        self._note("offload")

    def _note(self, what: str) -> None:
        if what in self._bench.fails:
            raise MemoryError("the device is full")
        self._bench.seen.append(f"{what} {self._name}")


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    run_virtual(main(), 1000.0)  # type: ignore[arg-type]


def test_calls_that_follow_one_another_are_one_turn() -> None:
    async def main() -> None:
        bench = Bench("engine", "trainer")

        async def burst(name: str) -> None:
            for _ in range(3):
                await bench.call(name)

        await asyncio.gather(burst("engine"), burst("trainer"))
        calls = [what for what in bench.seen if " " not in what]
        assert calls == ["engine"] * 3 + ["trainer"] * 3
        assert bench.seen[0] == "offload trainer"
        measures = bench.turns.measures()
        assert measures["device/engine/turns"] == measures["device/trainer/turns"] == 1.0
        assert measures["device/engine/held_s"] == 3.0
        assert bench.moves("engine") == [0, 1]
        assert bench.moves("trainer") == [1, 1]
        await bench.turns.close()

    virtual(main)


def test_rule_dt1_a_role_that_waits_for_anything_else_has_no_turn() -> None:
    """The engine waits for the trainer between two calls: with a turn held over that wait nothing would ever happen."""

    async def main() -> None:
        bench = Bench("engine", "trainer", min_turn_s=1e6)
        trained = asyncio.Event()

        async def engine() -> None:
            await bench.call("engine")
            await trained.wait()
            await bench.call("engine")

        async def trainer() -> None:
            await bench.call("trainer")
            trained.set()

        await asyncio.gather(engine(), trainer())
        assert [what for what in bench.seen if " " not in what] == ["engine", "trainer", "engine"]

    virtual(main)


def test_rule_dt1_a_task_that_holds_a_turn_waits_for_no_other_and_not_for_the_bus() -> None:
    async def main() -> None:
        bench = Bench("engine", "trainer")
        async with bench.computes["trainer"].turn:
            await bench.call("trainer")  # its own device is no wait
            with pytest.raises(InvariantError, match=r"\[DT1\] trainer has its device's turn .* the turn of engine"):
                await bench.call("engine")
            with pytest.raises(InvariantError, match=r"\[DT1\] trainer .* wait for bus\.take"):
                refuse_inside_turn("bus.take")
            child = asyncio.create_task(bench.call("engine"))  # another task has a life of its own
            await asyncio.sleep(2.0)
            assert not child.done()
        refuse_inside_turn("bus.take")
        await child

    virtual(main)


def test_rule_dt1_in_strict_mode_every_call_of_a_shared_object_is_checked() -> None:
    class Bus:
        async def take(self) -> str:
            return "rows"

    async def main() -> None:
        bench = Bench("trainer", "engine")
        bus = LocalLauncher(strict=True).wrap("bus", Bus())
        async with bench.computes["trainer"].turn:
            with pytest.raises(InvariantError, match=r"\[DT1\] trainer .* wants to wait for bus\.take"):
                await bus.take()
        assert await bus.take() == "rows"

    virtual(main)


def test_rule_dt3_a_long_burst_gives_the_device_up_between_two_calls() -> None:
    async def main() -> None:
        bench = Bench("engine", "trainer", min_turn_s=2.5)

        async def burst(name: str, count: int) -> None:
            for _ in range(count):
                await bench.call(name)

        await asyncio.gather(burst("engine", 8), burst("trainer", 1))
        assert [what for what in bench.seen if " " not in what] == ["engine"] * 3 + ["trainer"] + ["engine"] * 5
        assert bench.turns.measures()["device/engine/yields"] == 1.0

    virtual(main)


def test_with_a_min_turn_of_0_every_turn_still_makes_a_call() -> None:
    async def main() -> None:
        bench = Bench("engine", "trainer", min_turn_s=0.0)
        await asyncio.gather(*(bench.call(name) for name in ("engine", "trainer") * 5))
        assert sorted(what for what in bench.seen if " " not in what) == ["engine"] * 5 + ["trainer"] * 5

    virtual(main)


def test_a_wait_that_is_cancelled_gives_its_place_up() -> None:
    async def main() -> None:
        bench = Bench("engine", "trainer")
        running = asyncio.create_task(bench.call("engine", 10.0))
        await asyncio.sleep(3.0)
        waiting = asyncio.create_task(bench.call("trainer"))
        await asyncio.sleep(0)
        assert bench.turns.status()["a"]["waiting"] == ["trainer"]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert bench.turns.status()["a"]["waiting"] == []
        await running
        await bench.call("trainer")

    virtual(main)


def test_a_wait_that_is_cancelled_in_the_moment_of_its_grant_leaves_the_device_free() -> None:
    async def main() -> None:
        bench = Bench("engine", "trainer")
        await bench.call("engine")
        turn = bench.computes["trainer"].turn
        waiting = asyncio.create_task(turn.enter())
        granted = turn.granted

        def grant_and_cancel() -> None:
            granted()
            waiting.cancel()

        turn.granted = grant_and_cancel  # type: ignore[method-assign]
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        await bench.call("engine")

    virtual(main)


async def test_a_cancelled_call_keeps_its_turn_until_the_thread_has_ended_it() -> None:
    turns = DeviceTurns(LoopClock())
    computes = []
    for name in ("trainer", "engine"):
        turn = Turn(name, turns)
        turns.join(name, "a", turn)
        computes.append(TurnCompute(ComputeThread(name), turn))
    started, release, seen = threading.Event(), threading.Event(), list[str]()

    def train() -> None:
        started.set()
        release.wait(10)
        seen.append("trained")

    call = asyncio.create_task(computes[0].run(train))
    await asyncio.to_thread(started.wait, 10)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    sampling = asyncio.create_task(computes[1].run(lambda: seen.append("sampled")))
    await asyncio.sleep(0.05)
    assert seen == []
    release.set()
    await sampling
    assert seen == ["trained", "sampled"]
    await turns.close()
    for compute in computes:
        compute.close()


def test_what_cannot_be_moved_refuses_the_turn_with_a_reason() -> None:
    async def main() -> None:
        bench = Bench("engine", "trainer")
        bench.fails = {"offload"}
        with pytest.raises(EngineError, match="engine cannot have its device: offload of trainer failed: MemoryError"):
            await bench.call("engine")
        bench.fails = set()
        await bench.call("engine")

    virtual(main)


def test_members_of_one_holder_compute_side_by_side_and_move_together() -> None:
    async def main() -> None:
        bench = Bench("engine", "trainer")
        second = TurnCompute(_Timed(), bench.computes["engine"].turn)
        second.add(_Moves(bench, "engine-1"))
        began = asyncio.get_running_loop().time()
        await asyncio.gather(bench.call("engine", 4.0), second.run(bench._call, "engine-1", 4.0))
        assert asyncio.get_running_loop().time() - began == pytest.approx(5.0), "one move, then both at once"
        await bench.call("trainer")
        assert bench.seen[-4:] == ["offload engine", "offload engine-1", "onload trainer", "trainer"]

    virtual(main)


def test_after_close_whoever_waits_or_asks_is_refused() -> None:
    async def main() -> None:
        bench = Bench("engine", "trainer")
        running = asyncio.create_task(bench.call("engine", 20.0))
        waiting = asyncio.create_task(bench.call("trainer"))
        await asyncio.sleep(2.0)
        await bench.turns.close()
        with pytest.raises(EngineError, match="trainer cannot have its device: the run has ended"):
            await waiting
        await running
        with pytest.raises(EngineError, match="after the run has ended"):
            await bench.call("trainer")

    virtual(main)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_200_worlds_of_roles_that_call_wait_and_cancel_come_to_their_end(first: int) -> None:
    for seed in range(first, first + 50):
        virtual(lambda seed=seed: _fuzz(Random(seed)))  # type: ignore[misc]


async def _fuzz(random: Random) -> None:
    names = ["engine", "trainer", "reference"][: random.randint(2, 3)]
    bench = Bench(*names, min_turn_s=random.choice((0.0, 1.0, 10.0)))

    async def run(name: str, seconds: float) -> None:
        await bench.call(name, seconds)
        assert [one for one in names if bench.computes[one].turn._is_granted] in ([name], []), "one turn at a time"

    async def role(name: str) -> None:
        for _ in range(random.randint(1, 8)):
            call = asyncio.create_task(run(name, random.choice((0.0, 0.5, 3.0))))
            if random.random() < 0.2:
                await asyncio.sleep(random.choice((0.0, 0.5, 2.0)))
                call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            if random.random() < 0.5:
                await asyncio.sleep(random.choice((0.0, 1.0)))

    await asyncio.gather(*(role(name) for name in names for _ in range(random.randint(1, 2))))
    await asyncio.sleep(50.0)  # calls of cancelled waiters end
    assert bench.turns.status()["a"]["turn"] is None
    await bench.turns.close()


def test_a_turn_that_is_never_given_back_stands_still() -> None:
    """The tests above can fail: a leaked turn is a deadlock that virtual time finds."""

    async def main() -> None:
        bench = Bench("engine", "trainer")
        await bench.computes["engine"].turn.enter()
        await bench.call("trainer")

    with pytest.raises(StandstillError):
        virtual(main)


async def test_roles_get_a_turn_where_they_share_a_device_by_their_own_name_or_their_kind() -> None:
    turns = DeviceTurns(LoopClock())
    devices = {"trainer": "a", "engine": "a", "engine-1": "b", "critic": "b", "judge": "c"}
    shared = SharedDevices(devices, turns)
    inner = {role: _Timed() for role in ("trainer", "engine-0", "engine-1", "engine-2", "judge", "reference")}
    given = {role: shared.compute(role, compute) for role, compute in inner.items()}
    holders = {role: one.turn.holder for role, one in given.items() if isinstance(one, TurnCompute)}
    assert holders == {"trainer": "trainer", "engine-0": "engine", "engine-1": "engine-1", "engine-2": "engine"}
    assert given["judge"] is inner["judge"], "alone on its device"
    assert given["reference"] is inner["reference"], "not named: a device of its own"
    assert turns.status()["a"]["resident"] == ["trainer", "engine"]
    assert [role for role in inner if shared.is_shared(role)] == list(holders)


def test_without_devices_nothing_is_wrapped_and_nothing_moves() -> None:
    shared = SharedDevices({}, DeviceTurns(LoopClock()))
    compute = _Timed()
    assert shared.compute("trainer", compute) is compute
    shared.add("trainer", object())
    assert not shared.is_shared("trainer")
