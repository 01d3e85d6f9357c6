"""The virtual loop: timers in order, time that jumps, deadlocks that are found, real waits that are refused."""

import asyncio
import threading
import time

import pytest

from relax.simulation.virtual import RealWaitError, StandstillError, VirtualCompute, VirtualLoop, run_virtual


def test_time_jumps_and_timers_fire_in_order() -> None:
    fired: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        fired.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(wait("year", 3.2e7), wait("second", 1.0), wait("minute", 60.0), wait("again", 60.0))

    began = time.monotonic()
    run_virtual(main())
    assert fired == [("second", 1.0), ("minute", 60.0), ("again", 60.0), ("year", 3.2e7)]
    assert time.monotonic() - began < 30  # a year passed


def test_a_timeout_fires_on_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 600.0


def test_a_deadlock_is_an_error_that_names_every_waiting_task() -> None:
    async def role() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(role(), name="the reward role")
        await task

    with pytest.raises(StandstillError, match=r"deadlock at 0\.000 s.*the reward role at .*role:\d+ > Event\.wait"):
        run_virtual(main())


def test_time_without_progress_is_an_error() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for _ in range(5):
            await asyncio.sleep(9.0)
            loop.progress()
        await asyncio.sleep(11.0)

    with pytest.raises(StandstillError, match=r"no progress since 45\.000 s"):
        run_virtual(main(), patience_s=10.0)


def test_a_thread_is_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.sleep, 0.0)

    with pytest.raises(RealWaitError, match="wants a thread"):
        run_virtual(main())


def test_a_subprocess_is_refused() -> None:
    async def main() -> None:
        await asyncio.create_subprocess_exec("true")

    with pytest.raises(RealWaitError, match="subprocess"):
        run_virtual(main())


def test_a_file_descriptor_is_refused() -> None:
    async def main() -> None:
        asyncio.get_running_loop().add_reader(0, print)

    with pytest.raises(RealWaitError, match="reading"):
        run_virtual(main())


def test_a_call_from_another_thread_is_refused() -> None:
    refused: list[Exception] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RealWaitError as error:
                refused.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    run_virtual(main())
    assert len(refused) == 1


def test_what_is_left_running_is_cancelled_and_the_first_error_comes_out() -> None:
    ended: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def main() -> None:
        task = asyncio.create_task(endless())
        await asyncio.sleep(1.0)
        raise ValueError(f"first {task.done()}")

    with pytest.raises(ValueError, match="first False"):
        run_virtual(main())
    assert ended == ["cancelled"]


def test_a_virtual_compute_runs_calls_one_at_a_time_in_order() -> None:
    async def main() -> tuple[list[tuple[str, float]], float]:
        durations = iter([2.0, 1.0])
        compute, done = VirtualCompute(lambda: next(durations)), list[tuple[str, float]]()

        def note(name: str) -> None:
            done.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(compute.run(note, "slow"), compute.run(note, "quick"))
        return done, compute.busy_s

    assert run_virtual(main()) == ([("slow", 2.0), ("quick", 3.0)], 3.0)
