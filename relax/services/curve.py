"""The learning curve of a run: training reward and held-out evaluations over steps, and where RL begins.

Read from the ledger, so it also shows a run that was resumed. Drawn as a picture for the run directory and as text for the
terminal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax.services.ledger import Ledger
from relax.services.outline import RunOutline, sampling_stages

Points = Sequence[tuple[int, float]]
"""(step, value) in step order."""


@dataclass(frozen=True, slots=True)
class Curve:
    """`rl_begins` is the step at which the first stage that samples begins, None when none has begun."""

    title: str
    reward: Points
    evaluations: dict[str, Points]
    rl_begins: int | None
    total: int


def read_curve(ledger: Ledger, outline: RunOutline, sets: Sequence[str]) -> Curve:
    """`sets` are the names of the evaluation sets."""
    sampling = sampling_stages(outline, ledger)
    evaluations = {name: finite(ledger.metric(f"eval/{name}/reward")) for name in sets}
    return Curve(
        title=outline.name,
        reward=finite(ledger.metric("reward/mean")),
        evaluations={name: points for name, points in evaluations.items() if points},
        rl_begins=sampling[0].first if sampling else None,
        total=outline.total,
    )


def finite(points: Points) -> list[tuple[int, float]]:
    """Without the values that were not numbers (SQLite keeps NaN as null)."""
    return [(step, value) for step, value in points if value is not None and np.isfinite(value)]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to `window - 1` before it."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - window, 0)
    return [float(x) for x in (sums[ends] - sums[starts]) / (ends - starts)]


def smoothing_window(num_points: int) -> int:
    """About a thirtieth of the curve, so that neither a short nor a long run is hidden by noise."""
    return max(3, num_points // 30)


# --- picture ---


def draw_curve(curve: Curve, path: Path) -> None:
    """A PNG. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_points(axes, curve)
    if curve.rl_begins is not None:
        axes.axvline(
            curve.rl_begins, color="0.35", linestyle="--", linewidth=1.2, label=f"RL begins (step {curve.rl_begins})"
        )
    axes.set_xlim(0, max(curve.total, 1))
    axes.set_xlabel("step (published weight versions)")
    axes.set_ylabel("reward")
    axes.set_title(f"Learning curve of {curve.title}")
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", framealpha=0.9)
    figure.savefig(path)


def _draw_points(axes: Any, curve: Curve) -> None:
    if curve.reward:
        steps, values = zip(*curve.reward, strict=True)
        window = smoothing_window(len(values))
        axes.plot(steps, values, color="tab:blue", linewidth=0.7, alpha=0.35)
        axes.plot(
            steps,
            smooth(values, window),
            color="tab:blue",
            linewidth=1.8,
            label=f"training reward (mean of {window} steps)",
        )
    colors = ("tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
    for index, (name, points) in enumerate(curve.evaluations.items()):
        steps, values = zip(*points, strict=True)
        axes.plot(
            steps,
            values,
            "o-",
            color=colors[index % len(colors)],
            markersize=5,
            linewidth=1.4,
            label=f"{name} (evaluation)",
        )


# --- text ---

MARKS = "ox*+"
"""One for each evaluation set."""


def text_curve(curve: Curve, width: int = 78, height: int = 13) -> str:
    """A chart of at most `width` columns and `height` rows for the plot itself, in ASCII; empty when there is nothing to show.

    `.` is the training reward (smoothed), `o` an evaluation; a column of `|` marks where RL begins.
    """
    reward = list(zip([s for s, _ in curve.reward], _smoothed(curve.reward), strict=True))
    everything = [value for points in (reward, *curve.evaluations.values()) for _, value in points]
    if not everything:
        return ""
    low, high = _bounds(everything)
    columns = max(width - 8, 10)
    grid = [[" "] * columns for _ in range(height)]
    begin = None if curve.rl_begins is None else _column(curve.rl_begins, curve.total, columns)
    if begin is not None:
        for row in grid:
            row[begin] = "|"
    _plot(grid, reward, ".", curve.total, low, high)
    for index, points in enumerate(curve.evaluations.values()):
        _plot(grid, points, MARKS[index % len(MARKS)], curve.total, low, high)
    labels = {0: high, height // 2: high - (high - low) * (height // 2) / (height - 1), height - 1: low}
    lines = [f"{f'{labels[i]:.2f}' if i in labels else '':>6} |{''.join(row)}".rstrip() for i, row in enumerate(grid)]
    return "\n".join([*lines, *_footer(curve, begin, columns, bool(reward))])


def _smoothed(points: Points) -> list[float]:
    return smooth([value for _, value in points], smoothing_window(len(points))) if points else []


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Rounded outwards to tenths, and never empty; rewards between 0 and 1 mostly get the whole of it."""
    low, high = float(np.floor(min(values) * 10) / 10), float(np.ceil(max(values) * 10) / 10)
    return low, high if high > low else low + 0.1


def _column(step: int, total: int, columns: int) -> int:
    return min(columns - 1, round(step / max(total, 1) * (columns - 1)))


def _plot(grid: list[list[str]], points: Points, mark: str, total: int, low: float, high: float) -> None:
    for step, value in points:
        row = round((high - value) / (high - low) * (len(grid) - 1))
        grid[min(max(row, 0), len(grid) - 1)][_column(step, total, len(grid[0]))] = mark


def _footer(curve: Curve, begin: int | None, columns: int, has_reward: bool) -> list[str]:
    axis = ["-"] * columns
    ticks = [" "] * columns
    for step in (0, curve.total // 2, curve.total):
        text = str(step)
        start = min(max(_column(step, curve.total, columns) - len(text) // 2, 0), columns - len(text))
        ticks[start : start + len(text)] = text
    lines = [f"{'':>6} +{''.join(axis)}", f"{'step':>6}  {''.join(ticks)}".rstrip()]
    if begin is not None:
        lines.insert(1, f"{'':>8}{_label(curve.rl_begins or 0, begin, columns)}")
    legend = [". training reward"] if has_reward else []
    legend += [f"{MARKS[i % len(MARKS)]} {name} (evaluation)" for i, name in enumerate(curve.evaluations)]
    return [*lines, *(f"{'':>8}{line}" for line in _packed(legend, columns))]


def _label(step: int, column: int, columns: int) -> str:
    """A `^` under `column`, with what it means beside it as far as there is room."""
    long, short = f"RL begins (step {step})", "RL begins"
    if column + len(long) + 2 <= columns:
        return f"{' ' * column}^ {long}"
    if len(long) + 1 <= column:
        return f"{long} ^".rjust(column + 1)
    return f"{' ' * column}^ {short}"[:columns]


def _packed(parts: Sequence[str], columns: int) -> list[str]:
    """As many parts on a line as fit."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= columns:
            lines[-1] += f"   {part}"
        else:
            lines.append(part[:columns])
    return lines
