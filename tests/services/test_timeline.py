"""The timeline: what ran when, measured from outside, bounded, in a format that trace viewers open."""

import asyncio
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax.runtime.compute import ComputeThread
from relax.runtime.local import LocalLauncher
from relax.services import timeline as module
from relax.services.timeline import Timeline


class Hand:
    """A clock that a test turns; nanoseconds."""

    def __init__(self) -> None:
        self.ns = 7_000_000_000

    def __call__(self) -> int:
        return self.ns

    def pass_ms(self, ms: float) -> None:
        self.ns += int(ms * 1e6)


@pytest.fixture
def hand() -> Hand:
    return Hand()


def load(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms"
    return document["traceEvents"]  # type: ignore[no-any-return]


def written(path: Path) -> bool:
    return path.exists()


def spans(events: list[dict[str, Any]], track: str) -> list[tuple[str, float, float]]:
    """(name, start, end) in milliseconds."""
    found = [event for event in events if event.get("cat") == track]
    ends = {event["id"]: event["ts"] for event in found if event["ph"] == "e"}
    return [
        (
            event["name"],
            event["ts"] / 1000,
            (event["ts"] + event["dur"] if event["ph"] == "X" else ends[event["id"]]) / 1000,
        )
        for event in found
        if event["ph"] in "Xb"
    ]


def assert_nested(events: list[dict[str, Any]]) -> None:
    """On every track the spans that are not calls follow each other."""
    tracks = {event["tid"] for event in events if event["ph"] == "X"}
    for track in tracks:
        mine = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["ph"] == "X" and event["tid"] == track
        )
        for (_, end), (start, _) in itertools.pairwise(mine):
            assert start >= end


class Clocked:
    """A compute thread without the thread, on a clock that a test turns."""

    busy_s = 0.25

    def __init__(self) -> None:
        self.closed = False

    async def run(self, function: Any, *args: Any) -> Any:
        return function(*args)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def timeline(tmp_path: Path, hand: Hand) -> Timeline:
    return Timeline(tmp_path / "timeline.json", every=1, steps=3, clock=hand)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "timeline.json"


async def test_calls_on_a_thread_are_spans_of_its_track(timeline: Timeline, path: Path, hand: Hand) -> None:
    inner = Clocked()
    compute = timeline.measured_compute("trainer", inner)
    assert await compute.run(lambda ms: hand.pass_ms(ms) or ms, 30) == 30
    hand.pass_ms(5)
    await compute.run(hand.pass_ms, 20)
    with pytest.raises(ZeroDivisionError):
        await compute.run(lambda: 1 / 0)
    await timeline.stepped(0)
    await timeline.close()
    events = load(path)
    name = "test_calls_on_a_thread_are_spans_of_its_track"
    assert spans(events, "trainer") == [(name, 0, 30), ("Hand.pass_ms", 35, 55), (name, 55, 55)]
    assert spans(events, "steps") == [("step 0", 0, 55)]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["relax", "steps", "trainer"]
    assert compute.busy_s == 0.25
    compute.close()
    assert inner.closed


async def test_calls_that_follow_closely_are_one_span_that_says_how_many(
    timeline: Timeline, path: Path, hand: Hand
) -> None:
    compute = timeline.measured_compute("engine-0", Clocked())

    async def decode(times: int) -> None:
        for _ in range(times):
            await compute.run(hand.pass_ms, 4)
            hand.pass_ms(1)

    await decode(10)
    hand.pass_ms(10)
    await decode(2)
    await timeline.stepped(0)
    await decode(1)
    await timeline.stepped(1)
    await timeline.close()
    events = load(path)
    assert [(start, end) for _, start, end in spans(events, "engine-0")] == [(0, 49), (60, 69), (70, 74)]
    assert next(e["args"] for e in events if e.get("cat") == "engine-0") == {"calls": 10, "busy_us": 40_000}


async def test_functions_that_alternate_on_a_thread_never_cross(timeline: Timeline, path: Path, hand: Hand) -> None:
    compute = timeline.measured_compute("engine-0", Clocked())

    def prefill() -> None:
        hand.pass_ms(1)

    for _ in range(4):
        await compute.run(prefill)
        await compute.run(hand.pass_ms, 0.5)
        await compute.run(hand.pass_ms, 0.5)
        hand.pass_ms(0.1)
    await timeline.close()
    events = load(path)
    assert_nested(events)
    assert len(spans(events, "engine-0")) == 8


class Bus:
    """An object that roles call."""

    def __init__(self, hand: Hand) -> None:
        self.hand, self.size = hand, 3

    async def take(self, consumer: str, holder: str, wait: float = 5) -> str:
        self.hand.pass_ms(wait)
        return f"{consumer} for {holder}"

    async def put(self) -> None:
        raise ZeroDivisionError

    def count(self) -> int:
        return self.size

    async def __call__(self, wait: float) -> float:
        self.hand.pass_ms(wait)
        return wait


async def test_a_wrapped_object_is_the_same_but_for_its_spans(timeline: Timeline, path: Path, hand: Hand) -> None:
    bus = timeline.wrap("bus", Bus(hand))
    assert await bus.take("reward", "r0") == "reward for r0"
    hand.pass_ms(50)
    assert await bus.take("trainer", holder="t", wait=7) == "trainer for t"
    with pytest.raises(ZeroDivisionError):
        await bus.put()
    assert bus.count() == 3
    bus.size = 4
    assert bus.count() == 4
    with pytest.raises(AttributeError):
        bus.nothing()
    reward = timeline.wrap("reward/exact", Bus(hand))
    assert await reward(2) == 2
    await timeline.stepped(0)
    await timeline.close()
    events = load(path)
    assert spans(events, "bus") == [("take reward", 0, 5), ("take trainer", 55, 62), ("put", 62, 62)]
    assert spans(events, "reward") == [("exact", 62, 64)]


async def test_calls_that_overlap_are_one_span(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOIN_US", 1_000_000)  # however busy the machine is

    class Engine:
        async def generate(self, wait: float) -> None:
            await asyncio.sleep(wait)

    timeline = Timeline(path, every=1)
    engine = timeline.wrap("generate", Engine())
    await asyncio.gather(*(engine.generate(0.001 * index) for index in range(20)))
    await timeline.close()
    events = [event for event in load(path) if event.get("cat") == "generate"]
    assert [event["ph"] for event in events] == ["b", "e"]
    assert events[0]["args"]["calls"] == 20


async def test_a_strict_launcher_takes_a_wrapped_object(timeline: Timeline, hand: Hand, path: Path) -> None:
    proxy = LocalLauncher(strict=True, seed=1).wrap("bus", timeline.wrap("bus", Bus(hand)))
    assert await proxy.take("reward", "r0") == "reward for r0"
    await timeline.close()
    assert [name for name, *_ in spans(load(path), "bus")] == ["take reward"]


async def test_only_the_newest_steps_are_covered(timeline: Timeline, path: Path, hand: Hand) -> None:
    compute = timeline.measured_compute("trainer", Clocked())
    for step in range(10):
        await compute.run(hand.pass_ms, 8)
        hand.pass_ms(4)
        await timeline.stepped(step)
    await timeline.close()
    events = load(path)
    assert [name for name, *_ in spans(events, "steps")] == ["step 7", "step 8", "step 9"]
    assert [start for _, start, _ in spans(events, "trainer")] == [84, 96, 108]
    assert min(event["ts"] for event in events if "ts" in event) == 84_000
    assert_nested(events)


async def test_what_is_held_is_bounded_whatever_a_step_does(
    path: Path, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_DRAWN", 4)
    timeline = Timeline(path, every=100, steps=50, clock=hand, max_spans=12)
    compute = timeline.measured_compute("trainer", Clocked())
    for step in range(6):
        for _ in range(10):
            await compute.run(hand.pass_ms, 1)
            hand.pass_ms(5)
        await timeline.stepped(step)
    assert not written(path)  # not due yet
    await timeline.close()
    events = load(path)
    assert [event["ph"] for event in events].count("X") == 12
    assert [event["args"] for event in events if event.get("cat") == "steps"][-1] == {"step": 5, "calls_left_out": 6}


async def test_the_file_is_written_every_n_steps_on_another_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    threads: list[threading.Thread] = []
    real = Timeline.write
    monkeypatch.setattr(Timeline, "write", lambda self: threads.append(threading.current_thread()) or real(self))
    timeline = Timeline(path, every=3)
    for step in range(7):
        await timeline.stepped(step)
    await timeline.close()
    assert len(threads) == 3
    assert threading.main_thread() not in threads


async def test_off_wraps_nothing_and_writes_nothing(path: Path, hand: Hand) -> None:
    timeline = Timeline(path, every=0)
    bus, compute = Bus(hand), Clocked()
    assert timeline.wrap("bus", bus) is bus
    assert timeline.measured_compute("trainer", compute) is compute
    await timeline.stepped(0)
    await timeline.close()
    assert not written(path)


async def test_a_disk_that_takes_nothing_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(tmp_path / "nowhere" / "timeline.json", every=1)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            await timeline.stepped(step)
        await timeline.close()
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text


@pytest.fixture
def thread() -> Iterator[ComputeThread]:
    thread = ComputeThread("trainer")
    yield thread
    thread.close()


async def test_a_real_thread_is_measured_where_it_runs(
    path: Path, thread: ComputeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOIN_US", 60_000_000)  # however busy the machine is
    timeline = Timeline(path, every=1)
    compute = timeline.measured_compute("trainer", thread)
    await asyncio.gather(*(compute.run(sum, range(1000)) for _ in range(3)), compute.run(max, [1, 2]))
    assert compute.busy_s == thread.busy_s > 0
    assert compute.name == "trainer"  # type: ignore[attr-defined]
    await timeline.close()
    events = load(path)
    assert [(e["name"], e["args"]["calls"]) for e in events if e["ph"] == "X"] == [("sum", 3), ("max", 1)]
    assert_nested(events)
