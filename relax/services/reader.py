"""Opens the ledger of a run for reading, by anyone but its owner.

Used by the commands and by `status`. Whatever SQLite has to say becomes a sentence for a person.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from relax.core.error import UserError
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger


@contextmanager
def open_ledger(directory: RunDirectory) -> Iterator[Ledger]:
    """Raises UserError when there is none yet, or when it cannot be read."""
    ledger = Ledger(directory.ledger, read_only=True)
    try:
        yield ledger
    except sqlite3.Error as error:
        raise UserError(
            f"{directory.ledger} cannot be read: {error}; if the run is just starting, try again"
        ) from error
    finally:
        ledger.close()
