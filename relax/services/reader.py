"""Opens the ledger of a run for reading, by anyone but its owner.

Used by the commands and by `status`. Whatever SQLite has to say becomes a sentence for a person.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from relax.core.error import UserError
from relax.core.message import Json
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger


class LedgerReader(Ledger):
    """A ledger that is only read, and what people ask of it beyond what a run does."""

    def groups_of(self, step: int) -> list[dict[str, Json]]:
        """Groups that `step` trained, by id."""
        rows = self._connection.execute("SELECT * FROM group_ WHERE step = ? ORDER BY length(id), id", (step,))
        return [dict(row) for row in rows.fetchall()]

    def metrics_of(self, step: int) -> dict[str, float]:
        """Every metric of `step`, by name."""
        rows = self._connection.execute("SELECT name, value FROM metric WHERE step = ? ORDER BY name", (step,))
        return {row["name"]: row["value"] for row in rows.fetchall() if row["value"] is not None}


@contextmanager
def open_ledger(directory: RunDirectory) -> Iterator[LedgerReader]:
    """Raises UserError when there is none yet, or when it cannot be read."""
    ledger = LedgerReader(directory.ledger, read_only=True)
    try:
        yield ledger
    except sqlite3.Error as error:
        raise UserError(
            f"{directory.ledger} cannot be read: {error}; if the run is just starting, try again"
        ) from error
    finally:
        ledger.close()
