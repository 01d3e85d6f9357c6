"""Data sets, cursor, streams, mixtures and the quarantine."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from relax.core.error import DataError, UserError
from relax.core.message import PromptKey, prompt_from_json, prompt_to_json, text_message
from relax.data.cursor import Cursor, seeded_order
from relax.data.quarantine import Quarantine
from relax.data.stream import PromptRules, read_prompts
from tests.data.toy import char_renderer, problems, reader_of, source_config, stream_of, write_lines

RULES = PromptRules(max_prompt_tokens=64)


class Letters:
    """A user's own data set, named by import path."""

    digest = "letters"

    def __init__(self, config, *, seed):
        self.letters = config.args["letters"]

    def __len__(self):
        return len(self.letters)

    def read(self, index):
        return {"prompt": self.letters[index], "reference": np.int64(index)}

    def location(self, index):
        return None


def endless(seed):
    while True:
        yield {"prompt": "1", "reference": "1"}


def failing(seed):
    yield {"prompt": "1", "reference": "1"}
    raise ValueError("no more paper")


def take(source, count):
    iterator = iter(source)
    return [next(iterator) for _ in range(count)]


def entries(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(config, **options):
    options = {"renderer": char_renderer(), "rules": RULES, "quarantine": Quarantine(), **options}
    return read_prompts(config, **options)


# --- data sets -------------------------------------------------------------------------------------------------------


def test_lines_are_found_after_blank_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "1", "reference": 1}\r\n\n  \n{"prompt": "2", "reference": 2}')
    prompts = read(source_config(path=str(path)))
    assert [prompt.messages[0].text for prompt in prompts] == ["1", "2"]
    assert [prompt.key.record for prompt in prompts] == [0, 1]


@pytest.mark.parametrize("pattern", ["nothing.jsonl", "*.jsonl", "."])
def test_a_path_without_data_is_an_error(tmp_path, pattern):
    with pytest.raises(DataError, match="no data at"):
        read(source_config(path=str(tmp_path / pattern)))


def test_a_file_of_another_kind_is_an_error(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,b\n")
    with pytest.raises(DataError, match=r"expected one of \.jsonl, \.json"):
        read(source_config(path=str(path)))


def test_a_broken_array_names_its_file(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('[{"prompt": "1"}, ')
    with pytest.raises(DataError, match=r"data\.json' is not one JSON array"):
        read(source_config(path=str(path)))


def test_a_file_that_changes_under_the_run_is_an_error(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *problems(3))
    stream = stream_of(source_config(path=str(path)))
    next(stream)
    write_lines(path, *problems(4))
    with pytest.raises(DataError, match=r"a\.jsonl' changed while it is in use"):
        next(stream)


def test_a_file_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", *problems(3))

    def refuse(self, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(DataError, match=r"cannot read .*a\.jsonl': Permission denied"):
        read(source_config(path=str(path)))


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="'toy' holds no record"):
        next(stream_of(source_config(path=str(write_lines(tmp_path / "a.jsonl")))))


def test_a_data_set_of_the_users_own():
    config = source_config(type="tests.data.test_source:Letters", args={"letters": "abc"})
    assert [(prompt.messages[0].text, prompt.reference) for prompt in read(config)] == [
        ("a", "0"),
        ("b", "1"),
        ("c", "2"),
    ]


def test_a_generator_gives_the_same_records_to_every_run():
    config = source_config(type="generator", function="relax.data.arithmetic:addition", args={"count": 20})
    first, again, other = (read(config, seed=seed) for seed in (1, 1, 2))
    assert [p.messages for p in first] == [p.messages for p in again] != [p.messages for p in other]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("tests.data.test_source:failing", "ValueError: no more paper"),
        ("tests.data.test_source:endless", "must be finite"),
        ("tests.data.toy:numbered", "count"),
    ],
)
def test_a_generator_that_fails_is_told_with_its_source(function, message, monkeypatch):
    monkeypatch.setattr("relax.data.generator.MAX_RECORDS", 100)
    with pytest.raises(DataError, match=message) as raised:
        read(source_config(type="generator", function=function))
    assert "'toy'" in str(raised.value)


def test_a_function_that_does_not_exist_is_named():
    with pytest.raises(UserError, match="no_such_function"):
        read(source_config(type="generator", function="tests.data.toy:no_such_function"))


@pytest.mark.parametrize(
    "values",
    [
        {"weight": 0},
        {"weight": -1},
        {"weight": float("inf")},
        {"weight": 1e300},
        {"path": ""},
        {"reference_type": "units"},
        {"type": "generator", "function": "f"},
    ],
)
def test_configuration_is_checked(values):
    with pytest.raises(ValidationError):
        source_config(**{"path": "a.jsonl", **values} if values.get("type") is None else values)


# --- cursor ----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 40), seed=st.integers(0, 2**63 - 1), stops=st.lists(st.integers(1, 30), max_size=4))
def test_each_pass_visits_every_record_once_whatever_the_restarts(size, seed, stops):
    def make():
        return Cursor("s", seed=seed, size=size, digest="d", shuffle=True)

    cursor, seen = make(), []
    for stop in [*stops, 3 * size]:
        for _ in range(stop):
            seen.append((cursor.pass_number, cursor.advance()))
        state = json.loads(json.dumps(cursor.state()))
        cursor = make()
        cursor.restore(state)
    whole = seen[: len(seen) - len(seen) % size]
    assert sorted(whole) == [(number, index) for number in range(len(whole) // size) for index in range(size)]


def test_order_is_seeded_and_changes_with_pass_and_source():
    def passes(source, seed):
        cursor = Cursor(source, seed=seed, size=50, digest="d", shuffle=True)
        indices = [cursor.advance() for _ in range(100)]
        return tuple(indices[:50]), tuple(indices[50:])

    assert passes("a", 1) == passes("a", 1)
    assert len({*passes("a", 1), *passes("b", 1), *passes("a", 2)}) == 6


def test_the_order_of_a_seed_is_fixed_for_ever():
    assert seeded_order(8, 1234).tolist() == [7, 3, 0, 1, 4, 2, 5, 6]


@pytest.mark.parametrize("change", [{"position": 9}, {"pass": -1}, {"position": -1}])
def test_a_state_outside_the_data_is_refused(change):
    cursor = Cursor("s", seed=0, size=9, digest="d", shuffle=False)
    with pytest.raises(DataError, match="has no record"):
        cursor.restore({**cursor.state(), **change})


def test_saving_a_state_reads_no_record_and_costs_no_digest(tmp_path, monkeypatch):
    stream = stream_of(source_config(path=str(write_lines(tmp_path / "a.jsonl", *problems(9)))))
    next(stream)
    (tmp_path / "a.jsonl").unlink()
    assert all(len(json.dumps(stream.state())) < 300 for _ in range(1000))


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_prompt_carries_key_task_reference_and_metadata(tmp_path):
    line = {"prompt": "1+1=", "reference": "2", "level": 3, "extra_info": {"topic": "sums"}}
    [prompt] = take(stream_of(source_config(path=str(write_lines(tmp_path / "a.jsonl", line)))), 1)
    assert prompt.key == PromptKey("toy", 0, 0)
    assert (prompt.task, prompt.reference) == ("sum", "2")
    assert prompt.metadata == {"level": 3, "topic": "sums"}
    assert prompt_from_json(json.loads(json.dumps(prompt_to_json(prompt)))) == prompt


def test_order_of_the_file_without_shuffle(tmp_path):
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *problems(5))), shuffle=False)
    assert [prompt.key.record for prompt in take(stream_of(config), 7)] == [0, 1, 2, 3, 4, 0, 1]


def test_system_prompt_is_prepended_once(tmp_path):
    own = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "1"}], "reference": 1}
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *problems(1), own)))
    plain, with_own = read(config, rules=PromptRules(64, system_prompt="Be brief."))
    assert plain.messages == (text_message("system", "Be brief."), text_message("user", "0+0="))
    assert [message.text for message in with_own.messages] == ["own", "1"]


def test_the_limit_counts_the_rendered_prompt(tmp_path):
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *problems(1))))
    length = len(char_renderer().encode([text_message("user", "0+0=")]).token_ids)
    assert len(read(config, rules=PromptRules(length))) == 1
    with pytest.raises(DataError, match=f"1 x over-long prompt \\(e.g. {length} tokens"):
        read(config, rules=PromptRules(length - 1))


def test_read_prompts_gives_usable_records_in_file_order(tmp_path):
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", "broken", *problems(6))))
    assert [prompt.key.record for prompt in read(config, max_records=3)] == [1, 2, 3]


def test_a_source_without_usable_records_names_the_reasons(tmp_path):
    lines = ["{broken", "{broken too", {"prompt": "", "reference": "1"}]
    stream = stream_of(source_config(path=str(write_lines(tmp_path / "a.jsonl", *lines))))
    with pytest.raises(DataError, match="none of its 3 records") as raised:
        next(stream)
    assert "2 x broken JSON" in str(raised.value)
    assert "1 x empty prompt" in str(raised.value)


# --- quarantine ------------------------------------------------------------------------------------------------------


def test_refused_records_are_written_once_over_passes_and_resumed_runs(tmp_path):
    path = tmp_path / "run" / "quarantine.jsonl"
    lines = [*problems(2), "{broken", {"prompt": "x" * 300, "reference": "1"}]
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *lines)))
    for _ in range(2):
        quarantine = Quarantine(path)
        prompts = take(stream_of(config, quarantine=quarantine), 8)
        assert sorted(prompt.key.record for prompt in prompts) == [0] * 4 + [1] * 4
        assert quarantine.reasons("toy") == {"broken JSON": 1, "over-long prompt": 1}
    broken, long = sorted(entries(path), key=lambda entry: entry["index"])
    assert broken["source"] == "toy"
    assert (broken["index"], broken["line"], broken["excerpt"]) == (2, "a.jsonl:3", "{broken")
    assert broken["reason"].startswith("broken JSON: ")
    assert (long["index"], long["line"]) == (3, "a.jsonl:4")
    assert len(long["excerpt"]) == 200


def test_a_record_read_again_from_a_restored_cursor_is_written_once(tmp_path):
    path = tmp_path / "quarantine.jsonl"
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *problems(3), "{broken", "{too")))
    stream = stream_of(config, quarantine=Quarantine(path))
    start = stream.state()
    expected = take(stream, 5)
    for quarantine in (None, Quarantine(path)):  # again in the same run, and in a resumed one
        again = stream if quarantine is None else stream_of(config, quarantine=quarantine)
        again.restore(start)
        assert take(again, 5) == expected
    assert sorted(entry["index"] for entry in entries(path)) == [3, 4]


def test_another_reason_at_the_same_place_is_another_line(tmp_path):
    path, data = tmp_path / "quarantine.jsonl", tmp_path / "a.jsonl"
    config = source_config(path=str(write_lines(data, *problems(1), "{broken")))
    read(config, quarantine=Quarantine(path))
    write_lines(data, *problems(1), {"prompt": "", "reference": "1"})
    quarantine = Quarantine(path)
    read(config, quarantine=quarantine)
    assert [entry["reason"].partition(":")[0] for entry in entries(path)] == ["broken JSON", "empty prompt"]
    assert quarantine.reasons("toy") == {"broken JSON": 1, "empty prompt": 1}


def test_a_torn_last_line_of_the_quarantine_is_mended(tmp_path):
    path = tmp_path / "quarantine.jsonl"
    path.write_text('{"source": "toy", "index"')
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", "{broken", *problems(1))))
    read(config, quarantine=Quarantine(path))
    assert json.loads(path.read_text().splitlines()[1])["index"] == 0


@pytest.mark.parametrize("where", ["folder", "file/quarantine.jsonl"])
def test_a_quarantine_that_cannot_be_written_is_told_at_the_start(tmp_path, where):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *problems(1))))
    with pytest.raises(DataError, match="cannot write refused records"):
        next(stream_of(config, quarantine=Quarantine(tmp_path / where)))


def test_nothing_is_opened_before_it_is_used(tmp_path):
    reader = reader_of(source_config(path=str(tmp_path / "later.jsonl")), quarantine=Quarantine(tmp_path / "q.jsonl"))
    assert not list(tmp_path.iterdir())
    write_lines(tmp_path / "later.jsonl", *problems(1))
    assert reader.read(0, 0).reference == "0"
