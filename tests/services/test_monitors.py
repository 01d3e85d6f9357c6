"""The hub: entries per step, isolation of monitors, bounded queues (RR9, L4, L7)."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from relax.config.load import load_config
from relax.core.error import ConfigError
from relax.services.monitors.hub import MonitorHub, build_monitors
from relax.services.monitors.thread import MonitorThread
from relax.services.outline import outline_of
from tests.services.recorder import Gated, Raising, Recorder, Waiting
from tests.services.story import story_config, story_directory, write_recipe


async def test_parts_of_a_step_are_merged_and_steps_stay_in_order() -> None:
    recorder = Recorder()
    hub = MonitorHub([("recorder", recorder)])
    hub.step(0, {"a": 1})
    hub.step(0, {"b": 2, "a": 3})
    hub.step(1, {"a": 4})
    await hub.close()
    assert recorder.entries == [(0, {"a": 3.0, "b": 2.0}), (1, {"a": 4.0})]
    assert recorder.closed == 1


async def test_what_comes_late_keeps_its_own_step() -> None:
    recorder = Recorder()
    hub = MonitorHub([("recorder", recorder)])
    hub.step(10, {"a": 1})
    hub.step(11, {"a": 2})
    hub.step(10, {"eval/heldout/reward": 0.5})
    await hub.close()
    assert recorder.entries == [(10, {"a": 1.0}), (10, {"eval/heldout/reward": 0.5}), (11, {"a": 2.0})]


async def test_samples_reach_every_monitor_after_the_metrics_of_earlier_steps() -> None:
    one, other = Recorder(), Recorder()
    hub = MonitorHub([("one", one), ("other", other)])
    hub.step(0, {"a": 1})
    sample = {"text": "2"}
    hub.samples(1, [sample, {"text": "3"}])
    sample["text"] = "changed"
    hub.samples(1, [])
    hub.step(1, {"a": 2})
    await hub.close()
    hub.samples(2, [{"text": "late"}])
    for recorder in (one, other):
        assert recorder.samples == [(1, ({"text": "2"}, {"text": "3"}))]
        assert recorder.calls == ["log 0", "log_samples 1", "log 1"]


async def test_rule_rr9_samples_are_bounded_and_isolated_as_metrics_are() -> None:
    slow, broken, told = Gated(), Raising(lambda: OSError("disk full"), samples=True), []
    hub = MonitorHub([("slow", slow), ("broken", broken)], report=told.append, max_waiting=4)
    hub.step(0, {"a": 0})
    hub.samples(1, [{"text": "0"}])
    assert slow.entered.wait(10)  # it holds step 0
    for step in range(1, 10):
        hub.samples(step, [{"text": f"{step}"}])
    assert hub.dropped["slow"] == 6
    slow.gate.set()
    await hub.close()
    assert slow.samples == [(step, ({"text": f"{step}"},)) for step in range(6, 10)]
    assert broken.samples == []
    assert broken.closed == 1
    assert sorted(message.split(",")[0] for message in told) == [
        "monitor 'broken' is switched off",
        "monitor 'slow' was too slow: 6 entries were dropped",
    ]
    assert "log_samples failed: OSError: disk full" in "".join(told)


async def test_a_quiet_step_is_logged_without_waiting_for_the_next_one() -> None:
    recorder = Gated()
    hub = MonitorHub([("recorder", recorder)], settle_s=0.0)
    running = asyncio.create_task(hub.run())
    hub.step(0, {"a": 1})
    assert await asyncio.to_thread(recorder.entered.wait, 10)
    recorder.gate.set()
    hub.step(0, {"b": 1})
    await hub.close()
    running.cancel()
    assert recorder.entries == [(0, {"a": 1.0}), (0, {"b": 1.0})]


async def test_the_loop_is_endless() -> None:
    hub = MonitorHub([])
    running = asyncio.create_task(hub.run())
    for step in range(3):
        hub.step(step, {"a": 1})
        await asyncio.sleep(0)
    assert not running.done()
    running.cancel()


async def test_closing_twice_and_logging_after_the_end_do_nothing() -> None:
    recorder = Recorder()
    hub = MonitorHub([("recorder", recorder)])
    hub.step(0, {"a": 1})
    await hub.close()
    hub.step(1, {"a": 1})
    await hub.close()
    assert recorder.entries == [(0, {"a": 1.0})]
    assert recorder.closed == 1


async def test_a_monitor_lives_on_a_thread_of_its_own() -> None:
    recorder = Recorder()
    hub = MonitorHub([("recorder", recorder)])
    hub.step(0, {"a": 1})
    await hub.close()
    assert recorder.thread not in (None, threading.current_thread())


@pytest.mark.parametrize("error", [lambda: OSError("disk full"), lambda: SystemExit(3), lambda: KeyboardInterrupt()])
async def test_rule_rr9_a_broken_monitor_is_switched_off_with_one_message(error: Callable[[], BaseException]) -> None:
    broken, well, told = Raising(error, at=1), Recorder(), []
    hub = MonitorHub([("broken", broken), ("well", well)], report=told.append)
    for step in range(5):
        hub.step(step, {"a": step})
    await hub.close()
    assert [step for step, _ in broken.entries] == [0]
    assert [step for step, _ in well.entries] == [0, 1, 2, 3, 4]
    assert len(told) == 1
    assert "'broken'" in told[0]
    assert type(error()).__name__ in told[0]
    assert broken.closed == 1


async def test_rule_rr9_a_slow_monitor_drops_its_oldest_and_says_how_many() -> None:
    slow, told = Gated(), []
    hub = MonitorHub([("slow", slow)], report=told.append, max_waiting=4)
    hub.step(0, {"a": 0})
    hub.step(1, {"a": 1})
    assert slow.entered.wait(10)  # it holds step 0
    for step in range(2, 10):
        hub.step(step, {"a": step})  # the last one stays pending until the end
    assert hub.dropped["slow"] == 4
    slow.gate.set()
    await hub.close()
    assert [step for step, _ in slow.entries[:1]] == [0]
    assert slow.entries[-1] == (9, {"a": 9.0})
    assert len(slow.entries) + hub.dropped["slow"] == 10
    assert [message for message in told if "dropped" in message] == told
    assert len(told) == 1


async def test_rule_rr9_a_monitor_that_hangs_is_left_behind_at_the_end() -> None:
    hung, told = Gated(), []
    hub = MonitorHub([("hung", hung)], report=told.append, close_timeout_s=0.05)
    hub.step(0, {"a": 1})
    hub.step(1, {"a": 1})
    await hub.close()
    assert len(told) == 1
    assert "'hung' did not end" in told[0]
    hung.gate.set()  # lets the thread of this test go


def test_rule_rr7_a_call_without_an_answer_counts_as_broken() -> None:
    told: list[str] = []
    thread = MonitorThread("waiting", Waiting(), told.append, call_timeout_s=0.01)
    thread.put(0, {"a": 1.0})
    thread.ended.result(10)
    assert len(told) == 1
    assert "no answer within 0.01 s" in told[0]
    thread.put(1, {"a": 1.0})
    assert thread.waiting == 0


def test_monitors_are_built_from_configuration(tmp_path: Path) -> None:
    config = load_config(
        [write_recipe(tmp_path)], ["monitors=[{type: jsonl}, {type: 'tests.services.recorder:Built'}, {type: jsonl}]"]
    )
    hub = build_monitors(config, story_directory(story_config(tmp_path)), outline_of(config))
    assert list(hub.dropped) == ["jsonl", "tests.services.recorder:Built", "jsonl#2"]


def test_a_monitor_that_does_not_exist_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'jsonl'"):
        load_config([write_recipe(tmp_path)], ["monitors=[{type: josnl}]"])
