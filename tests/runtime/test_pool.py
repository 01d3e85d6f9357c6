"""The process pool against code that is slow, greedy, broken or hostile."""

import asyncio
import importlib
import math
import operator
import os
import pickle
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relax.core.error import LimitError, TaskError, UserError
from relax.core.protocol import Limits
from relax.runtime.config import LocalConfig
from relax.runtime.pool import ProcessPool, build_pool

LIMITS = Limits(time_s=20.0)
SHORT = Limits(time_s=0.3)


@pytest.fixture
def calls() -> Any:
    return importlib.import_module("pool_calls")


@pytest.fixture
async def pool() -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(2)
    yield pool
    await pool.close()


async def until_there(*paths: Path) -> None:
    while not all(path.exists() for path in paths):  # noqa: ASYNC110 - another process writes them
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("value", [None, True, 0, -(2**70), 1.5, "text é", [1, [2.5, None]], {"a": {"b": []}}])
async def test_plain_values_come_back_exactly(pool: ProcessPool, value: Any) -> None:
    result = await pool.run(operator.itemgetter(0), [value], limits=LIMITS)
    assert result == value
    assert type(result) is type(value)


async def test_non_finite_floats_come_back(pool: ProcessPool) -> None:
    result = await pool.run(list, [math.inf, math.nan], limits=LIMITS)
    assert result[0] == math.inf
    assert math.isnan(result[1])


@pytest.mark.parametrize(
    ("expression", "path"), [("{1}", "result"), ("[{'a': b''}]", "[0]['a']"), ("{1: 2}", "result")]
)
async def test_other_results_are_refused_with_their_path(pool: ProcessPool, expression: str, path: str) -> None:
    with pytest.raises(TaskError, match="returns None, bool, int") as caught:
        await pool.run(eval, expression, limits=LIMITS)
    assert path in str(caught.value)


async def test_an_exception_comes_back_with_type_message_and_traceback(pool: ProcessPool) -> None:
    with pytest.raises(TaskError, match=r"loads raised JSONDecodeError: Expecting value") as caught:
        await pool.run(importlib.import_module("json").loads, "nonsense", limits=LIMITS)
    assert "json/decoder.py" in caught.value.__notes__[0]


@pytest.mark.parametrize("function", [lambda: 1, threading.Lock().acquire])
async def test_case_h6_what_cannot_be_pickled_is_refused_before_sending(pool: ProcessPool, function: Any) -> None:
    with pytest.raises(UserError, match="cannot be sent to a process"):
        await pool.run(function, limits=LIMITS)


async def test_rule_se3_a_call_over_its_time_dies_with_its_whole_tree(
    pool: ProcessPool, calls: Any, tmp_path: Path
) -> None:
    with pytest.raises(LimitError, match=r"spawn_tree ran longer than 0\.3 s"):
        await pool.run(calls.spawn_tree, str(tmp_path / "mark"), limits=SHORT)
    assert await pool.run(calls.leave_grandchild, str(tmp_path / "mark"), limits=LIMITS) == "done"
    await asyncio.sleep(1.3)
    assert not (tmp_path / "mark").exists()
    assert pool.killed == 1


async def test_rule_se3_the_tree_dies_without_namespaces_too(calls: Any, tmp_path: Path) -> None:
    pool = ProcessPool(unsafe_without_isolation=True)
    try:
        with pytest.raises(LimitError):
            await pool.run(calls.spawn_tree, str(tmp_path / "mark"), limits=SHORT)
        assert await pool.run(calls.leave_grandchild, str(tmp_path / "mark"), limits=LIMITS) == "done"
        assert await pool.run(operator.add, 1, 2, limits=LIMITS) == 3
        await asyncio.sleep(1.3)
        assert not (tmp_path / "mark").exists()
    finally:
        await pool.close()


async def test_case_h2_a_slow_call_delays_nobody_and_capacity_comes_back(pool: ProcessPool) -> None:
    slow = asyncio.create_task(pool.run(time.sleep, 3600, limits=Limits(time_s=3600.0)))
    await asyncio.sleep(0)
    sums = await asyncio.gather(*(pool.run(operator.add, i, i, limits=LIMITS) for i in range(63)))
    assert sums == [2 * i for i in range(63)]
    assert not slow.done()
    slow.cancel()
    with pytest.raises(LimitError):
        await pool.run(time.sleep, 60, limits=Limits(time_s=0.5))
    processes = await asyncio.gather(*(pool.run(time.sleep, 0.2, limits=LIMITS) for _ in range(2)))
    assert processes == [None, None]
    assert pool.killed == 1


async def test_case_h2_close_does_not_wait_for_a_stuck_call(pool: ProcessPool, calls: Any, tmp_path: Path) -> None:
    begun = [tmp_path / str(number) for number in range(5)]
    stuck = [asyncio.create_task(pool.run(calls.stay, str(path), limits=Limits(time_s=3600))) for path in begun]
    await until_there(*begun[:2])
    await asyncio.wait_for(pool.close(), 60.0)
    errors = await asyncio.gather(*stuck, return_exceptions=True)
    assert [type(error) for error in errors] == [TaskError] * 5
    assert {str(error) for error in errors} == {
        "the process pool was closed while stay ran",
        "the process pool is closed; stay was not called",
    }
    with pytest.raises(TaskError, match="pool is closed"):
        await pool.run(operator.add, 1, 2, limits=LIMITS)


async def test_close_ends_workers_that_are_just_starting() -> None:
    pool = ProcessPool()
    call = asyncio.create_task(pool.run(operator.add, 1, 2, limits=LIMITS))
    await asyncio.sleep(0.001)
    await pool.close()
    with pytest.raises(TaskError, match="closed"):
        await call


async def test_memory_is_bounded(pool: ProcessPool) -> None:
    with pytest.raises(LimitError, match="more than 268435456 bytes of memory"):
        await pool.run(bytearray, 1 << 29, limits=Limits(time_s=20.0, memory_bytes=1 << 28))
    assert await pool.run(operator.add, 1, 2, limits=LIMITS) == 3


async def test_a_result_over_the_limit_is_refused(pool: ProcessPool) -> None:
    with pytest.raises(LimitError, match="at most 1048576 are accepted"):
        await pool.run(operator.mul, "x", 1 << 21, limits=LIMITS)


async def test_files_and_core_dumps_are_bounded(calls: Any, tmp_path: Path) -> None:
    pool = ProcessPool(max_file_bytes=1000)
    try:
        await pool.run(calls.write_file, str(tmp_path / "small"), 1000, limits=LIMITS)
        with pytest.raises(TaskError):
            await pool.run(calls.write_file, str(tmp_path / "large"), 1001, limits=LIMITS)
        assert (tmp_path / "small").stat().st_size == 1000
        assert (tmp_path / "large").stat().st_size <= 1000
        assert await pool.run(calls.core_limit, limits=LIMITS) == [0, 0]
    finally:
        await pool.close()


@pytest.mark.parametrize(("name", "code"), [("segfault", -11), ("exit", 3)])
async def test_a_crash_is_a_task_error_and_the_next_call_works(
    pool: ProcessPool, calls: Any, name: str, code: int
) -> None:
    function, args = (calls.segfault, ()) if name == "segfault" else (os._exit, (3,))
    with pytest.raises(TaskError, match=rf"died without an answer \(exit code {code};"):
        await pool.run(function, *args, limits=LIMITS)
    assert pool.crashed == 1
    assert await pool.run(operator.add, 1, 2, limits=LIMITS) == 3


async def test_rule_se3_there_is_no_network_unless_asked(pool: ProcessPool, calls: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(TaskError, match="Network is unreachable"):
            await pool.run(calls.connect, port, limits=LIMITS)
        asked = asyncio.create_task(pool.run(calls.connect, port, limits=Limits(time_s=20.0, network=True)))
        server.setblocking(False)
        connection, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(server), 20)
        with connection:
            connection.sendall(b"hello")
            assert await asked == "hello"


async def test_rule_se3_isolation_that_cannot_be_had_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import relax.runtime.isolation as i\n"
        "def refuse(network): raise PermissionError(1, 'Operation not permitted')\n"
        "i.enter_namespaces = refuse\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pool = ProcessPool()
    try:
        with pytest.raises(UserError, match="unsafe_pool_without_isolation: true"):
            await pool.check()
    finally:
        await pool.close()
    unsafe = build_pool(LocalConfig(unsafe_pool_without_isolation=True))
    try:
        await unsafe.check()
    finally:
        await unsafe.close()


async def test_rule_se3_a_call_sees_no_process_but_its_own(pool: ProcessPool, calls: Any) -> None:
    assert await pool.run(calls.send_signal, os.getpid(), limits=LIMITS) == "no such process"


async def test_rule_se1_a_worker_gets_no_secrets(
    pool: ProcessPool, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    environment = await pool.run(calls.environment, limits=LIMITS)
    assert "secret" not in environment.values()
    assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("status", "length", "body"),
    [
        (b"v", 5, pickle.dumps(print)[:5]),  # no JSON
        (b"v", 4_000, b"[" * 4_000),  # deep
        (b"e", 2, b"{}"),  # an exception without its fields
        (b"t", 0, b""),  # a status that only the worker may give
        (b"v", 1 << 62, b""),
    ],
)
async def test_rule_se2_forged_answers_are_refused(
    pool: ProcessPool, calls: Any, status: bytes, length: int, body: bytes
) -> None:
    with pytest.raises(TaskError):
        await pool.run(calls.forge, status, length, body, limits=LIMITS)
    assert await pool.run(operator.add, 1, 2, limits=LIMITS) == 3


async def test_a_call_that_closes_its_pipe_is_still_killed(pool: ProcessPool, calls: Any) -> None:
    with pytest.raises(LimitError):
        await pool.run(calls.close_everything_and_loop, limits=SHORT)


async def test_workers_are_reused_and_calls_do_not_see_one_another(calls: Any) -> None:
    pool = ProcessPool()
    try:
        assert [await pool.run(calls.count, limits=LIMITS) for _ in range(3)] == [1, 1, 1]
        assert len(pool._workers) == 1
        (worker,) = pool._workers
        await pool.run(calls.count, limits=LIMITS)
        assert pool._workers == {worker}
    finally:
        await pool.close()


async def test_a_worker_loads_nothing_heavy(pool: ProcessPool, calls: Any) -> None:
    modules = await pool.run(calls.loaded_modules, limits=LIMITS)
    assert not {"torch", "numpy", "asyncio", "pydantic"} & set(modules)


async def test_cancelling_the_wait_kills_the_call(calls: Any, tmp_path: Path) -> None:
    pool = ProcessPool()
    try:
        await pool.check()
        waiting = asyncio.create_task(pool.run(calls.spawn_tree, str(tmp_path / "mark"), limits=LIMITS))
        await until_there(tmp_path / "mark.begun")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await pool.run(operator.add, 1, 2, limits=LIMITS) == 3
        await asyncio.sleep(1.0)
        assert not (tmp_path / "mark").exists()
    finally:
        await pool.close()


async def test_a_lost_worker_is_replaced(pool: ProcessPool, calls: Any, tmp_path: Path) -> None:
    stuck = asyncio.create_task(pool.run(calls.stay, str(tmp_path / "begun"), limits=Limits(time_s=60)))
    await until_there(tmp_path / "begun")
    (worker,) = pool._workers
    worker._process.kill()
    with pytest.raises(TaskError, match="worker was lost"):
        await stuck
    assert await pool.run(operator.add, 1, 2, limits=LIMITS) == 3


async def test_case_g7_a_function_whose_import_starts_threads_is_refused(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\ndef start():\n    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "    return 1\nclass Call:\n    def __reduce__(self): return (load, ())\ndef load():\n    start()\n    return start\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskError, match="left 2 threads running"):
        await pool.run(importlib.import_module("threaded").Call(), limits=LIMITS)


async def test_case_g7_a_pool_starts_workers_while_threads_hold_locks() -> None:
    """Workers are executed afresh, so a lock held by a thread of this process cannot be inherited locked."""
    lock, release = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    pool = ProcessPool()
    try:
        assert await pool.run(operator.add, 1, 2, limits=LIMITS) == 3
    finally:
        release.set()
        thread.join()
        await pool.close()
