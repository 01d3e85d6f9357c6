"""Processes seen from outside."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relax.runtime.process import WatchedProcess, ending_of, fatal_error_in, state_of

WITH_STACKS = """
import faulthandler, signal, sys, time
file = open(sys.argv[1], "w")
faulthandler.register(signal.SIGUSR1, file=file)
def deep_inside():
    print("ready", flush=True)
    time.sleep(600)
deep_inside()
"""


def start(log: Path) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", WITH_STACKS, str(log)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.parametrize("signalled", [None, signal.SIGSTOP])
async def test_a_process_is_looked_at(tmp_path: Path, signalled: signal.Signals | None) -> None:
    process = start(tmp_path / "log")
    watched = WatchedProcess(process.pid)
    try:
        if signalled is not None:
            process.send_signal(signalled)
            while state_of(process.pid) != "T":  # noqa: ASYNC110 - the kernel sets no event
                await asyncio.sleep(0.01)
            assert await watched.look(str(tmp_path / "log")) == f"process {process.pid} is stopped (T)"
        else:
            seen = await watched.look(str(tmp_path / "log"))
            state = r"(sleeping \(S\)|running \(R\))"  # a moment after its start it may be either
            assert re.match(f"process {process.pid} is {state}; its stacks:", seen)
            assert "in deep_inside" in seen
        watched.kill()
        await watched.gone()
        assert watched.ending() in ("", "killed by signal 9 (SIGKILL)")
    finally:
        process.kill()
        process.communicate()
        watched.kill()
        watched.close()
        watched.close()


def test_there_is_nothing_to_watch_where_no_process_is() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(ProcessLookupError):
        WatchedProcess(process.pid)
    assert state_of(process.pid) == ""


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exit code 0"),
        (3 << 8, "exit code 3"),
        (9, "killed by signal 9 (SIGKILL)"),
        (11, "killed by signal 11 (SIGSEGV)"),
    ],
)
def test_a_wait_status_in_words(status: int, words: str) -> None:
    assert ending_of(status) == words


def test_a_crash_is_read_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert fatal_error_in(str(log)) == ""
    log.write_text("x\nFatal Python error: Segmentation fault\n\nThread 0x1\n")
    assert fatal_error_in(str(log)) == "Segmentation fault"
    assert state_of(os.getpid()) in "RS"
