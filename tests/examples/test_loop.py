"""The one-file loop learns: from demonstrations, and from rewards by GRPO."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import loop
from relax.core.message import Prompt
from relax.core.trajectory import Score, Trajectory


class ShareOfZeros:
    """A reward with a signal for an untrained policy: the share of characters that are `0`."""

    def __init__(self, config: Any) -> None: ...

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        text = trajectory.response
        return Score(text.count("0") / max(len(text), 1))


def test_the_loop_learns_from_demonstrations_and_stays_on_policy(capsys: pytest.CaptureFixture[str]) -> None:
    history = loop.main(warmup_steps=25, rl_steps=3, prompts_per_step=8, group_size=4)
    assert np.mean(history.warmup_losses[-5:]) < 0.7 * history.warmup_losses[0]
    assert history.versions == [{0}, {1}, {2}]
    assert len(history.rewards) == 3
    assert all(0 <= reward <= 1 for reward in history.rewards)
    assert max(history.gaps) < 1e-4
    assert "sampled by v2" in capsys.readouterr().out


def test_the_loop_learns_from_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Exact", ShareOfZeros)
    history = loop.main(warmup_steps=25, rl_steps=12, prompts_per_step=8, group_size=8)
    assert np.mean(history.rewards[-3:]) > np.mean(history.rewards[:3]) + 0.05
    assert history.versions == [{step} for step in range(12)]
    assert max(history.gaps) < 1e-4


def test_a_seed_decides_the_run() -> None:
    first, again, other = (loop.main(3, 0, prompts_per_step=4, seed=seed).warmup_losses for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_loop_is_short_enough_to_read() -> None:
    assert len(Path(loop.__file__).read_text("utf-8").splitlines()) < 250
