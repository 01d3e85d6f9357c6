"""Cases of section B (resume) that the data cursor answers."""

import json
import random
from collections import Counter

import pytest

from relax.core.error import DataError
from tests.data.toy import problems, source_config, stream_of, write_lines


@pytest.fixture
def config(tmp_path):
    lines = [*problems(7), "{broken", {"prompt": "x" * 500, "reference": "1"}]
    return source_config(path=str(write_lines(tmp_path / "a.jsonl", *lines)))


def saved(stream):
    return json.loads(json.dumps(stream.state()))


def test_case_b1_a_state_saved_after_the_last_record_gives_the_full_next_pass(tmp_path):
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *problems(7))))
    stream = stream_of(config)
    first = [next(stream).key for _ in range(7)]
    state = saved(stream)
    resumed = stream_of(config)
    resumed.restore(state)
    second = [next(resumed).key for _ in range(7)]
    assert (state["pass"], state["position"]) == (1, 0)
    assert {key.pass_number for key in second} == {1}
    assert sorted(key.record for key in second) == sorted(key.record for key in first) == list(range(7))
    assert second == [next(stream).key for _ in range(7)]


def test_case_b2_restore_works_before_and_after_iter(config):
    stream = stream_of(config)
    for _ in range(4):
        next(stream)
    state = saved(stream)
    expected = [next(stream).key for _ in range(5)]
    late = stream_of(config)
    iterator = iter(late)
    late.restore(state)
    used = stream_of(config)
    used_iterator = iter(used)
    next(used_iterator)
    used.restore(state)
    early = stream_of(config)
    early.restore(state)
    for resumed in (iterator, used_iterator, iter(early)):
        assert [next(resumed).key for _ in range(5)] == expected


def test_case_b4_kills_at_random_points_change_no_multiset(config):
    uninterrupted = stream_of(config, seed=5)
    expected = Counter(next(uninterrupted).key for _ in range(700))
    choose = random.Random(4)
    seen: list = []
    state = saved(stream_of(config, seed=5))
    for _ in range(100):
        stream = stream_of(config, seed=5)
        stream.restore(state)
        done = []
        for _ in range(choose.randrange(1, 6)):
            done.append(next(stream).key)
            if choose.random() < 0.6:  # a snapshot: what was read since the last one is read again after a kill
                seen, done, state = seen + done, [], saved(stream)
    stream = stream_of(config, seed=5)
    stream.restore(state)
    seen += [next(stream).key for _ in range(700 - len(seen))]
    assert Counter(seen) == expected
    assert max(expected.values()) == 1


@pytest.mark.parametrize("lines", [problems(6), problems(8), [*problems(6), {"prompt": "6+0=", "reference": "7"}]])
def test_case_b5_a_changed_data_set_is_refused(tmp_path, lines):
    path = tmp_path / "a.jsonl"
    config = source_config(path=str(write_lines(path, *problems(7))))
    state = saved(stream_of(config))
    write_lines(path, *lines)
    with pytest.raises(DataError, match=r"'toy' is not the data set of the saved state .*digest"):
        stream_of(config).restore(state)


@pytest.mark.parametrize(("change", "seed"), [({}, 1), ({"shuffle": False}, 0), ({"name": "other"}, 0)])
def test_case_b5_another_order_is_refused_too(tmp_path, change, seed):
    path = str(write_lines(tmp_path / "a.jsonl", *problems(7)))
    state = saved(stream_of(source_config(path=path)))
    with pytest.raises(DataError, match="saved state"):
        stream_of(source_config(path=path, **change), seed=seed).restore(state)


def test_case_b5_a_changed_generator_is_refused():
    def make(start):
        args = {"count": 5, "start": start}
        return stream_of(source_config(type="generator", function="tests.data.toy:numbered", args=args))

    with pytest.raises(DataError, match="digest"):
        make(1).restore(saved(make(0)))
