from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.runtime.pool import ProcessPool


@pytest.fixture
def overlay(root: Path) -> Callable[[str], RunConfig]:
    """The quickstart recipe with one of the examples' files laid over it."""

    def load(path: str) -> RunConfig:
        return load_config([root / "recipes" / "quickstart.yaml", root / "examples" / path])

    return load


@pytest.fixture
async def pool() -> AsyncIterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    await pool.close()
