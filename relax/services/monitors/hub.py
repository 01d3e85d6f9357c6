"""Where a run's metrics and samples go: to every monitor, without ever waiting for one (RR9).

Called by the run. Metrics of one step come in several parts and are merged until a later step begins or the step has been
quiet for a while; an entry keeps the step it was measured at (L4), so a monitor may see an earlier step again. Everything
held here is bounded (L7).
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Literal, NoReturn, TypeAlias

from relax.config.tree import RunConfig
from relax.core.message import Json
from relax.core.protocol import Monitor
from relax.services.directory import RunDirectory
from relax.services.metric import split_numbers
from relax.services.monitors.table import MONITORS
from relax.services.monitors.thread import MonitorThread, Report
from relax.services.outline import RunOutline

MAX_SERIES = 2000
"""Different metric names in one run; more than that is a list or an id that leaked into a name (L3)."""

Notice: TypeAlias = Literal["restart", "stall", "failure", "end"]
"""What happens to a run that people want to hear of."""

_log = logging.getLogger(__name__)


class MonitorHub:
    """`report` gets one sentence per problem. `settle_s`: how long a step must be quiet before it is logged early."""

    def __init__(
        self,
        monitors: Sequence[tuple[str, Monitor]],
        report: Report = _log.warning,
        settle_s: float = 2.0,
        close_timeout_s: float = 10.0,
        max_waiting: int = 256,
    ) -> None:
        self._report, self._settle_s, self._close_timeout_s = report, settle_s, close_timeout_s
        self._threads = [MonitorThread(name, monitor, report, max_waiting) for name, monitor in monitors]
        self._pending: tuple[int, dict[str, float]] | None = None
        self._names: set[str] = set()
        self._refused: set[str] = set()
        self._arrived = asyncio.Event()
        self._closed = False

    @property
    def dropped(self) -> dict[str, int]:
        """Entries that each monitor was too slow for."""
        return {thread.name: thread.dropped for thread in self._threads}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take metrics measured at `step`. Returns at once; what is not a finite number is refused by name."""
        accepted = self._accepted(metrics)
        if not accepted or self._closed:
            return
        if self._pending is not None and step < self._pending[0]:
            self._send(step, accepted)  # an evaluation that ended after its step
            return
        if self._pending is None or step > self._pending[0]:
            self._flush()
            self._pending = (step, {})
        self._pending[1].update(accepted)
        self._arrived.set()

    def samples(self, step: int, samples: Sequence[Mapping[str, Json]]) -> None:
        """Take samples of `step`, each with its own keys. Returns at once; they count as one entry of a monitor's queue."""
        if not samples or self._closed:
            return
        if self._pending is not None and step > self._pending[0]:
            self._flush()  # so that a monitor sees steps in order
        taken = tuple(dict(sample) for sample in samples)
        for thread in self._threads:
            thread.put_samples(step, taken)

    def notice(self, kind: Notice, text: str) -> None:
        """Tell people, by the monitors that can, what happened to the run. Returns at once; `text` is for them to read."""
        if not self._closed:
            for thread in self._threads:
                thread.put_notice(kind, text)

    async def settle(self) -> None:
        """Nothing waits here for another process."""

    async def run(self) -> NoReturn:
        """Endless. Consumes: arrivals. Waits for: a quiet moment after one. Unblocked by: time. Logs the pending step then."""
        while True:
            await self._arrived.wait()  # no deadline: a run logs nothing between two steps
            self._arrived.clear()
            try:
                async with asyncio.timeout(self._settle_s):
                    await self._arrived.wait()
            except TimeoutError:
                self._flush()

    async def close(self) -> None:
        """Log the pending step and end every monitor, within a deadline; a monitor that hangs is left behind. Idempotent."""
        if self._closed:
            return
        self._flush()
        self._closed = True
        for thread in self._threads:
            thread.finish()
        if self._threads:
            ends = {asyncio.wrap_future(thread.ended) for thread in self._threads}
            await asyncio.wait(ends, timeout=self._close_timeout_s)
        for thread in self._threads:
            if not thread.ended.done():
                self._report(
                    f"monitor {thread.name!r} did not end within {self._close_timeout_s:g} s and was left behind; "
                    f"{thread.waiting} of its entries are lost"
                )
            if thread.dropped and not thread.is_broken:
                self._report(
                    f"monitor {thread.name!r} was too slow: {thread.dropped} entries were dropped, oldest first"
                )

    def _flush(self) -> None:
        if self._pending is not None:
            step, metrics = self._pending
            self._pending = None
            self._send(step, metrics)

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        for thread in self._threads:
            thread.put(step, metrics)

    def _accepted(self, metrics: Mapping[str, float]) -> dict[str, float]:
        accepted, refused = split_numbers(metrics)
        for name in [name for name in accepted if name not in self._names]:
            if len(self._names) < MAX_SERIES:
                self._names.add(name)
            else:
                refused[name] = f"would be series {MAX_SERIES + 1}; put ids and positions into values, not into names"
                del accepted[name]
        for name, reason in refused.items():
            if name not in self._refused and len(self._refused) < MAX_SERIES:
                self._refused.add(name)
                self._report(f"metric {name!r} is not logged: {reason}")
        return accepted


def build_monitors(config: RunConfig, directory: RunDirectory, outline: RunOutline) -> MonitorHub:
    """The configured monitors behind one hub. Raises UserError when one cannot be imported."""
    named: list[tuple[str, Monitor]] = []
    for node in config.monitors:
        same = sum(name.split("#")[0] == node.type for name, _ in named)
        name = node.type if not same else f"{node.type}#{same + 1}"
        named.append((name, MONITORS.component(node.type)(node, directory=directory, outline=outline)))
    return MonitorHub(named)
