import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _importable_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import what they are asked to call, so this folder must be on their path."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets, which `tmp_path` need not be."""
    with tempfile.TemporaryDirectory(prefix="wire-") as folder:
        yield Path(folder)
