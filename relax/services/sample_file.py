"""Trajectories of every n-th step, whole and with their tokens: `samples/step-000050.parquet`, one row per trajectory.

Filled by the projection as groups end, written by the run after the step, read by `relax show sample` and by anything that reads
Parquet. Writing happens on a thread and is not waited for; a disk that takes nothing is said once and never stops training. What
is held and what is kept are both bounded. Per-token columns are those of the bus (TQ1): a new one needs no line here.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from relax.bus.row import Fetched
from relax.core.column import COLUMNS, Column
from relax.core.id import GroupId, Table, parent_of, table_of
from relax.core.message import Json, Prompt
from relax.services.file import written_aside
from relax.services.row import read_turns

MAX_TRAJECTORIES = 8192
MAX_TOKENS = 16 << 20
"""Most that one file holds: groups beyond it are counted and left out, so that a step of any size fits into memory."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """A group at its terminal state; `step` is the one that trained it, None for any other end."""

    id: GroupId
    prompt: Prompt
    stage: str
    base: int
    state: str
    reason: str
    step: int | None


@dataclass(slots=True)
class _Gathered:
    """Rows of the step that is being filled, by group; a group that a rollback reopened ends a second time."""

    groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    tokens: int = 0
    left_out: int = 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for rows in self.groups.values() for row in rows]


class SampleFiles:
    """Every `every`-th step into `folder`, the newest `keep` files. `every` 0 keeps nothing. `close` waits for the last write."""

    def __init__(self, folder: Path, every: int, keep: int) -> None:
        self._folder, self._every, self._keep = folder, every, keep
        self._next = 0
        self._gathered = _Gathered()
        self._writing: asyncio.Task[None] | None = None
        self._has_failed = False

    def start_at(self, step: int) -> None:
        """The run goes on at `step`: files of that step and later ones speak of what the resume took back."""
        self._next, self._gathered = step, _Gathered()
        for path in sample_files(self._folder):
            if step_of(path) >= step:
                path.unlink(missing_ok=True)

    def add(self, group: EndedGroup, fetched: Fetched) -> None:
        """All rows of a group that ended while the next step was filled, or was trained by it. Copies nothing."""
        if not self.is_due or group.step not in (None, self._next):
            return
        rows, held = _rows(group, fetched), self._gathered
        before = held.groups.pop(group.id, [])
        tokens = held.tokens + _num_tokens(rows) - _num_tokens(before)
        if len(held.rows) + len(rows) > MAX_TRAJECTORIES or tokens > MAX_TOKENS:
            held.left_out += 1
            return
        held.groups[group.id] = rows
        held.tokens = tokens

    async def flush(self, step: int) -> None:
        """The step is over: its file is written behind the caller's back, after the one before it."""
        gathered, self._gathered, self._next = self._gathered, _Gathered(), step + 1
        if self._is_due(step) and gathered.groups:
            await self.close()
            self._writing = asyncio.create_task(self._write(step, gathered), name=f"samples of step {step}")

    async def close(self) -> None:
        """Wait for the write under way; no deadline: it is one file, on a thread of its own."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    @property
    def is_due(self) -> bool:
        """True while the step that is being filled will be written: then `add` wants every cell."""
        return self._is_due(self._next)

    def _is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    async def _write(self, step: int, gathered: _Gathered) -> None:
        try:
            await asyncio.to_thread(write_samples, self._folder, step, gathered.rows, gathered.left_out)
            await asyncio.to_thread(self._prune)
        except Exception as error:  # whatever is wrong with the disk or the library, training does not depend on it
            if not self._has_failed:
                _log.warning(
                    "samples of step %d are not kept: %s: %s; training goes on, and this is said once",
                    step, type(error).__name__, error,
                )  # fmt: skip
            self._has_failed = True

    def _prune(self) -> None:
        for path in sample_files(self._folder)[: -self._keep]:
            path.unlink(missing_ok=True)


def sample_files(folder: Path) -> list[Path]:
    """The files of a run, oldest step first."""
    found = folder.glob("step-*.parquet") if folder.is_dir() else ()
    return sorted((path for path in found if path.stem.rpartition("-")[2].isdigit()), key=step_of)


def sample_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.parquet"


def step_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def write_samples(folder: Path, step: int, rows: Sequence[Mapping[str, Any]], left_out: int = 0) -> Path:
    """The rows as one Parquet file, whole or not at all. Raises OSError."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    schema = _schema().with_metadata({"relax": json.dumps({"format": 1, "step": step, "groups_left_out": left_out})})
    columns = [pa.array([row[name] for row in rows], schema.field(name).type) for name in schema.names]
    path = sample_path(folder, step)
    folder.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        parquet.write_table(pa.Table.from_arrays(columns, schema=schema), aside, compression="zstd")
    return path


def find_trajectory(folder: Path, id: str, step: int | None) -> dict[str, Any] | None:
    """The row of a trajectory, looked for in the file of `step`, or in all files where its step is not known."""
    import pyarrow.parquet as parquet

    paths = sample_files(folder) if step is None else [sample_path(folder, step)]
    for path in reversed(paths):
        if path.is_file():
            found: list[dict[str, Any]] = parquet.read_table(path, filters=[("trajectory", "=", id)]).to_pylist()
            if found:
                return {**found[0], "file": path}
    return None


def _token_columns(table: Table) -> list[Column]:
    return [column for column in COLUMNS.values() if column.table is table and column.shape == ("T",)]


def _schema() -> Any:
    import pyarrow as pa

    types: dict[str, Any] = {
        "int32": pa.int32(), "int64": pa.int64(), "bool": pa.bool_(), "float32": pa.float32(), "float64": pa.float64(),
        "bfloat16": pa.float32(),
    }  # fmt: skip
    text, number = pa.string(), pa.int64()
    fixed: dict[str, Any] = {
        "trajectory": text, "group": text, "stage": text, "state": text, "reason": text, "step": number, "base": number,
        "source": text, "record": number, "pass": number, "attempt": number, "task": text, "prompt": text, "media": text, "reference": text,
        "text": text, "end": text, "failure": text, "reward": pa.float64(), "parts": text, "turns": text,
        "spans": pa.list_(pa.list_(number)),
    }  # fmt: skip
    tokens = [*_token_columns(Table.trajectory), *_token_columns(Table.sample)]
    return pa.schema([*fixed.items(), *((column.name, pa.list_(types[column.dtype])) for column in tokens)])


def _rows(group: EndedGroup, fetched: Fetched) -> list[dict[str, Any]]:
    samples: dict[str, list[str]] = {}
    for id in fetched.ids:
        if table_of(id) is Table.sample:
            samples.setdefault(parent_of(id) or "", []).append(id)
    return [_row(group, id, samples.get(id, []), fetched) for id in fetched.ids if table_of(id) is Table.trajectory]


def _num_tokens(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(row["token_ids"]) for row in rows)


def _row(group: EndedGroup, id: str, samples: list[str], fetched: Fetched) -> dict[str, Any]:
    cells, prompt, key = fetched.cells[id], group.prompt, group.prompt.key
    turns = read_turns(cells["turns"])
    reward = cells.get("reward")
    row: dict[str, Any] = {
        "trajectory": id, "group": group.id, "stage": group.stage, "state": group.state, "reason": _plain(group.reason),
        "step": group.step, "base": group.base, "source": key.source, "record": key.record, "pass": key.pass_number,
        "attempt": key.attempt, "task": prompt.task,
        "prompt": _plain("\n".join(f"{message.role}: {message.text}" for message in prompt.messages)),
        "media": _json([{"type": part.type, "uri": part.uri} for message in prompt.messages for part in message.media]),
        "reference": _json(prompt.reference), "text": _plain("\n".join(turn.text for turn in turns.turns)), "end": turns.end,
        "failure": None if cells["failure"] is None else _plain(cells["failure"]),
        "reward": None if reward is None else float(reward), "parts": _json(cells.get("reward_parts", [])),
        "turns": _json(cells["turns"]["turns"]),
    }  # fmt: skip
    spans = sorted(
        (int(start), int(stop), sample) for sample in samples for start, stop in [fetched.get(sample, "span")]
    )
    row["spans"] = [[start, stop] for start, stop, _ in spans]
    for column in _token_columns(Table.trajectory):
        row[column.name] = _numbers(column, cells.get(column.name))
    for column in _token_columns(Table.sample):
        row[column.name] = _joined(column, len(cells["token_ids"]), spans, fetched)
    return row


def _joined(column: Column, length: int, spans: Sequence[tuple[int, int, str]], fetched: Fetched) -> Any:
    """A column of the samples, laid over the trajectory's tokens; None when no sample has it."""
    cells = [(start, stop, fetched.cells[id].get(column.name)) for start, stop, id in spans]
    found = [(start, stop, _numbers(column, cell)) for start, stop, cell in cells if cell is not None]
    if not found:
        return None
    values = np.zeros(length, dtype=found[0][2].dtype)
    for start, stop, part in found:
        values[start:stop] = part
    return values


def _numbers(column: Column, cell: Any) -> Any:
    """A cell's numbers: Parquet has no bfloat16, which the bus keeps as 16-bit words (TQ6)."""
    if cell is None or column.dtype != "bfloat16":
        return cell
    return (cell.astype(np.uint32) << 16).view(np.float32)


def _json(value: Json) -> str:
    return _plain(json.dumps(value))


def _plain(text: str) -> str:
    """Text that UTF-8 takes: a lone surrogate becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
