"""From raw values to records, and what is refused for which reason."""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import ValidationError

from relax.config.base import check_rules
from relax.core.message import MediaPart, Message, TextPart
from relax.data.dataset import Refusal
from relax.data.generator import GeneratorDataSet
from relax.data.media.origin import Origins
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


# --- media -----------------------------------------------------------------------------------------------------------

MEDIA = {"media_keys": {"image": "images", "audio": "sounds"}, "reference_key": None}


def media_record(value, **options):
    return record(value, **{**MEDIA, **options})


def shown(read) -> list:
    """The parts of each message: text, or the type and uri of a medium."""
    return [
        [part.text if isinstance(part, TextPart) else (part.type, part.uri) for part in message.parts]
        for message in read.messages
    ]


def test_placeholders_are_filled_in_order_over_all_messages():
    messages = [
        {"role": "system", "content": "see <image>"},
        {"role": "user", "content": [{"type": "text", "text": "<audio>a<image>"}, "b"]},
        {"role": "assistant", "content": "I saw an <image>"},
        {"role": "user", "content": "<image>\nlast"},
    ]
    read = media_record({"messages": messages, "images": ["/1", "/2", "/3"], "sounds": ["/s"], "level": 2})
    assert shown(read) == [
        ["see ", ("image", "file:///1")],
        [("audio", "file:///s"), "a", ("image", "file:///2"), "b"],
        ["I saw an <image>"],
        [("image", "file:///3"), "\nlast"],
    ]
    assert read.metadata == {"level": 2}


def test_parts_that_hold_no_medium_are_placeholders():
    """As TRL's data sets have them; parts that hold one take nothing of the list."""
    content = [
        {"type": "image", "text": None},
        {"type": "image", "image": "/own"},
        {"type": "text", "text": "<image>"},
        {"type": "image", "max_pixels": 9},
    ]
    read = media_record({"prompt": [{"role": "user", "content": content}], "images": ["/1", {"path": "/2"}, "/3"]})
    assert shown(read) == [
        [("image", "file:///1"), ("image", "file:///own"), ("image", "file:///2"), ("image", "file:///3")]
    ]
    assert [dict(part.options) for part in read.messages[0].parts] == [{}, {}, {}, {"max_pixels": 9}]


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ({"prompt": "<image>"}, "the messages have 1 <image>, 'images' is absent or empty"),
        ({"prompt": "<image>", "images": None}, "the messages have 1 <image>, 'images' is absent or empty"),
        ({"prompt": "<image>", "images": []}, "the messages have 1 <image>, 'images' is absent or empty"),
        ({"prompt": "<image>", "images": ["/1", "/2"]}, "the messages have 1 <image>, 'images' holds 2"),
        ({"prompt": "<image><image>", "images": ["/1"]}, "the messages have 2 <image>, 'images' holds 1"),
        ({"prompt": "no word", "images": ["/1"]}, "the messages have 0 <image>, 'images' holds 1"),
        ({"prompt": "<audio>", "images": ["/1"]}, "the messages have 0 <image>, 'images' holds 1"),
    ],
)
def test_case_f8_placeholders_and_media_that_differ_are_refused(value, detail):
    with pytest.raises(Refusal) as raised:
        media_record(value)
    assert str(raised.value) == f"media and placeholders differ: {detail}"


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (None, "missing medium: 'images'[0]: there is null in place of an image"),
        (
            [],
            "mistyped medium: 'images'[0]: a list is not an image; expected a path, a URL, bytes, base64, {bytes, path},"
            " an array with its rate, or (for an image) a PIL image",
        ),
    ],
)
def test_case_f8_a_list_that_holds_nothing_in_place_of_a_medium_is_refused(item, told):
    with pytest.raises(Refusal) as raised:
        media_record({"prompt": "<image>", "images": [item]})
    assert str(raised.value) == told


@pytest.mark.parametrize(
    "options", [{}, {"media_keys": {"audio": "sounds"}}, {"media_keys": {}}], ids=["default", "audio only", "none"]
)
def test_case_f3_words_in_prose_are_text(options):
    prose = "In HTML <image> is no tag, and <video> is one.\n"
    read = record({"prompt": prose, "reference": "1"}, **options)
    assert read.messages == (Message("user", (TextPart(prose),)),)


def test_case_f3_only_the_exact_word_is_a_placeholder():
    prose = "<Image> < image> <images> &lt;image&gt; <video>"
    assert shown(media_record({"prompt": prose})) == [[prose]]


def test_case_f15_text_alone_in_a_source_with_media():
    for value in ({"prompt": "1+1="}, {"prompt": "1+1=", "images": None}, {"prompt": "1+1=", "images": []}):
        read = media_record(value)
        assert read.messages == (Message("user", (TextPart("1+1="),)),)
        assert read.metadata == {}


def test_case_f12_lists_of_parts_with_empty_contents_and_tool_calls():
    user = {"role": "user", "content": [{"type": "image", "image": "/1"}, {"type": "text", "text": "?"}]}
    messages = [
        user,
        {"role": "assistant", "content": "", "tool_calls": None},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": [{"type": "text", "text": ""}]},
        {"role": "tool", "content": [{"type": "image", "image": b"png"}]},
    ]
    read = media_record({"messages": messages})
    assert shown(read) == [[("image", "file:///1"), "?"], [""], [""], [""], [("image", "record:toy/0/0")]]
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "crop"}]}
    assert reason_of({"messages": [user, call, {"role": "tool", "content": "x"}]}, **MEDIA) == "unknown message key"


def test_case_g3_keys_that_columns_add_to_parts_say_nothing():
    nothing = {"bytes": None, "path": None}
    content = [
        {"type": "text", "text": "a", "image": nothing, "audio": None},
        {"type": "image", "text": None, "image": {"bytes": b"x", "path": None}, "audio": None},
    ]
    value = {"messages": [{"role": "user", "content": content}], "extra_info": math.nan, "sounds": math.nan}
    read = media_record(value)
    assert shown(read) == [["a", ("image", "record:toy/0/0")]]
    assert read.metadata == {}


def test_a_refused_medium_names_its_key():
    content = [{"type": "image", "image": None, "audio": "/x"}]
    with pytest.raises(Refusal, match="unknown media option: 'messages': audio; options of an image are max_pixels"):
        media_record({"messages": [{"role": "user", "content": content}]})
    with pytest.raises(Refusal, match="missing medium: a part of type 'video' holds none, and media_keys names no key"):
        media_record({"messages": [{"role": "user", "content": [{"type": "video"}]}]})
    with pytest.raises(Refusal, match="mistyped field: 'thumbnail': a bytes is not a JSON value; name a key"):
        media_record({"prompt": "1", "thumbnail": b"x"})


def test_a_preference_about_an_image():
    user = {"role": "user", "content": [{"type": "image", "image": b"png"}, {"type": "text", "text": "?"}]}
    pair = {"good": [user, {"role": "assistant", "content": "2"}], "bad": "3"}
    read = record({"prompt": [user], **pair}, **PAIR)
    assert read.reference == {"chosen": "2", "rejected": "3"}
    asked = {"role": "user", "content": "<image>?"}
    pair = {"good": [asked, {"role": "assistant", "content": "2"}], "bad": "the <image>"}
    read = record({"prompt": "<image>?", "images": ["/1"], **pair}, **PAIR, media_keys={"image": "images"})
    assert shown(read) == [[("image", "file:///1"), "?"]]
    assert read.reference == {"chosen": "2", "rejected": "the <image>"}
    drawn = [{"role": "assistant", "content": [{"type": "image", "image": "/1"}]}]
    assert reason_of({"prompt": "1", "good": drawn, "bad": "3"}, **PAIR) == "mistyped reference"


class Plain:
    """A renderer to measure with."""

    def encode(self, messages, generate=True):
        return type("Encoded", (), {"token_ids": "".join(message.text for message in messages)})

    def lost_characters(self, messages):
        return "".join(character for message in messages for character in message.text if character == "\u20ac")


def read_all(values, rules, quarantine, **options):
    config = source_config(path="a.jsonl", **{**MEDIA, **options})
    reader = PromptReader(Given(values), config, Plain(), rules, quarantine)
    return [reader.read(index, 0) for index in range(len(values))]


def test_without_data_media_a_record_that_holds_one_is_refused(tmp_path):
    quarantine = Quarantine(tmp_path / "quarantine.jsonl")
    values = [{"prompt": "<image>", "images": ["/1"]}, {"prompt": "text"}, {"prompt": "<video> in prose"}]
    found = read_all(values, PromptRules(100), quarantine)
    assert [prompt is None for prompt in found] == [True, False, False]
    (line,) = map(json.loads, (tmp_path / "quarantine.jsonl").read_text().splitlines())
    assert line["reason"] == "text only: the record holds image, which is read only with data.media set"


def test_with_data_media_text_is_measured_and_checked_and_media_are_for_later(tmp_path):
    quarantine = Quarantine(tmp_path / "quarantine.jsonl")
    rules = PromptRules(10, system_prompt="Look.", media=Origins())
    values = [
        {"prompt": "<image>", "images": ["a.png"]},
        {"prompt": "<image> \u20ac", "images": ["a.png"]},
        {"prompt": "12345"},
        {"prompt": "123456"},
        {"prompt": "<image>", "images": [b"content"]},
    ]
    found = read_all(values, rules, quarantine)
    assert [prompt is None for prompt in found] == [False, True, False, True, False]
    assert [message.role for message in found[0].messages] == ["system", "user"]
    assert found[0].messages[1].parts == (MediaPart("image", f"file://{Path.cwd()}/a.png"),)
    assert found[4].messages[1].parts == (MediaPart("image", "record:toy/4/0"),)
    assert rules.media.medium("record:toy/4/0").value == b"content"
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert reasons == [
        "unencodable text: the tokenizer has no tokens for '\u20ac'",
        "over-long prompt: 11 tokens, data.max_prompt_tokens is 10",
    ]


def test_the_excerpt_of_a_refused_record_does_not_print_its_media(tmp_path):
    quarantine = Quarantine(tmp_path / "quarantine.jsonl")
    value = {"prompt": "<image>", "images": [b"x" * (50 << 20), "data:," + "y" * (50 << 20)]}
    start_s = time.perf_counter()
    assert read_all([value], PromptRules(10, media=Origins()), quarantine) == [None]
    assert time.perf_counter() - start_s < 1
    (line,) = map(json.loads, (tmp_path / "quarantine.jsonl").read_text().splitlines())
    assert line["excerpt"].startswith('{"prompt": "<image>", "images": ["52428800 bytes", "data:,yyyy')


def test_a_generators_media_are_part_of_its_digest():
    """Of their content, not of where they lie in memory: the next process must find the same data set."""
    import numpy as np
    from PIL import Image

    def digest(pixel: int, content: bytes) -> str:
        array = np.zeros((40, 40, 3), np.uint8)
        array[30, 30] = pixel
        return GeneratorDataSet(
            source_config(
                type="generator",
                function="tests.data.test_record:made",
                args={"values": [{"a": array, "b": Image.fromarray(array), "c": content}]},
            )
        ).digest

    assert digest(0, b"x") == digest(0, b"x")
    assert len({digest(0, b"x"), digest(1, b"x"), digest(0, b"y")}) == 3


def made(seed, values):
    yield from values
