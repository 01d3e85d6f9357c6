"""The garbage collector of a run: quieter, still at work, and as it was afterwards."""

import gc
import weakref

import pytest

from relax.runtime.collector import THRESHOLDS, calm_collector


class Node:
    """A piece of cyclic garbage."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_there_is_set_aside_and_what_comes_later_is_still_found() -> None:
    before = gc.get_threshold()
    with calm_collector():
        assert gc.get_threshold() == THRESHOLDS
        assert gc.get_freeze_count() > 10_000  # the interpreter's own objects at least
        node = weakref.ref(Node())
        gc.collect()
        assert node() is None
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_what_comes_and_goes_with_a_step_is_not_walked() -> None:
    with calm_collector():
        before = [generation["collections"] for generation in gc.get_stats()]
        for _ in range(3):
            rows = [{"cells": [number]} for number in range(30_000)]
            del rows
        assert [generation["collections"] for generation in gc.get_stats()] == before


def test_an_error_inside_leaves_the_collector_as_it_was() -> None:
    before = gc.get_threshold()
    with pytest.raises(RuntimeError, match="the run failed"), calm_collector():
        raise RuntimeError("the run failed")
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


def test_hosts_of_one_process_share_it_until_the_last_leaves() -> None:
    before = gc.get_threshold()
    first, second = calm_collector(), calm_collector()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == THRESHOLDS
    assert gc.get_freeze_count() > 0
    second.__exit__(None, None, None)
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)
