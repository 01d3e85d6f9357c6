"""The benchmarks that run services: tiny sizes, exact facts on virtual time."""

import asyncio

import pytest

from benchmarks.bus import KINDS, TOKEN_COLUMNS, Case, tensor_rows, time_case, time_small, token_rows
from benchmarks.controller import aims_of, classes, measure
from benchmarks.emulation import EmulatedRun, Profile, emulate
from benchmarks.pipeline import Setting, calibrate, compare
from benchmarks.pipeline import measure as measure_pipeline
from benchmarks.stopwatch import Stopwatch


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_goes_through_the_bus(kind: str) -> None:
    rows = Case("rows", TOKEN_COLUMNS, token_rows(16, 32, ragged=True))
    tensors = Case("tensors", ("tensor",), tensor_rows(6, 1 << 17), clients=3, per_put=1)
    for case in (rows, tensors):  # it asserts that what readers saw is all there is
        assert asyncio.run(time_case(case, kind)) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_small_rows_are_timed_one_by_one(kind: str) -> None:
    assert len(asyncio.run(time_small(kind, 3))) == 3


def test_regular_rows_have_the_bytes_that_the_page_says() -> None:
    assert Case("rows", TOKEN_COLUMNS, token_rows(4, 4096, ragged=False)).num_bytes == 4 * 4096 * 9


def test_an_emulated_run_trains_all_that_it_was_asked_for() -> None:
    profile = Profile(steps=3, groups_per_step=2, group_size=4, filtered=0.5)

    def facts(run: EmulatedRun) -> tuple[int, int, int]:
        return len(run.published), len(run.durations), run.ledger.counts()["trained"]

    steps, requests, trained = emulate(profile, facts)
    assert (steps, trained) == (3, 6)
    assert requests >= 4 * 6


def test_on_policy_without_streaming_takes_exactly_what_its_stages_take() -> None:
    result = measure_pipeline(Setting(0, False), 2, calibrate(steps=20))
    assert result.slack == pytest.approx(1.0, abs=0.01)
    assert result.measured == pytest.approx(result.bound, rel=0.01)


def test_a_slow_trainer_is_the_floor() -> None:
    profile = Profile(steps=10, groups_per_step=2, group_size=4, train_s=10.0, mean_s=0.5, max_staleness=2)
    result = emulate(profile, lambda run: compare(run, Setting(2)))
    assert result.stage == "training"
    assert result.measured == pytest.approx(80.0, rel=1e-6)


def test_the_calibrated_rollout_takes_its_share() -> None:
    result = measure_pipeline(Setting(0, False), 8, calibrate())
    assert 80 < result.measured < 125


def test_the_controller_benchmark_finds_every_class_it_times() -> None:
    assert set(classes()) == {"gate", "bus", "journal", "ledger"}


def test_costs_of_every_part_are_counted_and_add_up() -> None:
    cost = measure(2, 64)
    assert set(cost.parts) >= {"bus", "gate", "journal", "ledger"}
    assert cost.total == pytest.approx(sum(cost.parts.values()))
    assert cost.total < cost.whole
    (small, growth) = aims_of({2: cost, 4: cost})[1:]
    assert (small.value, growth.value, growth.met) == (cost.total, 1.0, True)


class Toy:
    """Calls that call one another."""

    def outer(self) -> int:
        return self.inner() + self.inner()

    def inner(self) -> int:
        return 1

    async def wait(self) -> int:
        await asyncio.sleep(0)
        return self.inner()


def test_time_inside_a_timed_call_belongs_to_the_inner_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr("benchmarks.stopwatch.time.thread_time", lambda: float(next(ticks)))
    watch, plain = Stopwatch(), Toy.outer
    with watch.watching({"toy": (Toy,)}):
        assert Toy().outer() == 2
        assert asyncio.run(Toy().wait()) == 1
    assert Toy.outer is plain
    assert dict(watch.calls) == {"toy.outer": 1, "toy.inner": 3, "toy.wait": 1}
    # Between marks a second passes: outer has three pieces, each inner one, wait one before its sleep and two around inner.
    assert dict(watch.seconds) == {"toy.outer": 3.0, "toy.inner": 3.0, "toy.wait": 3.0}
    assert watch.by_part() == {"toy": 9.0}


def test_an_error_passes_through_a_timed_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        async def fail(self) -> None:
            await asyncio.sleep(0)
            raise LookupError("as it was")

    watch = Stopwatch()
    with watch.watching({"toy": (Failing,)}), pytest.raises(LookupError, match="as it was"):
        asyncio.run(Failing().fail())
    assert watch.calls == {"toy.fail": 1}
