"""What the console monitor shows, in a terminal and in a log."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from relax.services.directory import RunDirectory
from relax.services.monitors.config import ConsoleConfig
from relax.services.monitors.console import ConsoleMonitor, duration, progress_line, progress_table
from relax.services.monitors.progress import WINDOW, Progress
from relax.services.outline import RunOutline, StageOutline
from tests.services.story import STEPS, WARM_UP, heldout_at, step_metrics

OUTLINE = RunOutline("story", (StageOutline("warm-up", 0, WARM_UP), StageOutline("rl", WARM_UP, STEPS)))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def progress_after(steps: int, seconds: float = 2.0) -> tuple[Progress, float]:
    progress = Progress(OUTLINE, 0.0)
    for step in range(steps):
        progress.update(step, step_metrics(step), (step + 1) * seconds)
        if step % 10 == 0:
            progress.update(step, {"eval/heldout/reward": heldout_at(step)}, (step + 1) * seconds)
    return progress, steps * seconds


def test_a_view_of_an_rl_stage() -> None:
    progress, now = progress_after(50)
    view = progress.view(now)
    assert (view.stage, view.stage_number, view.num_stages) == ("rl", 2, 2)
    assert (view.step, view.total, view.stage_step, view.stage_steps) == (50, 60, 30, 40)
    rewards = [step_metrics(step)["reward/mean"] for step in range(50 - WINDOW, 50)]
    assert view.reward == pytest.approx(sum(rewards) / WINDOW)
    assert view.evaluations == (("heldout", heldout_at(40), 40),)
    assert (view.staleness, view.tokens_per_second) == (1.0, 1049.0)
    assert view.idle == (("engine-0", 0.25), ("trainer", 0.4))
    assert view.left_s == pytest.approx(20.0)
    assert progress.view(now + 5).left_s == pytest.approx(15.0)
    assert progress.view(now + 500).left_s == 0.0


def test_a_new_stage_forgets_what_the_one_before_measured_but_not_the_evaluations() -> None:
    progress, now = progress_after(20)
    progress.update(20, {"step/seconds": 1.0}, now)
    view = progress.view(now)
    assert (view.stage, view.loss, view.idle, view.left_s, view.reward_steps) == ("rl", None, (), None, 0)
    assert view.evaluations == (("heldout", heldout_at(10), 10),)


def test_an_engine_that_has_left_idles_no_more() -> None:
    progress, now = progress_after(50)
    progress.update(50, {"idle/engine-1": 0.5, "idle/trainer": 0.1}, now)
    progress.update(50, {"train/loss": 2.0}, now)
    assert progress.view(now).idle == (("engine-1", 0.5), ("trainer", 0.1))


def test_an_evaluation_neither_finishes_a_step_nor_goes_back() -> None:
    progress, now = progress_after(50)
    progress.update(60, {"eval/heldout/reward": 0.99}, now)
    assert progress.view(now).step == 50
    progress.update(3, {"reward/mean": 0.0}, now)
    assert progress.view(now).step == 50
    assert progress.view(now).stage == "rl"


def test_what_the_state_keeps_is_bounded() -> None:
    progress = Progress(RunOutline("long", (StageOutline("rl", 0, 100_000),)), 0.0)
    for step in range(10_000):
        progress.update(step, step_metrics(30), float(step))
    assert len(progress._rewards) <= WINDOW
    assert len(progress._pace) <= WINDOW + 1
    assert progress._values.keys() == step_metrics(30).keys()


def test_a_line_fits_80_columns_and_says_what_matters() -> None:
    progress, now = progress_after(50)
    line = progress_line(progress.view(now))
    assert max(map(len, line.splitlines())) <= 80
    for part in (
        "step 50/60 rl",
        "reward 0.7",
        f"heldout {heldout_at(40):.3f}@40",
        "stale 1",
        "1,049 tok/s",
        "0:20 left",
        "trainer 40%",
    ):
        assert part in line


def test_a_line_of_a_supervised_stage_has_a_loss_and_nothing_of_a_rollout() -> None:
    progress, now = progress_after(5)
    line = progress_line(progress.view(now))
    assert "loss 1.920" in line
    assert "0:30 left in stage" in line
    assert not re.search("reward|stale|tok/s|None|nan", line)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("steps", [0, 1, 20, 21, 60])
def test_the_table_fits_the_terminal(width: int, steps: int) -> None:
    progress, now = progress_after(steps)
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(progress_table(progress.view(now), width - 3))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width - 3
    text = " ".join(lines)
    assert f"step {steps} of 60" in text
    assert "None" not in text
    if steps == 60 and width >= 80:
        assert "heldout" in text
        assert "staleness max 1" in text
        assert "trainer 40%" in text


def monitor_on(console: Console, clock: Clock, **options: object) -> ConsoleMonitor:
    config = ConsoleConfig(**options)  # type: ignore[arg-type]
    return ConsoleMonitor(config, directory=RunDirectory(Path("unused")), outline=OUTLINE, console=console, clock=clock)


async def lines_of(**options: object) -> list[str]:
    """The lines of a log of the whole story, one step a second."""
    clock, console = Clock(), Console(file=io.StringIO(), width=80, force_terminal=False)
    monitor = monitor_on(console, clock, **options)
    for step in range(STEPS):
        clock.now += 1
        await monitor.log(step, step_metrics(step))
    await monitor.log(STEPS, {"eval/heldout/reward": 0.9})
    await monitor.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    return [line for line in text.splitlines() if line.startswith("step")]


async def test_a_log_gets_a_line_every_few_seconds_and_at_turning_points() -> None:
    lines = await lines_of(every_s=10)
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert steps == [1, 11, 21, 31, 41, 51, 60, 60]
    assert "rl" in lines[2]
    assert lines[-1].count("heldout 0.900@60") == 1


async def test_a_log_gets_a_line_every_few_steps() -> None:
    lines = await lines_of(every_steps=25)
    assert [int(line.split("/")[0].removeprefix("step ")) for line in lines] == [1, 21, 46, 60, 60]


async def test_the_last_step_is_shown_even_if_no_line_was_due() -> None:
    clock, console = Clock(), Console(file=io.StringIO(), width=80, force_terminal=False)
    monitor = monitor_on(console, clock)
    for step in range(3):
        await monitor.log(step, step_metrics(step))
    await monitor.close()
    assert "step 3/60" in console.file.getvalue()  # type: ignore[attr-defined]


async def test_a_terminal_gets_a_live_table_that_is_left_standing() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    monitor = monitor_on(console, Clock())
    for step in range(STEPS):
        await monitor.log(step, step_metrics(step))
    await monitor.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert "step 60 of 60" in text
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (42, "0:42"), (725, "12:05"), (11229, "3:07:09")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
