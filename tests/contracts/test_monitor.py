"""What every monitor does, the shipped ones and the one that tests use."""

from collections.abc import Callable
from pathlib import Path

import pytest

from relax.config.base import ComponentConfig
from relax.core.protocol import Monitor
from relax.services.directory import RunDirectory
from relax.services.monitors.table import MONITORS
from relax.services.outline import RunOutline, StageOutline
from tests.services.recorder import Recorder

OUTLINE = RunOutline("run", (StageOutline("rl", 0, 10),))


@pytest.fixture(params=[*MONITORS.entries, "recorder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Monitor]:
    def build() -> Monitor:
        if request.param == "recorder":
            return Recorder()
        config: ComponentConfig = MONITORS.config_class(request.param)(type=request.param)
        return MONITORS.component(request.param)(config, directory=RunDirectory(tmp_path / "run"), outline=OUTLINE)  # type: ignore[no-any-return]

    return build


@pytest.fixture
def monitor(make: Callable[[], Monitor]) -> Monitor:
    return make()


def test_building_one_does_no_input_or_output(make: Callable[[], Monitor], tmp_path: Path) -> None:
    make()
    assert list(tmp_path.iterdir()) == []


async def test_it_takes_steps_samples_and_an_end(monitor: Monitor) -> None:
    assert await monitor.log(0, {"reward/mean": 0.5, "idle/trainer": 0.1}) is None
    assert await monitor.log_samples(0, [{"prompt": "1+1=", "text": "2 [bold]", "reward": None}]) is None
    assert await monitor.close() is None


async def test_an_earlier_step_an_empty_entry_and_no_samples_are_fine(monitor: Monitor) -> None:
    await monitor.log(5, {"reward/mean": 0.5})
    await monitor.log(3, {"eval/heldout/reward": 0.5})
    await monitor.log(5, {})
    await monitor.log_samples(5, [])
    assert await monitor.close() is None


async def test_closing_one_that_logged_nothing_and_closing_twice_are_fine(monitor: Monitor) -> None:
    await monitor.close()
    assert await monitor.close() is None


async def test_a_second_one_goes_on_where_the_first_ended(make: Callable[[], Monitor]) -> None:
    for step in (0, 1):
        monitor = make()
        await monitor.log(step, {"reward/mean": 0.5})
        assert await monitor.close() is None
