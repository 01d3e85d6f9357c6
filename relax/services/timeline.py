"""What each role did when, for the newest steps: `timeline.json`, in the trace format that Perfetto and Chrome open.

Made by the run. It measures from outside: a compute thread, an engine or the bus is wrapped, and the code inside knows nothing of
it. Calls that overlap or follow each other closely are one span and everything held is bounded, so a call costs a few
microseconds and the file stays small. Speaks of this process only: a resumed run begins a new one.
"""

import asyncio
import inspect
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from relax.core.protocol import Compute
from relax.services.file import written_aside

T = TypeVar("T")

JOIN_US = 2_000
"""Calls of one name on one track with a shorter pause between them are one span: an engine decodes a step in milliseconds."""
MAX_DRAWN = 256
"""Spans of one track that are drawn in one step; further ones are counted."""
MAX_SPANS = 40_000
STEPS = "steps"
"""The track of the steps themselves."""
_NAMED_BY = {"take": 0}
"""Verbs whose argument at this place says who calls."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Span:
    """Microseconds since the timeline began. `calls` were joined into it and took `busy_us`; `is_call`: it may overlap others."""

    track: str
    name: str
    start_us: int
    end_us: int
    is_call: bool = False
    calls: int = 1
    busy_us: int = 0
    step: int | None = None


@dataclass(slots=True)
class _Step:
    """The step under way: when it began, how many spans of each track it has drawn, and how many calls it has left out."""

    start_us: int = 0
    drawn: dict[str, int] = field(default_factory=dict)
    left_out: int = 0


class Timeline:
    """Covers the newest `steps` steps; `every` steps the file at `path` is replaced. `every` 0 wraps nothing and writes nothing."""

    def __init__(
        self,
        path: Path,
        every: int = 20,
        steps: int = 200,
        clock: Callable[[], int] = time.perf_counter_ns,
        max_spans: int = MAX_SPANS,
    ) -> None:
        self._path, self._every = path, every
        self._clock, self._began = clock, clock()
        self._began_unix_s = time.time()
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._last: dict[tuple[str, str], Span] = {}
        self._step = _Step()
        self._starts: deque[int] = deque(maxlen=steps)
        self._writing: asyncio.Task[None] | None = None
        self._has_failed = False

    # --- wrapping ---

    def measured_compute(self, name: str, compute: Compute) -> Compute:
        """The same thread; each call on it is a span on the track `name`, from when it begins to run to when it ends."""
        return compute if not self._every else _MeasuredCompute(self, name, compute)

    def wrap(self, name: str, target: Any) -> Any:
        """The same object; calls of its async methods, and of itself, are spans on the track `name`.

        With a `/` in the name the part before it is the track and the rest is what calls of the object itself are named by.
        """
        return target if not self._every else _MeasuredObject(self, name, target)

    def now_us(self) -> int:
        """Microseconds since the timeline began."""
        return (self._clock() - self._began) // 1000

    def add(self, track: str, name: str, start_us: int, end_us: int, is_call: bool) -> None:
        """A call ended. Calls of a track may overlap each other only where `is_call`."""
        # Where calls do not overlap only the very last span may grow, or two of them would cross.
        key = (track, name if is_call else "")
        with self._lock:
            last, step = self._last.get(key), self._step
            if last is not None and last.name == name and start_us - last.end_us < JOIN_US:
                last.start_us, last.end_us = min(last.start_us, start_us), max(last.end_us, end_us)
                last.calls, last.busy_us = last.calls + 1, last.busy_us + end_us - start_us
                return
            if step.drawn.get(track, 0) >= MAX_DRAWN:
                step.left_out += 1
                return
            step.drawn[track] = step.drawn.get(track, 0) + 1
            span = Span(track, name, start_us, end_us, is_call, busy_us=end_us - start_us)
            self._last[key] = span
            self._spans.append(span)

    # --- steps and the file ---

    async def stepped(self, step: int) -> None:
        """The step is over: what is older than the covered steps goes; when it is due the file is written, on a thread."""
        if not self._every:
            return
        self._close_step(step)
        if (step + 1) % self._every == 0:
            await self._finish()
            self._writing = asyncio.create_task(asyncio.to_thread(self.write), name=f"timeline of step {step}")

    async def close(self) -> None:
        """Write the last state; waits for it. Spans of calls that never came back are not in it."""
        if self._every:
            await self._finish()
            await asyncio.to_thread(self.write)

    async def _finish(self) -> None:
        if self._writing is not None:
            await self._writing
            self._writing = None

    def _close_step(self, step: int) -> None:
        with self._lock:
            now, under_way = self.now_us(), self._step
            self._spans.append(
                Span(STEPS, f"step {step}", under_way.start_us, now, calls=0, busy_us=under_way.left_out, step=step)
            )
            self._starts.append(under_way.start_us)
            self._step, self._last = _Step(now), {}
            while self._spans and self._spans[0].end_us <= self._starts[0]:
                self._spans.popleft()

    def write(self) -> None:
        """Replace the file. A disk that does not take it is said once, and the run goes on."""
        with self._lock:
            spans = list(self._spans)
            since = self._starts[0] if self._starts else 0
        try:
            with written_aside(self._path) as aside, aside.open("w", encoding="utf-8") as file:
                head = {"displayTimeUnit": "ms", "otherData": {"began_unix_s": self._began_unix_s}}
                file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
                # One by one: a dump of the whole would hold up every other thread.
                for index, event in enumerate(_events(spans, since)):
                    file.write(f"{',' if index else ''}{json.dumps(event)}\n")
                file.write("]}\n")
        except OSError as error:
            if not self._has_failed:
                _log.warning("%s is not written: %s; training goes on, and this is said once", self._path, error)
            self._has_failed = True


def _events(spans: Sequence[Span], since: int) -> Iterator[dict[str, Any]]:
    """Trace events. What began before the covered steps is cut at their beginning."""
    tracks = {name: number for number, name in enumerate(dict.fromkeys([STEPS, *(span.track for span in spans)]))}
    yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "relax"}}
    for track, number in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": track}}
    for number, span in enumerate(spans):
        start_us = max(span.start_us, since)
        if span.end_us < start_us:
            continue
        event = {"name": span.name, "cat": span.track, "pid": 0, "tid": tracks[span.track], "ts": start_us}
        args = {"calls": span.calls, "busy_us": span.busy_us}
        if span.is_call:
            yield {**event, "ph": "b", "id": number, "args": args}
            yield {**event, "ph": "e", "id": number, "ts": span.end_us}
        else:
            args = args if span.step is None else {"step": span.step, "calls_left_out": span.busy_us}
            yield {**event, "ph": "X", "dur": span.end_us - start_us, "args": args}


class _MeasuredCompute:
    """Core's `Compute`, measured on the thread itself; everything else is the inner one's."""

    def __init__(self, timeline: Timeline, name: str, inner: Compute) -> None:
        self._timeline, self._track, self._inner = timeline, name, inner

    @property
    def busy_s(self) -> float:
        return self._inner.busy_s

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        return await self._inner.run(self._call, function, args)

    def close(self) -> None:
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _call(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        start = self._timeline.now_us()
        try:
            return function(*args)
        finally:
            self._timeline.add(self._track, _name_of(function), start, self._timeline.now_us(), is_call=False)


class _MeasuredObject:
    """Everything of the inner object, its async methods measured. Attributes that are set go to the inner one."""

    __slots__ = ("_inner", "_label", "_measured", "_timeline", "_track")

    def __init__(self, timeline: Timeline, name: str, inner: Any) -> None:
        track, _, label = name.partition("/")
        own = {"_timeline": timeline, "_track": track, "_label": label or track, "_inner": inner, "_measured": {}}
        for attribute, value in own.items():
            object.__setattr__(self, attribute, value)

    def __getattr__(self, name: str) -> Any:
        measured: dict[str, Any] = object.__getattribute__(self, "_measured")
        if name in measured:
            return measured[name]
        value = getattr(self._inner, name)
        if inspect.iscoroutinefunction(value):
            value = measured[name] = _measured(self._timeline, self._track, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = self._timeline.now_us()
        try:
            return await self._inner(*args, **kwargs)
        finally:
            self._timeline.add(self._track, self._label, start, self._timeline.now_us(), is_call=True)


def _measured(timeline: Timeline, track: str, verb: str, function: Callable[..., Any]) -> Callable[..., Any]:
    place = _NAMED_BY.get(verb)

    async def call(*args: Any, **kwargs: Any) -> Any:
        start = timeline.now_us()
        try:
            return await function(*args, **kwargs)
        finally:
            name = verb if place is None or len(args) <= place else f"{verb} {args[place]}"
            timeline.add(track, name, start, timeline.now_us(), is_call=True)

    return call


def _name_of(function: Any) -> str:
    """`TorchBackend.optim_step`; a function inside another goes by the outer one's name."""
    named = getattr(function, "func", function)
    name = getattr(named, "__qualname__", None) or type(named).__qualname__
    return str(name).split(".<locals>")[0]
