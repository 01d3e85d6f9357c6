"""What the jsonl and tensorboard monitors leave in the run directory, also after a resume."""

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
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


async def test_a_resumed_run_keeps_the_evaluation_of_the_weights_that_it_begins_with(directory: RunDirectory) -> None:
    first = jsonl(directory)
    for step in range(7):
        await first.log(step, {"a": step, "eval/heldout/reward": step / 10})
        await first.log_samples(step, [{"text": f"first {step}"}])
    await first.close()
    second = jsonl(directory)
    await second.log(4, {"a": 40})
    await second.log_samples(5, [{"text": "second 5"}])
    await second.close()
    found = [(line["step"], line.get("a"), line.get("eval/heldout/reward")) for line in lines(directory.metrics)]
    assert found == [(0, 0, 0.0), (1, 1, 0.1), (2, 2, 0.2), (3, 3, 0.3), (4, None, 0.4), (4, 40, None)]
    samples = [line["text"] for line in lines(directory.root / "samples.jsonl")]
    assert samples == ["first 0", "first 1", "first 2", "first 3", "second 5"]


async def test_an_evaluation_that_is_repeated_at_once_stands_there_once(directory: RunDirectory) -> None:
    for value in (0.1, 0.2):
        monitor = jsonl(directory)
        await monitor.log(0, {"eval/heldout/reward": value})
        await monitor.log(0, {"a": 1})
        await monitor.close()
    assert [line.get("eval/heldout/reward") for line in lines(directory.metrics)] == [0.2, None]


async def test_a_file_that_is_no_list_of_entries_is_begun_again(directory: RunDirectory) -> None:
    directory.metrics.write_text('[1]\n7\n{"step": "x"}\n{"step": 1, "a": 1}\n')
    monitor = jsonl(directory)
    await monitor.log(2, {"a": 2})
    await monitor.close()
    assert [line["step"] for line in lines(directory.metrics)] == [1, 2]


@pytest.fixture(autouse=True)
def each_event_file_has_a_second_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads event files in order of their names: the second that they began, then a counter without zeros in front."""
    from tensorboard.summary.writer import event_file_writer

    seconds = itertools.count(int(time.time()))
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: float(next(seconds))))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


async def test_tensorboard_reads_back_every_value_at_its_step(directory: RunDirectory) -> None:
    for steps in (range(6), range(4, 8)):
        monitor = TensorboardMonitor(TensorboardConfig(), directory=directory, outline=OUTLINE)
        for step in steps:
            await monitor.log(step, {"a": step + steps.start * 10.0})
        await monitor.close()
    assert scalars(directory.tensorboard) == {
        "a": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 44.0), (5, 45.0), (6, 46.0), (7, 47.0)]
    }


async def test_tensorboard_keeps_the_evaluation_of_the_weights_that_a_resume_begins_with(
    directory: RunDirectory,
) -> None:
    def monitor() -> TensorboardMonitor:
        return TensorboardMonitor(TensorboardConfig(), directory=directory, outline=OUTLINE)

    first = monitor()
    for step in range(6):
        await first.log(step, {"eval/heldout/reward": step / 4})
        await first.log(step, {"a": step})
    await first.close()
    second = monitor()
    await second.log(4, {"a": 40})
    await second.close()
    assert scalars(directory.tensorboard) == {"a": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]}
    kept = [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert scalars(directory.tensorboard / "eval") == {"eval/heldout/reward": kept}
    third = monitor()  # one that evaluates those weights again
    await third.log(4, {"eval/heldout/reward": 2.0})
    await third.close()
    assert scalars(directory.tensorboard / "eval") == {"eval/heldout/reward": [*kept[:4], (4, 2.0)]}


async def test_tensorboard_shows_samples_as_text(directory: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = TensorboardMonitor(TensorboardConfig(), directory=directory, outline=OUTLINE)
    await monitor.log_samples(3, [{"prompt": "1+1=", "text": "2"}])
    await monitor.close()
    accumulator = EventAccumulator(str(directory.tensorboard))
    accumulator.Reload()
    (event,) = accumulator.Tensors("sample/0/text_summary")
    assert event.step == 3
    assert event.tensor_proto.string_val[0].decode() == "**prompt** 1+1=\n\n**text** 2"
