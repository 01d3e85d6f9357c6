"""Cases of section B (checkpoint and resume) that concern training backends."""

from pathlib import Path

from relax.training.config import AdamWConfig, LinearConfig
from relax.training.torch_backend import TorchBackend
from tests.training.setting import LOSS, make_backend, make_rows

ROWS = make_rows()


def stage(seed: int = 0) -> TorchBackend:
    return make_backend(seed, optimizer=AdamWConfig(lr=0.5), schedule=LinearConfig(warmup_steps=3), total_steps=8)


def rates(backend: TorchBackend, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        backend.forward_backward([[tuple(ROWS[:2])]], LOSS)
        found.append(backend.optim_step(1.0).learning_rate)
    return found


def test_case_b7_the_learning_rate_after_a_resume_is_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    uninterrupted = rates(stage(), 8)
    assert len(set(uninterrupted)) > 5
    for stop in (1, 3, 5):
        first = stage()
        before = rates(first, stop)
        first.save(str(tmp_path / str(stop)))
        second = stage(seed=1)
        second.load(str(tmp_path / str(stop)))
        assert before + rates(second, 8 - stop) == uninterrupted


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
