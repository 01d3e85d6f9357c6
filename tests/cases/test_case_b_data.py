"""Cases of section B (resume) that the data cursor answers."""

import json
import random
from collections import Counter

import pytest

from relax.core.error import DataError
from relax.data.config import LearnabilityConfig
from relax.data.mixture import Mixture
from tests.data.toy import (
    bpe_tokenizer,
    problems,
    renderer_of,
    source_config,
    stream_of,
    write_lines,
    write_parquet,
)


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


def test_case_b1_holds_for_a_file_of_row_groups(tmp_path):
    config = source_config(type="parquet", path=str(write_parquet(tmp_path / "a.parquet", problems(7))))
    stream = stream_of(config)
    for _ in range(7):
        next(stream)
    resumed = stream_of(config)
    resumed.restore(saved(stream))
    assert sorted(next(resumed).key.record for _ in range(7)) == list(range(7))


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


def mixed(sources, seed=5):
    """A mixture of a file, a Parquet file and made problems, whose weights follow the rewards."""
    streams = {
        config.name: stream_of(
            config, seed=seed, renderer=renderer_of(bpe_tokenizer(), stops=("<|im_end|>",)), max_prompt_tokens=5000
        )
        for config in sources
    }
    return Mixture(streams, {"lines": 3.0, "rows": 2.0, "made": 0.5}, curriculum=LearnabilityConfig(rate=0.2))


@pytest.fixture
def sources(tmp_path):
    records = [*problems(5), {"prompt": "", "reference": "1"}]
    return [
        source_config(name="lines", path=str(write_lines(tmp_path / "a.jsonl", *problems(7), "{broken"))),
        source_config(name="rows", type="parquet", path=str(write_parquet(tmp_path / "a.parquet", records))),
        source_config(name="made", type="reasoning_gym", dataset="leg_counting", size=3),
    ]


def test_case_b4_kills_at_random_points_change_no_prompt_of_a_mixture_that_learns(sources):
    """What was drawn and observed since the last snapshot is drawn and observed again, from the journal's point of view."""

    def rewards(key):
        return [float((key.record + key.pass_number + sibling) % 3 == 0) for sibling in range(4)]

    def draw(source):
        key = next(source).key
        source.observe(key, rewards(key))
        return key

    uninterrupted = mixed(sources)
    expected = [draw(uninterrupted) for _ in range(300)]
    choose = random.Random(4)
    seen, state = [], saved(mixed(sources))
    while len(seen) < 250:
        source = mixed(sources)
        source.restore(state)
        done = [draw(source) for _ in range(choose.randrange(1, 30))]
        if choose.random() < 0.6:
            seen, state = seen + done, saved(source)
    assert seen == expected[: len(seen)]
    assert len(set(expected)) == 300


@pytest.mark.parametrize("lines", [problems(6), problems(8), [*problems(6), {"prompt": "6+0=", "reference": "7"}]])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_case_b5_a_changed_data_set_is_refused_with_what_changed(tmp_path, kind, lines):
    write = {"jsonl": lambda path, records: write_lines(path, *records), "parquet": write_parquet}[kind]
    path = tmp_path / f"a.{kind}"
    config = source_config(type=kind, path=str(write(path, problems(7))))
    state = saved(stream_of(config))
    write(path, lines)
    with pytest.raises(DataError, match="'toy' is not the data set of the saved state: ") as raised:
        stream_of(config).restore(state)
    message = str(raised.value)
    assert ("the number of records (records) was 7, now" in message) == (len(lines) != 7)
    assert "the content (digest) was" in message
    assert "data.accept_changes=true" in message


def test_case_b5_a_change_that_is_accepted_begins_the_next_pass(tmp_path):
    path = tmp_path / "a.jsonl"
    config = source_config(path=str(write_lines(path, *problems(7))))
    stream = stream_of(config)
    drawn = {next(stream).key for _ in range(10)}
    state = saved(stream)
    write_lines(path, *problems(9))
    for _ in range(2):  # a resume may be interrupted too
        resumed = stream_of(config)
        resumed._accept_changes = True
        resumed.restore(state)
        keys = [next(resumed).key for _ in range(9)]
        assert len(resumed.accepted) == 2
        assert {key.pass_number for key in keys} == {2}
        assert sorted(key.record for key in keys) == list(range(9))
        assert not drawn & set(keys)
    plain = stream_of(config)
    plain.restore(saved(resumed))
    assert plain.accepted == ()
    assert next(plain).key.pass_number == 3


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
