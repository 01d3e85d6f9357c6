"""What the jsonl and tensorboard monitors leave in the run directory, also after a resume."""

import json
from pathlib import Path
from typing import Any

import pytest

from relax.services.directory import RunDirectory
from relax.services.monitors.config import JsonlConfig, TensorboardConfig
from relax.services.monitors.jsonl import JsonlMonitor
from relax.services.monitors.tensorboard import TensorboardMonitor
from relax.services.outline import RunOutline, StageOutline

OUTLINE = RunOutline("run", (StageOutline("rl", 0, 10),))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def jsonl(directory: RunDirectory) -> JsonlMonitor:
    return JsonlMonitor(JsonlConfig(), directory=directory, outline=OUTLINE)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


async def test_each_entry_is_a_whole_line_at_once(directory: RunDirectory) -> None:
    monitor = jsonl(directory)
    await monitor.log(3, {"reward/mean": 0.5})
    (line,) = lines(directory.metrics)
    assert line.pop("time") > 1e9
    assert line == {"step": 3, "reward/mean": 0.5}
    await monitor.log_samples(3, [{"text": "a"}, {"text": "ü"}])
    assert lines(directory.root / "samples.jsonl") == [{"step": 3, "text": "a"}, {"step": 3, "text": "ü"}]
    await monitor.close()


async def test_a_resumed_run_takes_back_what_it_trains_again_and_a_torn_line(directory: RunDirectory) -> None:
    first = jsonl(directory)
    for step in range(6):
        await first.log(step, {"a": step})
    await first.close()
    with directory.metrics.open("a") as file:
        file.write('{"step": 2, "a')
    second = jsonl(directory)
    await second.log(4, {"a": 40})
    await second.close()
    assert [(line["step"], line["a"]) for line in lines(directory.metrics)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]


def scalars(directory: RunDirectory) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory.tensorboard))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


async def test_tensorboard_reads_back_every_value_at_its_step(directory: RunDirectory) -> None:
    for steps in (range(6), range(4, 8)):
        monitor = TensorboardMonitor(TensorboardConfig(), directory=directory, outline=OUTLINE)
        for step in steps:
            await monitor.log(step, {"a": step + steps.start * 10.0})
        await monitor.log(steps.start, {"eval/heldout/reward": 0.5})
        await monitor.close()
    found = scalars(directory)
    assert found["a"] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 44.0), (5, 45.0), (6, 46.0), (7, 47.0)]
    assert found["eval/heldout/reward"] == [(0, 0.5), (4, 0.5)]
