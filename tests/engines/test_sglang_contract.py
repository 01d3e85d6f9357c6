"""The contract of a RolloutEngine, run on the engine that speaks to a server; but for `keep`, which it refuses."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relax.core.error import UserError
from tests.contracts import test_rollout_engine as contract
from tests.contracts.test_rollout_engine import CONTEXT, SLOTS, Bench
from tests.engines.sglang_server import FakeServer, serve
from tests.engines.sglang_setting import sglang_engine

_LEFT_OUT = {"test_rule_ws6_keep_stamps_later_tokens_mixed"}


@dataclass
class ServerBench(Bench):
    fake: FakeServer | None = None

    async def run_a_little(self) -> None:
        """The engine hears of tokens at the end only, so the server is asked."""
        assert self.fake is not None
        async with asyncio.timeout(30):
            while not self.fake.runs or min(len(run.tokens) for run in self.fake.runs.values()) < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture
async def fresh(tmp_path: Path) -> AsyncIterator[Bench]:
    async with (
        serve() as fake,
        sglang_engine(fake, tmp_path, None, slots=SLOTS, max_context_tokens=CONTEXT) as engine,
    ):
        yield ServerBench(engine, None, fake)
        assert not fake.crashed


def _inherited() -> dict[str, Any]:
    return {name: value for name, value in vars(contract).items() if name.startswith("test_") or name == "bench"}


globals().update({name: value for name, value in _inherited().items() if name not in _LEFT_OUT})


async def test_keep_is_refused_and_changes_nothing(bench: Bench) -> None:
    running = bench.start()
    await bench.run_a_little()
    with pytest.raises(UserError, match="recompute, drain or abort"):
        await bench.engine.pause("keep")
    assert (await bench.engine.status()).accepting
    assert len(await bench.finish(running)) == contract.BUDGET


def test_the_contract_is_run() -> None:
    assert len(_inherited()) > 15
    assert _inherited().keys() >= _LEFT_OUT
