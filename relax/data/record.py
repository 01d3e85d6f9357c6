"""From the raw value of one record to a typed `Record`, or a `Refusal` that says what is wrong with it.

Called by `PromptStream` and `read_prompts` for every record. Nothing is guessed or filled in: a value is taken as it is,
converted by a written rule (`reference_type`), or the record is refused.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from typing import get_args

from relax.core.message import Json, MediaPart, Message, Part, Role, TextPart, text_message
from relax.core.protocol import Record
from relax.data.config import SourceConfig
from relax.data.dataset import Refusal
from relax.data.media.placeholder import fill_placeholders
from relax.data.media.reference import PART_TYPES, RecordMedia, message_keys, read_media_lists

ROLES: tuple[str, ...] = get_args(Role)
ANSWERED_ROLES = ("user", "tool")
"""The policy answers these, so a prompt ends with one of them."""
MAX_DEPTH = 64
"""Levels of lists and mappings that a record may nest."""
MAX_INTEGER_BITS = 8192
"""Integers up to here have a decimal form in Python, whose limit is 4300 digits."""


def read_record(value: Json, config: SourceConfig, index: int, media: RecordMedia | None = None) -> Record:
    """The record with position `index` in its source; `media` makes the references to its media. Raises Refusal."""
    media = media or RecordMedia(f"record:{config.name}/{index}")
    lifted = _lift_media(value, config, media)
    plain = _plain_record(lifted, skip=frozenset(config.media_keys.values()))
    messages = _read_conversation(plain, config)
    lists = read_media_lists(media, lifted, config)
    return Record(
        source=config.name,
        index=index,
        task=config.task,
        messages=fill_placeholders(messages, lists, config.media_keys),
        reference=_read_reference(plain, config, messages),
        metadata=_read_metadata(plain, config),
    )


def _lift_media(value: Json, config: SourceConfig, media: RecordMedia) -> dict[str, Json]:
    """The record with references in place of the media among its messages."""
    if not isinstance(value, Mapping):
        raise Refusal("not a record", f"expected a mapping of keys to values, found {_kind(value)}")
    lifted = dict(value)
    for key in message_keys(config):
        if key in lifted:
            try:
                lifted[key] = media.lift(lifted[key])
            except Refusal as refusal:
                raise Refusal(refusal.reason, f"{key!r}: {refusal.detail}") from refusal
    return lifted


def _plain_record(value: Mapping[str, Json], skip: frozenset[str]) -> dict[str, Json]:
    """The record as plain JSON values, without the keys in `skip`. A Refusal names the key whose value is the reason."""
    plain = {}
    for key, item in value.items():
        if key in skip:
            continue
        try:
            plain[json_ready(str(key))] = json_ready(item, 1)
        except Refusal as refusal:
            raise Refusal(refusal.reason, f"{key!r}: {refusal.detail}") from refusal
    return plain


def json_ready(value: Json, depth: int = 0) -> Json:
    """`value` as plain JSON values; NaN and infinities become None, references to media stay.

    Raises Refusal for what JSON has no form for, for integers that Python will not print, and for what nests over MAX_DEPTH levels.
    """
    if depth > MAX_DEPTH:
        raise Refusal("nested too deep", f"more than {MAX_DEPTH} levels of lists and mappings")
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise Refusal("too large a number", f"an integer of {value.bit_length()} bits, at most {MAX_INTEGER_BITS}")
    if value is None or isinstance(value, bool | int | MediaPart):
        return value
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise Refusal("unencodable text", f"half of a surrogate pair in {value[:40]!r}")
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {json_ready(str(key)): json_ready(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item, depth + 1) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return json_ready(value.tolist(), depth + 1)
    hint = "; name a key that holds media in media_keys" if isinstance(value, bytes) else ""
    raise Refusal("mistyped field", f"a {type(value).__name__} is not a JSON value{hint}")


def _read_conversation(value: dict[str, Json], config: SourceConfig) -> tuple[Message, ...]:
    present = [key for key in (config.prompt_key, config.messages_key) if value.get(key) is not None]
    if len(set(present)) == 2:
        raise Refusal("ambiguous prompt", f"both {present[0]!r} and {present[1]!r} are set; keep one of them")
    if not present:
        raise _missing(f"{config.prompt_key!r} (or {config.messages_key!r})", config.prompt_key, value)
    key = present[0]
    content = value[key]
    if isinstance(content, str) and key == config.prompt_key:
        messages: tuple[Message, ...] = (text_message("user", content),)
    elif isinstance(content, list):
        messages = tuple(_read_message(item) for item in content)
    else:
        raise Refusal("mistyped field", f"{key!r} must be text or a list of messages, found {_kind(content)}")
    if not messages:
        raise Refusal("empty prompt", f"{key!r} holds no message")
    if messages[-1].role not in ANSWERED_ROLES:
        raise Refusal(
            "no turn to answer", f"the last message is the {messages[-1].role}'s; it must be a user or tool turn"
        )
    if not messages[-1].media and not messages[-1].text.strip():
        raise Refusal("empty prompt", "the last message is empty")
    return messages


def _read_message(item: Json) -> Message:
    if not isinstance(item, dict):
        raise Refusal("mistyped field", f"a message must be a mapping with role and content, found {_kind(item)}")
    role = item.get("role")
    if role not in ROLES:
        raise Refusal("mistyped field", f"message role {role!r} is not one of {', '.join(ROLES)}")
    # Null is how columns and dumps write that a message lacks what another one has (case G3).
    ignored = sorted(key for key in item if key not in ("role", "content") and item[key] is not None)
    if ignored:
        raise Refusal("unknown message key", f"{', '.join(ignored)}; a message has role and content")
    content = item.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, str):
        return text_message(role, content)
    if isinstance(content, list):
        return Message(role, tuple(_read_part(part) for part in content))
    raise Refusal("mistyped field", f"the {role}'s content must be text or a list of parts, found {_kind(content)}")


def _read_part(item: Json) -> Part:
    if isinstance(item, str):
        return TextPart(item)
    if isinstance(item, MediaPart):
        return item
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in PART_READERS:
        known = ", ".join((*PART_READERS, *PART_TYPES))
        raise Refusal("unsupported part", f"part type {kind!r} is not one of {known}")
    return PART_READERS[kind]({key: value for key, value in item.items() if value is not None})


def _read_text_part(item: dict[str, Json]) -> TextPart:
    if set(item) != {"type", "text"} or not isinstance(item["text"], str):
        raise Refusal("mistyped field", f"a text part has exactly type and text, found {sorted(item)}")
    return TextPart(item["text"])


PART_READERS: dict[str, Callable[[dict[str, Json]], Part]] = {"text": _read_text_part}
"""One reader for each type of part that a record may hold, beside those that are media."""


def _read_reference(value: dict[str, Json], config: SourceConfig, messages: tuple[Message, ...]) -> Json:
    if config.preference is not None:
        return _read_preference(value, config.preference, messages)
    key = config.reference_key
    if key is None:
        return None
    if value.get(key) is None:
        if config.reference_optional:
            return None
        raise _missing(f"{key!r} (set reference_key: null for a task without)", key, value)
    return REFERENCE_READERS[config.reference_type](value[key])


def _read_preference(value: dict[str, Json], keys: tuple[str, str], messages: tuple[Message, ...]) -> Json:
    """{chosen, rejected}, two answers as text."""
    answers = []
    for key in keys:
        if value.get(key) is None:
            raise _missing(repr(key), key, value)
        answers.append(_read_answer(key, value[key], messages))
    if answers[0] == answers[1]:
        raise Refusal("no preference", f"{keys[0]!r} and {keys[1]!r} hold the same answer")
    return {"chosen": answers[0], "rejected": answers[1]}


def _read_answer(key: str, answer: Json, messages: tuple[Message, ...]) -> str:
    """An answer given as text, as the assistant's message, or as the whole conversation that it ends."""
    if isinstance(answer, str):
        return answer
    if not isinstance(answer, list) or not answer:
        raise Refusal("mistyped reference", f"{key!r} must be text or a list of messages, found {_kind(answer)}")
    *before, last = (_read_message(item) for item in answer)
    if last.role != "assistant":
        raise Refusal("mistyped reference", f"{key!r} ends with the {last.role}'s message, not with the assistant's")
    if before and tuple(before) != messages:
        raise Refusal("mistyped reference", f"{key!r} holds another conversation than the prompt")
    if last.media:
        raise Refusal("mistyped reference", f"{key!r} answers with a {last.media[0].type}; an answer is text")
    return last.text


def _text_reference(reference: Json) -> Json:
    if isinstance(reference, str):
        return reference
    if isinstance(reference, int | float) and not isinstance(reference, bool):
        return repr(reference)
    raise _mistyped_reference(reference, "text or a number")


def _number_reference(reference: Json) -> Json:
    if isinstance(reference, int | float) and not isinstance(reference, bool):
        return _within_float(reference)
    if isinstance(reference, str):
        for read in (int, float):
            try:
                number = read(reference)
            except ValueError:
                continue
            if not isinstance(number, float) or math.isfinite(number):
                return _within_float(number)
    raise _mistyped_reference(reference, "a number without unit or comma")


def _within_float(number: int | float) -> int | float:
    """The number itself. Raises Refusal for an integer beyond every float: rewards compare and average as floats."""
    try:
        float(number)
    except OverflowError as error:
        raise Refusal("mistyped reference", "expected a number up to 1.8e308, found a larger one") from error
    return number


def _json_reference(reference: Json) -> Json:
    return reference


REFERENCE_READERS: dict[str, Callable[[Json], Json]] = {
    "text": _text_reference,
    "number": _number_reference,
    "json": _json_reference,
}


def _read_metadata(value: dict[str, Json], config: SourceConfig) -> dict[str, Json]:
    own = value.get(config.metadata_key)
    if own is None:
        own = {}
    if not isinstance(own, dict):
        raise Refusal("mistyped field", f"{config.metadata_key!r} must be a mapping, found {_kind(own)}")
    named = {config.prompt_key, config.messages_key, config.metadata_key, *config.reference_columns}
    extra = {key: item for key, item in value.items() if key not in named}
    clash = sorted(key for key in extra if key in own and own[key] != extra[key])
    if clash:
        raise Refusal("ambiguous metadata", f"{', '.join(clash)}: in the record and in its {config.metadata_key!r}")
    return {**extra, **own}


def _missing(wanted: str, key: str, value: dict[str, Json]) -> Refusal:
    close = difflib.get_close_matches(key, [other for other in value if other != key], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return Refusal("missing field", f"{wanted} is absent or null among {', '.join(value) or 'no keys'}{hint}")


def _mistyped_reference(reference: Json, expected: str) -> Refusal:
    return Refusal("mistyped reference", f"expected {expected}, found {_kind(reference)} {str(reference)[:40]!r}")


def _kind(value: Json) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
