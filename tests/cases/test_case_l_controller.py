"""Case L7 on everything that a step goes through without a model: the controller, its books, the bus and the event log."""

import gc
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from relax.bus import lease
from relax.core.id import group_of, index_of, parent_of, table_of
from relax.services.account import END_STATES, MAX_REASONS
from tests.services.stage_world import StageWorld, stage_world


async def run_steps(world: StageWorld, steps: int, settle_every: int) -> int:
    """Train `steps` steps, one group of three lost on the way; returns the bytes that are held afterwards."""
    for _ in range(steps):
        step = world.controller.gate.step
        for place in range(3):
            group = await world.begin()
            await world.write(group, 0, 1.0)
            if place == 1:
                await world.end(group, "failed", f"reason {step}: no two are equal")
            else:
                await world.finish(group, [0.0], first=1)
        await world.train()
        if settle_every and (step + 1) % settle_every == 0:
            await world.controller.settle(step + 1)
        await world.controller.register.projection.flush()
    for remembered in (table_of, group_of, parent_of, index_of):
        remembered.cache_clear()  # bounded, but by more ids than a test can make
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("settle_every", [0, 4])
async def test_case_l7_a_long_stage_holds_no_more_than_a_short_one(
    tmp_path: Path, settle_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prime-rl#2373: with ends that are final at once, and with ends that wait for a snapshot every few steps.

    Reasons that are never the same twice are the worst case for an account of reasons.
    """
    monkeypatch.setattr(lease, "_REMEMBERED", 64)
    async with stage_world(tmp_path / "ledger.sqlite", settles_at_once=not settle_every) as world:
        tracemalloc.start()
        try:
            held = [await run_steps(world, 40, settle_every) for _ in range(4)]
        finally:
            tracemalloc.stop()
        assert world.controller.gate.step == 160
        growth = [after - before for before, after in pairwise(held)]
        assert min(growth) < 4_000, f"{growth}: what is kept of forty steps; a leak of anything shows in every window"
        assert len(world.controller.account.reasons) <= MAX_REASONS + len(END_STATES)
        assert (await world.bus.status()).groups < 16
        assert world.ledger.counts() == {"trained": 320, "failed": 160}
