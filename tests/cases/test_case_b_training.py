"""Cases of section B (checkpoint and resume) that concern training backends."""

from pathlib import Path

import pytest

from relax.training.config import AdamWConfig, CosineConfig, LinearConfig, ScheduleConfig, TorchConfig
from relax.training.torch_backend import TorchBackend
from tests.training.setting import FROZEN, LORA, LOSS, make_backend, make_rows

ROWS = make_rows()
WHOLE = TorchConfig(device="cpu")
LINE = LinearConfig(warmup_steps=3)


def stage(seed: int = 0, config: TorchConfig = WHOLE, schedule: ScheduleConfig = LINE) -> TorchBackend:
    return make_backend(seed, optimizer=AdamWConfig(lr=0.5), schedule=schedule, total_steps=8, config=config)


def rates(backend: TorchBackend, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        backend.forward_backward([[tuple(ROWS[:2])]], LOSS)
        found.append(backend.optim_step(1.0).learning_rate)
    return found


@pytest.mark.parametrize("config", [WHOLE, FROZEN, LORA], ids=["whole", "frozen", "lora"])
@pytest.mark.parametrize("schedule", [LinearConfig(warmup_steps=3), CosineConfig(warmup_steps=3)], ids=["line", "wave"])
def test_case_b7_the_learning_rate_after_a_resume_is_that_of_an_uninterrupted_run(
    config: TorchConfig, schedule: ScheduleConfig, tmp_path: Path
) -> None:
    uninterrupted = rates(stage(0, config, schedule), 8)
    assert len(set(uninterrupted)) > 5
    for stop in (1, 3, 5):
        first = stage(0, config, schedule)
        before = rates(first, stop)
        first.capture().write(str(tmp_path / str(stop)))
        second = stage(0, config, schedule)
        second.load(str(tmp_path / str(stop)))
        assert before + rates(second, 8 - stop) == uninterrupted


def test_case_b7_a_run_resumed_several_times_subtracts_the_warm_up_once(tmp_path: Path) -> None:
    """Within the warm-up each time: a schedule that began again at each resume would never end it."""
    expected, found = rates(stage(), 4), []
    for stop in range(4):
        backend = stage()
        if stop:
            backend.load(str(tmp_path / str(stop)))
        found += rates(backend, 1)
        backend.capture().write(str(tmp_path / str(stop + 1)))
    assert found == expected


def test_case_b7_the_schedule_counts_optimizer_steps_not_calls_or_no_ops() -> None:
    backend = stage()
    expected = rates(stage(), 2)
    for _ in range(3):
        backend.forward_backward([[tuple(ROWS[:2])]], LOSS)
    first = backend.optim_step(1.0).learning_rate
    for _ in range(4):
        backend.forward_backward([[()]], LOSS)
        backend.optim_step(0.0)
    assert [first, *rates(backend, 1)] == expected
