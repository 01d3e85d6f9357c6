"""Progress on the terminal: a small table redrawn in place, or plain lines where nobody can redraw (a CI log, a file).

Built by the hub, and called on its own thread only. Both fit into 80 columns.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax.core.message import Json
from relax.services.directory import RunDirectory
from relax.services.monitors.config import ConsoleConfig
from relax.services.monitors.progress import Progress, View
from relax.services.outline import RunOutline

MAX_WIDTH = 100
"""A wider table is harder to read, not easier."""
_ECHO_WIDTH = 3
"""Columns left free at the right for the `^C` that a terminal writes behind the table, which would else break a line."""


class ConsoleMonitor:
    """`console` and `clock` are for tests."""

    def __init__(
        self,
        config: ConsoleConfig,
        *,
        directory: RunDirectory,
        outline: RunOutline,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._clock = config, clock
        self._console = console or Console(highlight=False)
        self._progress = Progress(outline, clock())
        self._lock = threading.Lock()  # the live table is drawn on a thread of its own
        self._live: Live | None = None
        self._printed: View | None = None
        self._printed_at = 0.0

    @property
    def _is_live(self) -> bool:
        return self._config.style == "live" or (self._config.style == "auto" and self._console.is_terminal)

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._progress.update(step, metrics, self._clock())
        if self._is_live:
            self._draw()
        elif self._is_due(self._view()):
            self._print()

    async def log_samples(self, step: int, samples: Sequence[Mapping[str, Json]]) -> None:
        """Samples are for files; `relax show group` prints one group."""

    async def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif not self._is_live and self._printed is not None and self._view().step > self._printed.step:
            self._print()

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=2)
            self._live.start()

    def _view(self) -> View:
        with self._lock:
            return self._progress.view(self._clock())

    def _table(self) -> RenderableType:
        return progress_table(self._view(), min(self._console.width - _ECHO_WIDTH, MAX_WIDTH))

    def _is_due(self, view: View) -> bool:
        last, config = self._printed, self._config
        if last is None or view.stage != last.stage or view.evaluations != last.evaluations or view.step == view.total:
            return True
        if config.every_steps is not None:
            return view.step - last.step >= config.every_steps
        return self._clock() - self._printed_at >= config.every_s

    def _print(self) -> None:
        self._printed_at, self._printed = self._clock(), self._view()
        self._console.print(Text(progress_line(self._printed)), soft_wrap=True)


def progress_line(view: View) -> str:
    """One plain line; parts without a value are left out. Idle shares follow on a line of their own."""
    parts = [f"step {view.step}/{view.total} {view.stage}"]
    if view.reward is not None:
        parts.append(f"reward {view.reward:.3f}")
    elif view.loss is not None:
        parts.append(f"loss {view.loss:.3f}")
    parts += [f"{name} {reward:.3f}@{step}" for name, reward, step in view.evaluations]
    if view.staleness is not None:
        parts.append(f"stale {view.staleness:.0f}")
    if view.tokens_per_second is not None:
        parts.append(f"{view.tokens_per_second:,.0f} tok/s")
    if view.left_s is not None:
        parts.append(f"{duration(view.left_s)} left{_in_stage(view)}")
    line = "  ".join(parts)
    return f"{line}\n  idle  {_idle(view)}" if view.idle else line


def progress_table(view: View, width: int) -> RenderableType:
    """The live table, `width` columns wide and about eight lines high."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="bold", width=9, no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_row("stage", _stage_row(view))
    quality = f"{view.reward:.3f} (mean of {view.reward_steps} steps)" if view.reward is not None else "none yet"
    if view.reward is None and view.loss is not None:
        grid.add_row("loss", f"{view.loss:.4f}")
    else:
        grid.add_row("reward", quality)
    if view.evaluations:
        grid.add_row(
            "held-out", "   ".join(f"{name} {reward:.3f} (step {step})" for name, reward, step in view.evaluations)
        )
    rollout = []
    if view.tokens_per_second is not None:
        rollout.append(f"{view.tokens_per_second:,.0f} sampled tokens/s")
    if view.staleness is not None:
        rollout.append(f"staleness max {view.staleness:.0f}")
    if rollout:
        grid.add_row("rollout", "   ".join(rollout))
    if view.idle:
        grid.add_row("idle", _idle(view))
    left = "" if view.left_s is None else f"   about {duration(view.left_s)} left{_in_stage(view)}"
    grid.add_row("time", f"{duration(view.elapsed_s)}{left}")
    return Panel(grid, title=Text(view.run), title_align="left", width=width)


def _stage_row(view: View) -> RenderableType:
    row = Table.grid(padding=(0, 2, 0, 0), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(total=view.total, completed=view.step)
    row.add_row(
        Text(f"{view.stage} ({view.stage_number} of {view.num_stages})", overflow="ellipsis"),
        f"step {view.step} of {view.total}",
        bar,
        f"{100 * view.step // max(view.total, 1)}%",
    )
    return row


def _in_stage(view: View) -> str:
    """How long a later stage takes is not known before it has begun."""
    return "" if view.stage_number == view.num_stages else " in stage"


def _idle(view: View) -> str:
    return "  ".join(f"{name} {100 * share:.0f}%" for name, share in view.idle)


def duration(seconds: float) -> str:
    """`0:42`, `12:05` or `3:07:09`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
