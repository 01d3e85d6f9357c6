"""The ledger: one row per group, trajectory and sample, written once, at its terminal state, and the metrics of each step.

A projection of the run's events in SQLite. Written by `projection`, read by `relax status`, `relax show` and the summary,
during the run and after it. Each row carries the event number that closed it, so that a resume can cut off what followed
its checkpoint.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from relax.core.error import UserError
from relax.core.message import Json

CONFIG = "config"
"""The note that holds the configuration, as YAML, that the run was last trained with."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    id: str
    event: int
    stage: str
    source: str
    record: int
    pass_number: int
    attempt: int
    task: str
    base: int
    deadline: int
    state: str
    reason: str
    step: int | None
    prompt: str
    reference: str
    place: int | None = None
    """Its place in the take of its step."""


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """`versions` says which version sampled which tokens: `12x5,13x3` is five tokens of version 12, then three of 13."""

    id: str
    event: int
    reward: float | None
    parts: str
    failure: str | None
    end: str
    tokens: int
    versions: str
    text: str


@dataclass(frozen=True, slots=True)
class SampleRow:
    id: str
    event: int
    start: int
    stop: int
    tokens: int
    advantage: float | None


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One evaluated trajectory (AC5: outside the training account)."""

    id: str
    event: int
    set_name: str
    step: int
    reward: float | None
    failure: str | None
    text: str


LedgerRow = GroupRow | TrajectoryRow | SampleRow | EvaluationRow

_TABLES: Mapping[type, str] = {
    GroupRow: "group_",
    TrajectoryRow: "trajectory",
    SampleRow: "sample",
    EvaluationRow: "evaluation",
}
_VALUES = {row: attrgetter(*(field.name for field in fields(row))) for row in _TABLES}
"""A row's values in the order of its fields; `astuple` copies each one deeply."""
_TYPES = {int: "INTEGER", float: "REAL", str: "TEXT"}


class Ledger:
    """Not thread-safe: one owner writes; readers open their own with `read_only=True`."""

    def __init__(self, path: Path | str, read_only: bool = False) -> None:
        if read_only and not Path(path).exists():
            raise UserError(f"{path} does not exist; is this a run directory of `relax train`?")
        self._path = path
        target = f"file:{quote(str(path))}?mode=ro" if read_only else str(path)
        self._connection = sqlite3.connect(target, uri=read_only, check_same_thread=False, timeout=10.0)
        self._connection.row_factory = sqlite3.Row
        if not read_only:
            try:
                self._create()
            except sqlite3.DatabaseError as error:
                raise self._damaged(error) from error

    def _create(self) -> None:
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute("BEGIN")  # all of it or nothing: a kill must leave nothing that nobody can read
        for row, table in _TABLES.items():
            columns = ", ".join(
                f"{f.name} {_column_type(f.type)}" + (" PRIMARY KEY" if f.name == "id" else "") for f in fields(row)
            )
            self._connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns}) WITHOUT ROWID")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS metric"
            " (step INTEGER, name TEXT, value REAL, PRIMARY KEY (step, name)) WITHOUT ROWID"
        )
        self._connection.execute("CREATE TABLE IF NOT EXISTS note (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
        self._connection.execute(
            "CREATE UNIQUE INDEX IF NOT EXISTS prompt_once ON group_ (source, record, pass_number, attempt)"
        )
        self._connection.commit()

    def write(
        self, rows: Iterable[LedgerRow], metrics: Mapping[int, Mapping[str, float]], notes: Mapping[str, Json]
    ) -> None:
        """Add terminal rows, metrics per step and notes in one transaction. A row written twice is an error.

        Raises UserError when the disk does not take it; nothing of it is there then.
        """
        by_type: dict[type, list[tuple[Any, ...]]] = {}
        for row in rows:
            by_type.setdefault(type(row), []).append(tuple(map(_storable, _VALUES[type(row)](row))))
        with self._refusal(), self._connection:
            for row_type, values in by_type.items():
                marks = ", ".join("?" * len(fields(row_type)))
                self._connection.executemany(f"INSERT INTO {_TABLES[row_type]} VALUES ({marks})", values)
            self._connection.executemany(
                "INSERT OR REPLACE INTO metric VALUES (?, ?, ?)",
                [(step, name, float(value)) for step, named in metrics.items() for name, value in named.items()],
            )
            self._connection.executemany(
                "INSERT OR REPLACE INTO note VALUES (?, ?)",
                [(name, json.dumps(value)) for name, value in notes.items()],
            )

    def cut_after(self, event: int, step: int) -> None:
        """Forget what a resume takes back: rows closed after `event`, metrics of steps from `step` on.

        The evaluation of version `step` stays: it was made of the weights that the run resumes with. Raises UserError for a
        file that is damaged.
        """
        try:
            self._check()
            self._cut_after(event, step)
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error

    def _damaged(self, error: sqlite3.DatabaseError) -> UserError:
        return UserError(
            f"the ledger {self._path} is damaged: {' '.join(str(error).split())}; bring it back from a copy, or start a new run "
            "from the newest checkpoint's model"
        )

    def _check(self) -> None:
        found = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)

    def _cut_after(self, event: int, step: int) -> None:
        with self._connection:
            for row, table in _TABLES.items():
                if row is not EvaluationRow:
                    self._connection.execute(f"DELETE FROM {table} WHERE event > ?", (event,))
            self._connection.execute("DELETE FROM evaluation WHERE step > ?", (step,))
            self._connection.execute(
                "DELETE FROM metric WHERE step > ? OR (step = ? AND name NOT LIKE 'eval/%')", (step, step)
            )

    def sync(self) -> None:
        """To the disk itself: a checkpoint that survives a power cut must not be newer than its ledger. Raises UserError."""
        with self._refusal():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def _refusal(self) -> Iterator[None]:
        """What the disk, or another process, does not let this one write, as a sentence that also crosses processes."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise UserError(
                f"cannot write the ledger {self._path}: {error}; mend the disk, free space there or make it writable, then resume the "
                "run with `relax train --resume`"
            ) from error

    def copy_to(self, other: "Ledger") -> None:
        """Everything that is written, into an empty ledger."""
        self._connection.backup(other._connection)

    # --- reading ---

    @property
    def is_empty(self) -> bool:
        """Whether whoever was to make it was killed before."""
        return self._connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0  # type: ignore[no-any-return]

    def next_evaluation(self) -> int:
        """A number that no evaluation group has yet."""
        number = "CAST(substr(id, 2, instr(id, '/') - 2) AS INTEGER)"
        found = self._connection.execute(f"SELECT MAX({number}) AS last FROM evaluation").fetchone()
        return 0 if found["last"] is None else int(found["last"]) + 1

    def group(self, id: str) -> dict[str, Json] | None:
        found = self._connection.execute("SELECT * FROM group_ WHERE id = ?", (id,)).fetchone()
        return dict(found) if found else None

    def children(self, row_type: type, id: str) -> list[dict[str, Json]]:
        """Trajectories of a group or samples of a trajectory, in sibling or index order."""
        found = self._connection.execute(
            f"SELECT * FROM {_TABLES[row_type]} WHERE id > ? AND id < ?", (f"{id}/", f"{id}0")
        ).fetchall()
        return sorted((dict(row) for row in found), key=lambda row: [int(part) for part in row["id"].split("/")[1:]])

    def counts(self) -> dict[str, int]:
        """Groups per end state."""
        rows = self._connection.execute("SELECT state, COUNT(*) AS n FROM group_ GROUP BY state").fetchall()
        return {row["state"]: row["n"] for row in rows}

    def trained_keys(self) -> list[tuple[str, int, int]]:
        """(source, record, pass) of every trained group: a multiset that a resume must not change (AC2)."""
        rows = self._connection.execute(
            "SELECT source, record, pass_number FROM group_ WHERE state = 'trained'"
        ).fetchall()
        return sorted((row["source"], row["record"], row["pass_number"]) for row in rows)

    def metric(self, name: str) -> list[tuple[int, float]]:
        """(step, value) in step order."""
        rows = self._connection.execute(
            "SELECT step, value FROM metric WHERE name = ? ORDER BY step", (name,)
        ).fetchall()
        return [(row["step"], row["value"]) for row in rows]

    def last_metrics(self) -> dict[str, tuple[int, float]]:
        """The newest value of every metric, and its step."""
        rows = self._connection.execute("SELECT name, value, MAX(step) AS step FROM metric GROUP BY name").fetchall()
        return {row["name"]: (row["step"], row["value"]) for row in rows}

    def note(self, name: str) -> Json:
        found = self._connection.execute("SELECT value FROM note WHERE name = ?", (name,)).fetchone()
        return json.loads(found["value"]) if found else None

    def staleness_violations(self, bounds: Mapping[str, int]) -> list[str]:
        """Trained trajectories that hold a token older than their stage's bound; empty when ST1 held."""
        found: list[str] = []
        query = (
            "SELECT t.id, t.versions, g.stage, g.step FROM trajectory t JOIN group_ g ON g.id = substr(t.id, 1, instr(t.id, '/') - 1)"
            " WHERE g.state = 'trained' AND t.versions != ''"
        )
        for row in self._connection.execute(query):
            oldest = min(version for version, _ in parse_versions(row["versions"]))
            if row["step"] - oldest > bounds[row["stage"]]:
                found.append(f"{row['id']}: version {oldest} at step {row['step']}")
        return found

    def close(self) -> None:
        self._connection.close()


def _storable(value: Any) -> Any:
    """Text that SQLite takes: a lone surrogate, e.g. from somebody's error message, becomes a question mark."""
    if type(value) is str and not value.isascii():
        return value.encode("utf-8", "replace").decode()
    return value


def _column_type(annotation: Any) -> str:
    if annotation in _TYPES:
        return f"{_TYPES[annotation]} NOT NULL"
    (inner,) = [part for part in annotation.__args__ if part is not type(None)]
    return _TYPES[inner]


def pack_versions(versions: Iterable[int]) -> str:
    """Run lengths of sampled tokens' versions, e.g. `12x5,13x3`."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    return ",".join(f"{version}x{count}" for version, count in runs)


def parse_versions(text: str) -> list[tuple[int, int]]:
    """The inverse of `pack_versions`: (version, tokens) runs."""
    return [(int(v), int(n)) for v, n in (run.split("x") for run in text.split(",") if run)]
