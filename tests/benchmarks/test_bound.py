"""The recurrence of `benchmarks.bound` against schedules worked out by hand."""

from collections.abc import Sequence

import pytest

from benchmarks.bound import Recurrence, StageTimes, Window, resource_floor

FREE = StageTimes(slots=2, reward_s=0.0, reference_s=0.0, train_s=0.0)


def published(
    durations: Sequence[Sequence[float]], times: StageTimes, window: Window, filtered: frozenset[int] = frozenset()
) -> list[float]:
    def requests(number: int) -> tuple[Sequence[float], bool]:
        return durations[number % len(durations)], number in filtered

    return Recurrence(requests, times, window).run()


def test_on_policy_steps_follow_one_another() -> None:
    times = StageTimes(2, 0.0, 0.0, train_s=1.0)
    # Two siblings of 3 and 5 s on two slots, then 2 rows of 1 s each.
    assert published([[3.0, 5.0]], times, Window(1, 0, 3, streaming=True)) == [7.0, 14.0, 21.0]


def test_streaming_trains_the_first_group_while_the_second_runs() -> None:
    times = StageTimes(2, 0.0, 0.0, train_s=2.0)
    durations = [[1.0], [4.0]]
    assert published(durations, times, Window(2, 0, 1, streaming=True)) == [6.0]
    assert published(durations, times, Window(2, 0, 1, streaming=False)) == [8.0]


def test_the_judge_and_the_reference_delay_a_group() -> None:
    times = StageTimes(2, reward_s=0.5, reference_s=0.25, train_s=0.0)
    assert published([[1.0, 1.0]], times, Window(1, 0, 1, streaming=True)) == [2.0]


def test_a_window_of_one_keeps_the_slots_busy() -> None:
    times = StageTimes(1, 0.0, 0.0, train_s=4.0)
    on_policy = published([[4.0]], times, Window(1, 0, 4, streaming=True))
    one_off = published([[4.0]], times, Window(1, 1, 4, streaming=True))
    assert on_policy == [8.0, 16.0, 24.0, 32.0]
    assert one_off == [8.0, 12.0, 16.0, 20.0]


def test_a_step_waits_for_a_group_that_is_due_and_not_for_one_that_is_not() -> None:
    durations = [[10.0], [1.0], [1.0], [1.0], [1.0], [1.0]]
    # With S = 1 the long group may still be trained by step 1, so step 0 takes the short one; step 1 has to wait.
    assert published(durations, FREE, Window(1, 1, 2, streaming=True)) == [1.0, 10.0]
    assert published(durations, FREE, Window(1, 0, 2, streaming=True)) == [10.0, 11.0]


def test_a_filtered_group_gives_its_place_to_another() -> None:
    assert published([[2.0]], FREE, Window(1, 0, 1, streaming=True), frozenset({0})) == [4.0]


def test_endless_filtering_is_an_error_of_its_own() -> None:
    with pytest.raises(ValueError, match="every group filtered"):
        Recurrence(lambda number: ([], number > 0), FREE, Window(2, 0, 1, streaming=True), most_admitted=50).run()


def test_the_floor_is_what_each_stage_needs() -> None:
    times = StageTimes(4, reward_s=0.1, reference_s=0.2, train_s=0.5)
    assert resource_floor(80.0, trained=20, judged=40, steps=2, times=times) == {
        "rollout": 10.0,
        "reward": 2.0,
        "reference": 2.0,
        "training": 5.0,
    }
