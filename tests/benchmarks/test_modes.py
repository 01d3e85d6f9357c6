"""The bounds of `benchmarks.modes`, its emulated part in small, and what its tables say."""

import pytest

from benchmarks import long_answer
from benchmarks.alone import StageSeconds
from benchmarks.bound import StageTimes, Window
from benchmarks.colocation import (
    ASSUMED,
    DEVICES,
    SWITCH,
    SwitchedRecurrence,
    best_split,
    colocated_profile,
    emulate_modes,
)
from benchmarks.modes import Result, emulated_aims, emulated_rows, modes, real_aims, real_rows
from relax.data import arithmetic

STAGES = StageSeconds(
    generate=4.0,
    groups=(1.0, 2.0, 3.0, 4.0),
    train=(1.0, 1.0),
    tokens=100.0,
    update=0.1,
    snapshot=0.2,
    publish=0.3,
    load=0.4,
)


def test_in_turn_everything_adds_up() -> None:
    assert STAGES.in_turn == pytest.approx(4.0 + 2.0 + 0.1 + 0.2 + 0.3 + 0.4)


def test_streaming_hides_the_micro_batches_whose_groups_are_whole_early() -> None:
    # The first is trained from 2 s on, the second from 4 s.
    assert STAGES.streamed == pytest.approx(5.0 + 0.6 + 0.4)


def test_asynchronous_is_the_busier_side() -> None:
    assert STAGES.overlapped == pytest.approx(4.4)
    assert STAGES.trained_on(300.0).overlapped == pytest.approx(6.0 + 0.6)


def test_every_core_is_a_device_and_threads_are_tried_up_to_their_number() -> None:
    assert [mode.threads for mode in modes(2)] == [1, 2, 1, 1, 1]
    assert [mode.threads for mode in modes(4)] == [1, 2, 4, 1, 1, 1]
    assert {mode.max_staleness for mode in modes(2) if mode.name != "asynchronous"} == {0}


def test_long_answers_are_the_quickstarts_with_dots() -> None:
    plain = list(arithmetic.addition(0, digits=1, count=5))
    long = list(long_answer.addition(0, dots=4, digits=1, count=5))
    assert [record["prompt"] for record in long] == [record["prompt"] for record in plain]
    assert [record["reference"] for record in long] == [f"{record['reference']}...." for record in plain]


def test_a_colocated_step_is_its_rollout_its_training_and_the_switch() -> None:
    def requests(number: int) -> tuple[list[float], bool]:
        return [3.0, 5.0], False

    times = StageTimes(2, reward_s=0.0, reference_s=0.0, train_s=1.0)
    window = Window(1, 0, 2, streaming=False)
    step = 5.0 + 2.0 + SWITCH
    assert SwitchedRecurrence(requests, times, window).run() == [step, 2 * step]


def test_a_split_uses_all_devices_and_gives_the_dearest_stage_most() -> None:
    profile = colocated_profile(ASSUMED, 4, mean_s=10.0)
    split = best_split(profile)
    assert split.rollout + split.reference + split.trainer == DEVICES
    assert best_split(colocated_profile(ASSUMED, 4, mean_s=40.0)).rollout > split.rollout


def test_the_emulated_modes_keep_to_their_bounds_in_the_expected_order() -> None:
    found = {one.mode: one for one in emulate_modes(ASSUMED, steps=3)}
    assert all(abs(one.ratio - 1) < 0.05 for one in found.values())
    assert found["asynchronous"].measured < found["colocated"].measured < found["separate, whole steps"].measured
    assert found["separate, streaming"].measured < found["separate, whole steps"].measured
    results = list(found.values())
    assert all(aim.met for aim in emulated_aims(results))
    rows = {row[1]: row for row in emulated_rows(results)}
    assert (rows["colocated"][5], rows["asynchronous"][6], rows["separate, streaming"][6]) == ("1.00", "1.76", "1.12")


def test_the_real_table_compares_with_one_thread_and_aims_name_what_is_missed() -> None:
    def result(mode: str, seconds: float, accuracy: float = 0.9) -> Result:
        return Result(mode, seconds, seconds / 1.05, accuracy, 100, 10.0)

    results = [
        result("colocated, 1 thread", 3.0),
        result("colocated, 2 threads", 2.0),
        result("asynchronous", 1.9, 0.86),
    ]
    assert [row[5] for row in real_rows(results)] == ["1.00", "1.50", "1.58"]
    missed = [aim.name for aim in real_aims(results) if not aim.met]
    assert missed == ["colocated with its best threads / asynchronous", "spread of final accuracy"]
