"""What users' code hands back, checked before anything relies on it: exceptions, messages, steps, extra information.

Called by the episode (environments) and by rewards. Whatever is wrong becomes a TaskError that says what was expected: the
trajectory or the part fails with that reason, and the run goes on.
"""

import asyncio
import math
from collections.abc import Mapping
from typing import Any, get_args

from relax.core.error import TaskError
from relax.core.message import Json, MediaPart, Message, Role, TextPart
from relax.core.protocol import Step
from relax.core.trajectory import EndReason

_ROLES: tuple[str, ...] = get_args(Role)
_ENDS: tuple[str, ...] = get_args(EndReason)
MAX_DEPTH = 32
"""Levels of lists and mappings that extra information may nest."""
_MAX_INTEGER_BITS = 1024
"""Larger integers are exact in no float, and Python refuses to print the largest."""


def must_pass(error: BaseException) -> bool:
    """Whether an exception that came out of users' code is not theirs: this task was cancelled, or a person interrupts.

    A CancelledError that nobody asked for comes from the code itself (a task or future of its own that was cancelled); passed
    on, it would look like a cancellation and be lost.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


def describe(error: BaseException) -> str:
    """Type and message; the type alone where there is no message, or one that cannot be read."""
    try:
        text = str(error)
    except Exception:  # users' exceptions may do anything; what is told is then their type
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_messages(value: Any, what: str) -> tuple[Message, ...]:
    """`value` as messages of whole text and media parts. Raises TaskError naming `what` gave something else."""
    if not isinstance(value, tuple | list):
        raise TaskError(f"{what} gave {_kind(value)}; expected a tuple of messages")
    for message in value:
        if not isinstance(message, Message):
            raise TaskError(f"{what} gave {_kind(message)} among its messages; make one with text_message(role, text)")
        if message.role not in _ROLES:
            raise TaskError(f"{what} gave a message of role {message.role!r}; expected one of {', '.join(_ROLES)}")
        if not isinstance(message.parts, tuple) or not all(_is_part(part) for part in message.parts):
            raise TaskError(
                f"{what} gave a {message.role} message whose parts are no tuple of text and media parts;"
                " make it with text_message(role, text)"
            )
        if not _encodable(message.text):
            raise TaskError(f"{what} gave a {message.role} message with half of a surrogate pair, which is no text")
    return tuple(value)


def check_step(value: Any) -> Step:
    """`value` as a step of checked messages, a known end and plain info. Raises TaskError."""
    what = "environment: step"
    if not isinstance(value, Step):
        raise TaskError(f"{what} gave {_kind(value)}; expected a Step")
    if value.done is not None and not (isinstance(value.done, str) and value.done in _ENDS):
        raise TaskError(f"{what} gave done={value.done!r}; expected None or one of {', '.join(_ENDS)}")
    info = None if value.info is None else plain_info(value.info, f"{what} gave info")
    return Step(check_messages(value.messages, what), value.done, info)


def plain_info(value: Any, what: str) -> dict[str, Json]:
    """Extra information as the bus carries it. Raises TaskError, `what` first, for what is no mapping of JSON values.

    Keys become text, tuples lists, numpy's numbers and arrays plain ones; NaN and the infinities, which JSON lacks, become None.
    """
    if not isinstance(value, Mapping):
        raise TaskError(f"{what} that is {_kind(value)}; expected a mapping of names to JSON values")
    plain: dict[str, Json] = _plain(value, what, 0)
    return plain


def _plain(value: Any, what: str, depth: int) -> Json:
    if depth > MAX_DEPTH:
        raise TaskError(f"{what} that nests more than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > _MAX_INTEGER_BITS:
            raise TaskError(
                f"{what} with an integer of {value.bit_length()} bits; at most {_MAX_INTEGER_BITS} are kept"
            )
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        if not _encodable(value):
            raise TaskError(f"{what} with half of a surrogate pair, which is no text")
        return str(value)
    if isinstance(value, Mapping):
        return {_plain(str(key), what, depth): _plain(item, what, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, what, depth + 1) for item in value]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return _plain(value.tolist(), what, depth + 1)
    raise TaskError(f"{what} with {_kind(value)}, which is no JSON value")


def _is_part(part: Any) -> bool:
    return (isinstance(part, TextPart) and isinstance(part.text, str)) or isinstance(part, MediaPart)


def _encodable(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
