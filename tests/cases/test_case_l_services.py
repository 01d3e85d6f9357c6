"""Cases of section L: metrics and logging."""

import asyncio
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from relax.bus.row import Fetched
from relax.core.batch import Measure, merge_measures
from relax.core.completion import frozen
from relax.core.id import group_id
from relax.services.ledger import Ledger
from relax.services.media_row import FetchedMedia
from relax.services.monitors.hub import MAX_SERIES, MonitorHub
from relax.services.outline import outline_of
from relax.services.show import GroupView, read_group
from relax.services.statistic import StepStatistics
from relax.services.summary import summarize
from relax.services.train_group import TrainGroup
from tests.services.recorder import Gated, Raising, Recorder
from tests.services.story import story_config, write_story


def test_case_l2_dropped_and_failed_groups_are_in_the_account_of_the_summary(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    write_story(ledger)
    account = summarize(outline_of(story_config(tmp_path)), [], ledger, {})["ledger"]
    ledger.close()
    ends = account["trained"] + account["filtered"] + account["failed"] + account["dropped"]
    assert account["filtered"] == 4
    assert account["admitted"] == ends + account["outstanding"]
    assert account["balances"]


def test_case_l2_rewards_are_shown_with_their_own_sample(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    write_story(ledger)
    view = read_group(ledger, "g000050")
    ledger.close()
    assert isinstance(view, GroupView)
    assert [(t.id, t.reward, t.text) for t in view.trajectories] == [
        ("g000050/0", 1.0, "250"),
        ("g000050/1", 0.0, "[251]"),
    ]
    assert [(s.id, s.advantage) for t in view.trajectories for s in t.samples] == [
        ("g000050/0/0", 0.7),
        ("g000050/1/0", -0.7),
    ]


async def test_case_l3_parts_with_different_keys_merge_into_one_entry() -> None:
    recorder = Recorder()
    hub = MonitorHub([("recorder", recorder)])
    hub.step(0, {"train/loss": 1.0})
    hub.step(0, {"idle/trainer": 0.5})
    hub.step(1, {"train/loss": 0.5, "reward/mean": 1.0})
    await hub.close()
    assert recorder.entries == [
        (0, {"train/loss": 1.0, "idle/trainer": 0.5}),
        (1, {"train/loss": 0.5, "reward/mean": 1.0}),
    ]


def test_case_l3_ranks_that_measure_different_things_merge() -> None:
    merged = merge_measures([{"a": Measure(1.0, 1.0)}, {"a": Measure(3.0, 1.0), "b": Measure(5.0, 1.0, "max")}, {}])
    assert merged == {"a": Measure(4.0, 2.0), "b": Measure(5.0, 1.0, "max")}


async def test_case_l3_a_list_does_not_become_thousands_of_series() -> None:
    recorder, told = Recorder(), []
    hub = MonitorHub([("recorder", recorder)], report=told.append)
    for step in range(3):
        hub.step(step, {"good": 1.0, "lengths": list(range(5000)), "array": np.zeros(9)})  # type: ignore[dict-item]
    await hub.close()
    assert recorder.entries == [(step, {"good": 1.0}) for step in range(3)]
    assert sorted(message.split("'")[1] for message in told) == ["array", "lengths"]


async def test_case_l3_positions_in_names_do_not_become_thousands_of_series() -> None:
    recorder, told = Recorder(), []
    hub = MonitorHub([("recorder", recorder)], report=told.append)
    hub.step(0, {f"length/{position}": 1.0 for position in range(MAX_SERIES + 100)})
    hub.step(1, {"length/0": 2.0, f"length/{MAX_SERIES + 50}": 2.0})
    await hub.close()
    assert len(recorder.entries[0][1]) == MAX_SERIES
    assert recorder.entries[1] == (1, {"length/0": 2.0})
    assert len(told) == 100


async def test_case_l4_training_goes_on_while_a_tracker_is_down_slow_or_broken() -> None:
    """The loop that trains is never entered by a monitor: it takes its steps while one monitor blocks a whole thread."""
    blocked, broken, well = Gated(), Raising(lambda: ConnectionError("tracker is down")), Recorder()
    told: list[str] = []
    hub = MonitorHub(
        [("blocked", blocked), ("broken", broken), ("well", well)], report=told.append, close_timeout_s=0.1
    )
    running = asyncio.create_task(hub.run())
    for step in range(1000):
        hub.step(step, {"reward/mean": 0.5})
        await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    await hub.close()
    assert well.entries[-1] == (999, {"reward/mean": 0.5})
    assert blocked.entries == []
    assert len([message for message in told if "'broken'" in message]) == 1
    blocked.gate.set()


async def test_case_l4_a_crash_flushes_the_pending_step() -> None:
    recorder = Recorder()
    hub = MonitorHub([("recorder", recorder)])

    async def crash() -> None:
        try:
            hub.step(7, {"reward/mean": 0.5})
            raise ZeroDivisionError
        finally:
            await hub.close()

    with pytest.raises(ZeroDivisionError):
        await crash()
    assert recorder.entries == [(7, {"reward/mean": 0.5})]


async def test_case_l4_an_evaluation_is_logged_at_the_step_it_is_of(tmp_path: Path) -> None:
    """An evaluation of version 10 ends while step 13 is under way."""
    recorder = Recorder()
    hub = MonitorHub([("recorder", recorder)])
    for step in range(10, 14):
        hub.step(step, {"reward/mean": step / 100})
    hub.step(10, {"eval/heldout/reward": 0.5})
    hub.step(13, {"step/seconds": 1.0})
    await hub.close()
    assert [step for step, metrics in recorder.entries if "eval/heldout/reward" in metrics] == [10]
    merged: dict[int, Mapping[str, float]] = {}
    for step, metrics in recorder.entries:
        merged[step] = {**merged.get(step, {}), **metrics}
    assert merged[13] == {"reward/mean": 0.13, "step/seconds": 1.0}


def test_case_l6_the_logged_reward_is_the_mean_over_what_was_trained() -> None:
    statistics = StepStatistics(3)
    turns = {"turns": [[0, 2, 5, "stop", "x"]], "messages": [], "end": "done", "info": {}}
    rewards = {"a": 1.0, "b": 0.0, "c": None}
    fetched = Fetched(tuple(rewards), {id: {"reward": reward, "turns": turns} for id, reward in rewards.items()})
    masks = {id: frozen(np.array([False, False, True, True, reward is not None])) for id, reward in rewards.items()}
    statistics.add_group(TrainGroup(group_id(0), (), fetched, masks, FetchedMedia(fetched)))
    metrics = statistics.metrics({"policy/ratio_mean": Measure(6.0, 4.0), "policy/entropy": Measure(0.0, 0.0)})
    assert metrics["reward/trained"] == 0.5
    assert metrics["rollout/tokens/mean"] == 3.0
    assert metrics["train/tokens"] == 3 + 3 + 2
    assert metrics["policy/ratio_mean"] == 1.5
    assert "policy/entropy" not in metrics


async def test_case_l7_memory_of_history_is_bounded_over_10_000_steps() -> None:
    """A monitor that never returns is the worst case: everything that could pile up does."""
    blocked = Gated()
    hub = MonitorHub([("blocked", blocked)], report=lambda message: None, close_timeout_s=0.01, max_waiting=64)
    metrics = {f"metric/{index}": float(index) for index in range(50)}

    def steps(first: int, last: int) -> int:
        for step in range(first, last):
            hub.step(step, dict(metrics))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early, late = steps(0, 1000), steps(1000, 10_000)
    finally:
        tracemalloc.stop()
    assert late < early * 1.5
    assert hub.dropped["blocked"] > 9_000
    await hub.close()
    blocked.gate.set()
