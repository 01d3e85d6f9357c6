"""Writing model files quietly and with one kind of error.

Called by `trained` and `state`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def quiet_saving(what: str, folder: Path) -> Iterator[None]:
    """Around code that writes: no progress bar runs through the run's own display, and a full disk is an OSError."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    except SafetensorError as error:  # how a full disk looks from there
        raise OSError(f"cannot write {what} into {folder}: {error}") from error
