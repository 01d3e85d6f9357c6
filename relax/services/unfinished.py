"""The samples of an evaluation that was interrupted, so that the next one takes only those that are missing (case B14).

Used by `relax eval`. One line for each sample, written when it is done, after a first line that says of what: only exactly the
same evaluation goes on from it. The last line may be torn. Kept until the report is written.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from relax.core.message import Json
from relax.services.ledger import EvaluationRow


class Unfinished:
    """`what` identifies the evaluation: everything that its samples depend on. A file of another one is replaced."""

    def __init__(self, path: Path, what: Mapping[str, Json]) -> None:
        self._path = path
        self._head = json.dumps(what, sort_keys=True)
        self._file: IO[str] | None = None
        self.rows: dict[str, EvaluationRow] = {}
        """Samples that are done, by id."""

    def __enter__(self) -> "Unfinished":
        self._path.parent.mkdir(exist_ok=True)
        lines = self._path.read_text("utf-8").splitlines() if self._path.exists() else []
        if lines[:1] == [self._head]:
            self.rows = {row.id: row for line in lines[1:] if (row := _row(line)) is not None}
        # Written anew, so that nothing follows a torn line.
        self._file = self._path.open("w", encoding="utf-8")
        self._file.write(f"{self._head}\n")
        for row in self.rows.values():
            self._write(row)
        return self

    def add(self, row: EvaluationRow) -> None:
        self.rows[row.id] = row
        self._write(row)

    def remove(self) -> None:
        """The report is complete."""
        self._close()
        self._path.unlink(missing_ok=True)

    def __exit__(self, *_: Any) -> None:
        self._close()

    def _write(self, row: EvaluationRow) -> None:
        assert self._file is not None
        self._file.write(json.dumps(asdict(row)) + "\n")
        self._file.flush()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _row(line: str) -> EvaluationRow | None:
    """The sample of a line; None for one that was torn."""
    try:
        return EvaluationRow(**json.loads(line))
    except (ValueError, TypeError):
        return None
