import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relax.runtime.pool import ProcessPool

sys.path.append(str(Path(__file__).parent))  # toy.py, and the modules that workers import


@pytest.fixture
async def pool() -> AsyncIterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    await pool.close()
