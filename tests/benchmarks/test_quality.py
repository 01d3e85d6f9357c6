"""The arithmetic of the learning benchmarks, on results written by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.omni import Outcome, largest_fall
from benchmarks.omni import aims_of as media_aims
from benchmarks.staleness_quality import SETTINGS, Plan, Result, accuracies, aims_of, table_of
from benchmarks.trl import Story, common_reward, exact


def result(setting: str, seed: int, bound: int, accuracy: float, violations: int = 0) -> Result:
    return Result(setting, seed, bound, accuracy, 1.0, bound / 2, bound, violations, True)


RESULTS = [
    result("naive", 0, 0, 0.6),
    result("naive", 1, 0, 0.4),
    result("naive", 0, 8, 0.1),
    result("naive", 1, 8, 0.2),
    result("ratio", 0, 8, 0.5),
    result("ratio", 1, 8, 0.4),
]


def test_the_run_at_zero_stands_for_every_setting() -> None:
    assert accuracies(RESULTS, "naive") == pytest.approx({0: 0.5, 8: 0.15})
    assert accuracies(RESULTS, "ratio") == pytest.approx({0: 0.5, 8: 0.45})


def test_the_naive_loss_should_degrade_and_the_corrected_one_should_not() -> None:
    naive, ratio, sound = aims_of(RESULTS, ("naive", "ratio"))
    assert (naive.better, naive.met, ratio.better, ratio.met, sound.met) == ("higher", True, "lower", True, True)
    worse = [*RESULTS[:4], result("ratio", 0, 8, 0.1, violations=1), result("ratio", 1, 8, 0.2)]
    assert [aim.met for aim in aims_of(worse, ("naive", "ratio"))] == [True, False, False]


def test_the_table_has_a_line_per_bound() -> None:
    assert table_of(RESULTS, ("naive", "ratio")) == [
        ["0", "0.500 (age 0.0)", "0.500 (age 0.0)"],
        ["8", "0.150 (age 4.0)", "0.450 (age 4.0)"],
    ]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_a_recipe_that_loads(setting: str, tmp_path: Path) -> None:
    plan = Plan(tmp_path, 12, 2, 12, 8)
    config = plan.configure("run", 0, *(f"stages.rl.{override}" for override in SETTINGS[setting]))
    assert config.stages[1].algorithm.corrects_staleness is (setting != "naive")


def test_a_reward_is_reached_when_the_mean_of_five_steps_is() -> None:
    story = Story("toy", [1.0] * 8, [1.0] * 8, [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    assert story.time_to(0.2) == 6.0
    assert story.time_to(0.6) == 8.0
    assert story.time_to(0.7) == float("inf")


def test_one_lucky_first_step_does_not_count() -> None:
    assert Story("toy", [1.0] * 6, [1.0] * 6, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]).time_to(0.5) == float("inf")


def test_the_common_reward_is_the_highest_that_all_reached() -> None:
    stories = [Story("a", [1.0] * 6, [1.0] * 6, [0.5] * 6), Story("b", [1.0] * 6, [1.0] * 6, [0.3] * 6)]
    assert common_reward(stories) == pytest.approx(0.3)


def test_the_peer_gets_the_same_reward_function() -> None:
    assert exact(["250", " 251"], ["250", "250"]) == [1.0, 0.0]


def test_the_largest_fall_is_below_the_best_window_before_it() -> None:
    rising = [0.1 * step for step in range(10)]
    assert largest_fall(rising, window=2) == 0.0
    assert largest_fall([*rising, 0.5, 0.5, 1.0, 1.0], window=2) == pytest.approx(0.85 - 0.5)
    assert largest_fall([1.0, 0.0], window=3) == 0.0


def test_a_recipe_with_media_has_to_need_them() -> None:
    good = Outcome("omni-video", [(0, 0.0), (200, 0.5), (2000, 0.95)], 0.5, {"no-video": 0.3}, 0.02, 2000, 20.0, True)
    assert all(aim.met for aim in media_aims(good))
    guessed = replace(good, blank={"no-video": 0.9})
    assert [aim.name for aim in media_aims(guessed) if not aim.met] == ["omni-video: held-out reward, no-video"]
