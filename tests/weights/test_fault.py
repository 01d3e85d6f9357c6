"""Check 4 of the weight service: 200 drawn schedules of faults, on the real parts. WS3, WS4 and WS5 hold in each."""

from collections import Counter
from pathlib import Path

import pytest

from tests.weights.fault import HARMS, Life

SEEDS, AT_ONCE = 200, 10


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
async def test_rule_ws3_and_ws4_and_ws5_hold_whatever_is_damaged_killed_or_lost(tmp_path: Path, first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + AT_ONCE):
        life = Life(tmp_path / str(seed), seed)
        try:
            await life.run()
        except BaseException as error:
            error.add_note(f"seed {seed}: {', '.join(life.seen)}")
            raise
        seen.update(life.seen)
    assert len(seen) > len(HARMS) // 3, "hardly anything was injected"


async def test_rule_ws3_the_faults_are_ones_that_an_unchecked_transport_would_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the digest, some seed ends with other weights than were published: the schedules are worth something."""
    monkeypatch.setattr("relax.weights.shared.verify", lambda manifest, tensors: None)
    monkeypatch.setattr("relax.weights.bucket.verify", lambda manifest, tensors: None)
    monkeypatch.setattr("relax.weights.updater.check_proof", lambda *args: 0.0)
    monkeypatch.setattr("relax.weights.updater.probe_gap", lambda *args: 0.0)
    failures = 0
    for seed in range(20):
        try:
            await Life(tmp_path / str(seed), seed, patience_s=0.2).run()
        except Exception:
            failures += 1
    assert failures > 3
