import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _importable_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import what they are asked to call, so this folder must be on their path."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
