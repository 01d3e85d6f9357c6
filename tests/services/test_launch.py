"""Signals while a run is under way (RR6)."""

import asyncio
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relax.core.error import RelaxError
from relax.services.cli import launch as module
from relax.services.cli import train
from relax.services.cli.launch import Interruption, Outcome, launch
from relax.services.directory import FolderLostError, RunDirectory


class Fake:
    """Sends itself `signals` once it runs, then behaves as told: `stops`, `ignores` a stop, is `over` and closes, `ends` anyway, or
    still `starts` and has nothing to save."""

    def __init__(self, behaviour: str, *signals: int) -> None:
        self._behaviour, self._signals = behaviour, signals
        self._stop = asyncio.Event()
        self.cleaned = False
        self.is_over = behaviour == "over"
        self.has_begun = behaviour != "starts"

    async def execute(self) -> dict[str, object]:
        try:
            for number in self._signals:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0)
            if self.is_over:
                await asyncio.sleep(0.05)
                assert not self._stop.is_set()
            if self._behaviour == "raises":
                raise RelaxError("what went wrong")
            if self._behaviour in ("ignores", "starts"):
                await asyncio.Event().wait()
            if self._behaviour == "stops":
                await self._stop.wait()
            return {"steps": 3}
        finally:
            self.cleaned = True

    async def stop(self) -> bool:
        self._stop.set()
        return self._behaviour != "starts"


def launched(fake: Fake, grace_s: float = 30.0) -> tuple[Outcome, list[str], list[int]]:
    said: list[str] = []
    ended: list[int] = []
    outcome = run(fake, grace_s, said.append, lambda code, why: ended.append(code))
    return outcome, said, ended


def run(
    fake: Fake,
    grace_s: float,
    say: Callable[[str], None],
    end: Callable[[int, str], Any],
    close_s: float = 10.0,
    check: Callable[[], None] = lambda: None,
) -> Outcome:
    with Interruption(grace_s, say, end, close_s) as interruption:
        return launch(fake, interruption, check)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals count each, however close together."""
    monkeypatch.setattr(module, "SAME_S", 0.0)


def test_a_run_that_ends_by_itself() -> None:
    assert launched(Fake("ends")) == (Outcome({"steps": 3}, None), [], [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_rule_rr6_a_signal_stops_the_run_where_it_is_safe(number: int) -> None:
    outcome, said, ended = launched(Fake("stops", number))
    assert outcome == Outcome({"steps": 3}, number)
    assert len(said) == 1
    assert "within 30 s" in said[0]
    assert "Ctrl-C again" in said[0]
    assert ended == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_rule_rr6_a_run_that_has_not_begun_ends_at_once_and_promises_no_checkpoint(number: int) -> None:
    fake = Fake("starts", number)
    outcome, said, ended = launched(fake, grace_s=3600.0)
    assert outcome == Outcome(None, number, has_begun=False)
    assert fake.cleaned
    assert said == [
        "stopping: nothing was trained since this start, so there is nothing to save; press Ctrl-C again to end at once"
    ]
    assert ended == []


@pytest.mark.parametrize("grace_s", [0.0, 0.01])
def test_rule_rr6_after_the_grace_time_the_run_is_cancelled(grace_s: float) -> None:
    fake = Fake("ignores", signal.SIGTERM)
    outcome, said, ended = launched(fake, grace_s)
    assert outcome == Outcome(None, signal.SIGTERM)
    assert fake.cleaned
    assert "without a new checkpoint" in said[-1]
    assert ended == []


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_rule_rr6_an_interrupt_while_stopping_ends_the_process_at_once(first: int) -> None:
    _, _, ended = launched(Fake("stops", first, signal.SIGINT))
    assert ended == [130]


@pytest.mark.usefixtures("apart")
def test_rule_rr6_a_second_sigterm_ends_the_process_at_once_and_says_why() -> None:
    said: list[str] = []
    ended: list[tuple[int, str]] = []
    run(Fake("stops", signal.SIGTERM, signal.SIGTERM), 30.0, said.append, lambda *how: ended.append(how))
    assert (len(said), ended) == (1, [(143, "a second signal ended it at once")])


def test_rule_rr6_two_signals_that_come_together_are_one() -> None:
    """Ctrl-C reaches a whole process group, and `timeout`, which is in it, passes its own on."""
    outcome, said, ended = launched(Fake("stops", signal.SIGINT, signal.SIGINT))
    assert (outcome, len(said), ended) == (Outcome({"steps": 3}, signal.SIGINT), 1, [])


@pytest.mark.parametrize("grace_s", [30.0, 0.0])
def test_rule_rr6_a_run_that_is_over_is_left_to_close_and_said_to_be_over(grace_s: float) -> None:
    outcome, said, ended = launched(Fake("over", signal.SIGTERM), grace_s)
    assert outcome == Outcome({"steps": 3}, signal.SIGTERM)
    assert said == ["the run is over and closes; press Ctrl-C again to end at once"]
    assert ended == []


def test_rule_rr6_a_signal_while_the_outcome_is_printed_is_answered_and_a_second_one_ends_the_process() -> None:
    said: list[str] = []
    ended: list[tuple[int, str]] = []
    with Interruption(0.2, said.append, lambda *how: ended.append(how), 0.0) as interruption:
        assert launch(Fake("stops", signal.SIGTERM), interruption).signal == signal.SIGTERM
        said.clear()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.25)  # the deadline of the stop is over
        assert said == ["the run has ended, and what came of it follows; press Ctrl-C again to end at once"]
        assert ended == []
        time.sleep(module.SAME_S)
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [(130, "")]


def test_rule_rr6_a_terminal_that_closes_may_say_so_twice() -> None:
    """The kernel tells the process, and so does the shell that goes with the terminal."""
    outcome, said, ended = launched(Fake("stops", signal.SIGHUP, signal.SIGHUP))
    assert outcome == Outcome({"steps": 3}, signal.SIGHUP)
    assert (len(said), ended) == (1, [])


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """`nohup relax train ...` goes on when its terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launched(Fake("ends", signal.SIGHUP)) == (Outcome({"steps": 3}, None), [], [])
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_rule_rr6_a_terminal_that_is_gone_keeps_no_run_from_stopping_where_it_is_safe(number: int) -> None:
    """Neither what is printed nor standard error takes a word: the terminal was closed, or Ctrl-C ended the `tee` behind a pipe too."""

    def say(line: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with deaf_standard_error():
        outcome = run(Fake("stops", number), 30.0, say, lambda *how: None)
    assert outcome == Outcome({"steps": 3}, number)


def test_what_is_said_to_nobody_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with deaf_standard_error(), open(2, "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        train._say("stopped, checkpoint at step 3")


@contextmanager
def deaf_standard_error() -> Iterator[None]:
    """A pipe whose other end is closed."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    kept = os.dup(2)
    os.dup2(write_end, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(write_end)


def test_rule_rr6_a_stop_that_fails_is_said_and_the_run_is_cancelled() -> None:
    class Failing(Fake):
        async def stop(self) -> None:
            raise ZeroDivisionError("a bug")

    outcome, said, ended = launched(Failing("ignores", signal.SIGTERM))
    assert outcome == Outcome(None, signal.SIGTERM)
    assert "ZeroDivisionError('a bug')" in said[-1]
    assert ended == []


def test_rule_rr6_a_run_that_ends_before_it_can_be_asked_to_stop_is_finished() -> None:
    class Ended(Fake):
        async def execute(self) -> dict[str, object]:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
            self._stop.set()  # the stop, which waits for this, fails when this has returned
            return {"steps": 3}

        async def stop(self) -> None:
            await self._stop.wait()
            raise RelaxError("nobody is there any more")

    outcome, said, ended = launched(Ended("ends"))
    assert outcome == Outcome({"steps": 3}, signal.SIGTERM)
    assert len(said) == 1
    assert ended == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_rule_rr6_a_blocked_loop_says_at_once_and_ends_after_the_grace_time(number: int) -> None:
    said: list[str] = []
    ended: list[int] = []
    released = threading.Event()

    class Blocking(Fake):
        async def execute(self) -> dict[str, object]:
            os.kill(os.getpid(), number)
            assert "stopping at the next safe point" in said[0]  # while the loop does not turn
            assert released.wait(30)  # as long as nothing ends the process
            return {}

    def end(code: int, why: str) -> None:
        ended.append(code)
        released.set()

    run(Blocking("ends"), 0.02, said.append, end, close_s=0.0)
    assert ended == [128 + number]
    assert "the run did not end within 0.02 s" in said[1]


def test_rule_rr6_a_terminal_that_blocks_or_fails_does_not_keep_the_process() -> None:
    released = threading.Event()
    ended: list[int] = []

    class Blocking(Fake):
        async def execute(self) -> dict[str, object]:
            os.kill(os.getpid(), signal.SIGTERM)
            assert released.wait(30)
            return {}

    def say(line: str) -> None:
        if "stopping" in line:
            raise RuntimeError("reentrant call")
        released.wait()

    def end(code: int, why: str) -> None:
        ended.append(code)
        released.set()

    run(Blocking("ends"), 0.0, say, end, close_s=0.0)
    assert ended == [143]


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("behaviour", ["ignores", "raises"])
def test_rule_rr6_a_run_whose_folder_is_not_its_own_any_more_ends_and_says_so(
    behaviour: str, replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed, or moved away and another one begun in its place: what would be written from now on is of no use."""
    monkeypatch.setattr("relax.services.cli.launch.CHECK_S", 0.01)

    class Losing(Fake):
        async def execute(self) -> dict[str, object]:
            directory.root.rename(tmp_path / "elsewhere")
            if replaced:
                directory.root.mkdir()
                (directory.root / "lock").write_text("1\n")
            return await super().execute()

    with RunDirectory(tmp_path / "run") as directory:
        directory.check_held()
        fake = Losing(behaviour)
        with pytest.raises(FolderLostError, match="run, was removed, moved or replaced while"):
            run(fake, 30.0, lambda line: None, lambda *how: None, check=directory.check_held)
    assert fake.cleaned


def test_what_the_run_raises_comes_out_and_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(RelaxError, match="what went wrong"):
        launched(Fake("raises"))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
