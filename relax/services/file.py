"""Files that are there whole or not at all: written aside in the same folder, then renamed.

Called by whatever writes into a run directory while others may read it. A reader, or a run that is killed in between, never
meets half a file.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, content: bytes | str) -> None:
    """Create or replace `path`; text is written as UTF-8. Raises OSError, with what stood there before untouched."""
    with written_aside(path) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """For writers that want a path: yields one beside `path`, which replaces `path` when the block ends without an error."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
