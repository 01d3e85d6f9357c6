"""Where messages go while a run is under way: warnings to the terminal, everything with tracebacks to `run.log`.

Used by `relax train`. Python's own warnings go to the file only.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


class Terminal(logging.StreamHandler[IO[str]]):
    """Writes to standard error as it is at that moment, because a live table stands in for it while it is drawn."""

    @property
    def stream(self) -> IO[str]:
        return sys.stderr

    @stream.setter
    def stream(self, value: IO[str]) -> None:
        """Given by the constructor of the class above; the stream is looked up anew each time."""


class LogFile(logging.FileHandler):
    """A full disk must not fill the terminal with a traceback for every line that it does not take."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def logbook(path: Path) -> Iterator[logging.Logger]:
    """The run's logger; handlers are in place inside the block."""
    root = logging.getLogger()
    file = LogFile(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = Terminal()
    terminal.setLevel(logging.WARNING)
    terminal.addFilter(logging.Filter("relax"))
    terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    level = root.level
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for handler in (terminal, file):  # in this order: a disk that hangs must not keep a word from the terminal
        root.addHandler(handler)
    try:
        yield logging.getLogger("relax")
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        for handler in (file, terminal):
            root.removeHandler(handler)
            with suppress(OSError):  # a full disk: what it did not take is lost, the reason has been said
                handler.close()
