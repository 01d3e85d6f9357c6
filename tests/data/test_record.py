"""From raw values to records, and what is refused for which reason."""

import json
import math
from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from relax.config.base import check_rules
from relax.core.message import Message, TextPart
from relax.data.dataset import Refusal
from relax.data.quarantine import Quarantine
from relax.data.record import json_ready, read_record
from relax.data.stream import PromptReader, PromptRules
from tests.data.toy import source_config

USER = {"role": "user", "content": "1+1="}


def record(value, **options):
    return read_record(value, source_config(path="a.jsonl", **options), 0)


def reason_of(value, **options):
    with pytest.raises(Refusal) as raised:
        record(value, **options)
    return raised.value.reason


def test_messages_may_hold_text_or_lists_of_parts():
    parts = [{"type": "text", "text": "1+"}, "1="]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": parts},
    ]
    read = record({"messages": messages, "reference": "2"})
    assert [message.role for message in read.messages] == ["system", "assistant", "tool"]
    assert read.messages[1].text == ""
    assert read.messages[2] == Message("tool", (TextPart("1+"), TextPart("1=")))


def test_the_prompt_key_may_hold_messages():
    assert record({"question": [USER], "reference": "2"}, prompt_key="question").messages[0].text == "1+1="


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (["a"], "not a record"),
        ("text", "not a record"),
        ({"reference": "1"}, "missing field"),
        ({"prompt": None, "reference": "1"}, "missing field"),
        ({"prompt": 5, "reference": "1"}, "mistyped field"),
        ({"prompt": "1", "messages": [USER], "reference": "1"}, "ambiguous prompt"),
        ({"messages": "1+1", "reference": "1"}, "mistyped field"),
        ({"messages": [], "reference": "1"}, "empty prompt"),
        ({"messages": ["1+1"], "reference": "1"}, "mistyped field"),
        ({"messages": [{"role": "bot", "content": "1"}], "reference": "1"}, "mistyped field"),
        ({"messages": [{"role": "user", "content": None}], "reference": "1"}, "mistyped field"),
        ({"messages": [{**USER, "tool_calls": []}], "reference": "1"}, "unknown message key"),
        ({"messages": [USER, {"role": "assistant", "content": "2"}], "reference": "1"}, "no turn to answer"),
        ({"messages": [{"role": "system", "content": "2"}], "reference": "1"}, "no turn to answer"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}], "reference": "1"}, "unsupported part"),
        ({"messages": [{"role": "user", "content": [7]}], "reference": "1"}, "unsupported part"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}], "reference": "1"}, "mistyped field"),
        ({"prompt": " \n", "reference": "1"}, "empty prompt"),
        ({"prompt": "1", "reference": "1", "extra_info": "x"}, "mistyped field"),
        ({"prompt": "1", "reference": "1", "level": 1, "extra_info": {"level": 2}}, "ambiguous metadata"),
        ({"prompt": "half \ud83d", "reference": "1"}, "unencodable text"),
        ({"prompt": "1", "reference": "1", "when": object()}, "mistyped field"),
    ],
)
def test_refusals(value, reason):
    assert reason_of(value) == reason


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("text", "052", "052"),
        ("text", 52, "52"),
        ("text", 0.5, "0.5"),
        ("number", 52, 52),
        ("number", " 52 ", 52),
        ("number", "1e3", 1000.0),
        ("json", {"a": [1]}, {"a": [1]}),
        ("json", False, False),
    ],
)
def test_reference_is_read_by_its_type(kind, given, expected):
    read = record({"prompt": "1", "reference": given}, reference_type=kind).reference
    assert read == expected
    assert type(read) is type(expected)


@pytest.mark.parametrize("value", [{"prompt": "1"}, {"prompt": "1", "reference": "unused"}])
def test_a_task_without_reference(value):
    read = record(value, reference_key=None)
    assert read.reference is None
    assert read.metadata == {key: item for key, item in value.items() if key == "reference"}


def test_null_is_an_absent_key_in_messages_and_parts():
    """Columns and dumps write null where a message lacks what another one has."""
    part = {"type": "text", "text": "1+1=", "image": None}
    read = record({"messages": [{"role": "user", "content": [part], "tool_calls": None}], "reference": "2"})
    assert read.messages == (Message("user", (TextPart("1+1="),)),)


def test_a_refusal_names_the_key():
    with pytest.raises(Refusal, match="mistyped field: 'when': a object is not a JSON value"):
        record({"prompt": "1", "reference": "1", "when": object()})


PAIR = {"fields": {"chosen": "good", "rejected": "bad"}}
REPLY = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    "good", ["2", [REPLY], [USER, REPLY], [{**USER, "tool_calls": None}, {"role": "assistant", "content": ["2"]}]]
)
def test_a_preference_is_a_pair_of_answers(good):
    read = record({"prompt": "1+1=", "good": good, "bad": "3", "reference": "kept"}, **PAIR)
    assert read.reference == {"chosen": "2", "rejected": "3"}
    assert read.metadata == {"reference": "kept"}


@pytest.mark.parametrize(
    ("good", "reason"),
    [
        (None, "missing field"),
        (2, "mistyped reference"),
        ([], "mistyped reference"),
        ([REPLY, USER], "mistyped reference"),
        ([{"role": "user", "content": "2+2="}, REPLY], "mistyped reference"),
        (["2"], "mistyped field"),
        ("3", "no preference"),
    ],
)
def test_a_bad_preference_is_refused(good, reason):
    assert reason_of({"prompt": "1+1=", "good": good, "bad": "3"}, **PAIR) == reason


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fields": {"chosen": "good"}}, "a preference needs both answers"),
        ({"fields": {"rejected": "bad"}}, "a preference needs both answers"),
        ({**PAIR, "reference_key": "answer"}, "a record has one reference"),
        ({"fields": {"chosen": "", "rejected": "b"}}, "at least 1 character"),
        ({"fields": {"choosen": "good"}}, "choosen"),
    ],
)
def test_half_a_preference_is_a_configuration_error(values, message):
    with pytest.raises(ValidationError, match=message):
        check_rules(source_config(path="a.jsonl", **values))


def test_a_whole_preference_is_a_valid_configuration():
    check_rules(source_config(path="a.jsonl", **PAIR))
    check_rules(source_config(path="a.jsonl", **PAIR, reference_key=None))


def test_json_ready_makes_plain_values():
    import numpy as np

    value = {"a": (1, math.nan), 2: np.float32(0.5), "c": np.array([1, 2]), "d": math.inf}
    assert json_ready(value) == {"a": [1, None], "2": 0.5, "c": [1, 2], "d": None}


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("fields", "options", "reason"),
    [
        ({"reference": str(10**400)}, {"reference_type": "number"}, "mistyped reference"),
        ({"reference": 10**400}, {"reference_type": "number"}, "mistyped reference"),
        ({"reference": "1e999"}, {"reference_type": "number"}, "mistyped reference"),
        ({"reference": 10**5000}, {"reference_type": "text"}, "too large a number"),
        ({"reference": "1", "tree": nested(600)}, {}, "nested too deep"),
        ({"reference": nested(600)}, {"reference_type": "json"}, "nested too deep"),
        ({"reference": "1", "half \ud83d": 1}, {}, "unencodable text"),
    ],
)
def test_values_that_overflow_are_refused_and_quarantined(tmp_path, fields, options, reason):
    assert reason_of({"prompt": "1", **fields}, **options) == reason
    config = source_config(path="a.jsonl", **options)
    quarantine = Quarantine(tmp_path / "quarantine.jsonl")
    reader = PromptReader(Given([{"prompt": "1", **fields}]), config, None, PromptRules(100), quarantine)
    assert reader.read(0, 0) is None
    (line,) = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"].startswith(f"{reason}: ")


def test_a_value_that_holds_itself_is_quarantined(tmp_path):
    value = {"prompt": "1", "reference": "1"}
    value["self"] = value
    quarantine = Quarantine(tmp_path / "quarantine.jsonl")
    reader = PromptReader(Given([value]), source_config(path="a.jsonl"), None, PromptRules(100), quarantine)
    assert reader.read(0, 0) is None
    assert quarantine.reasons(reader.config.name) == {"nested too deep": 1}


@dataclass
class Given:
    """A data set in memory."""

    values: list

    def read(self, index):
        return self.values[index]

    def location(self, index):
        return None
