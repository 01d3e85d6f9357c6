"""Prompts and messages: what a record becomes before it is tokens.

Made by data, carried by the bus as JSON, read by tasks. Media are references, never bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Json: TypeAlias = Any
"""None, bool, int, float, str, and lists and string-keyed dicts of them."""

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str
    type: Literal["text"] = "text"


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A reference to an image, a sound or a video: where it lies, how to decode it (`options`, from the record or the source).

    `digest` (of its content) and `facts` (what its metadata say: size, frames, seconds) are empty until the medium was looked at,
    which the role that serves its prompt sees to.
    """

    type: Literal["image", "audio", "video"]
    uri: str
    digest: str = ""
    options: Mapping[str, Json] = field(default_factory=dict)
    facts: Mapping[str, Json] = field(default_factory=dict)


Part: TypeAlias = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def media(self) -> "tuple[MediaPart, ...]":
        """The media parts, in order."""
        return tuple(part for part in self.parts if isinstance(part, MediaPart))


def text_message(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))


@dataclass(frozen=True, slots=True, order=True)
class PromptKey:
    """What makes a prompt unique in a run (AC3); request seeds derive from it (DE1)."""

    source: str
    record: int
    pass_number: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task for the policy. `messages` end with the turn to answer; `reference` is what rewards compare with."""

    key: PromptKey
    task: str
    messages: tuple[Message, ...]
    reference: Json = None
    metadata: Mapping[str, Json] = field(default_factory=dict)


def prompt_to_json(prompt: Prompt) -> dict[str, Json]:
    """A prompt as JSON-ready values; `prompt_from_json` is its exact inverse."""
    key = prompt.key
    return {
        "key": [key.source, key.record, key.pass_number, key.attempt],
        "task": prompt.task,
        "messages": [{"role": m.role, "parts": [_part_to_json(p) for p in m.parts]} for m in prompt.messages],
        "reference": prompt.reference,
        "metadata": dict(prompt.metadata),
    }


def prompt_from_json(value: Mapping[str, Json]) -> Prompt:
    source, record, pass_number, attempt = value["key"]
    return Prompt(
        key=PromptKey(source, record, pass_number, attempt),
        task=value["task"],
        messages=tuple(Message(m["role"], tuple(_part_from_json(p) for p in m["parts"])) for m in value["messages"]),
        reference=value["reference"],
        metadata=value["metadata"],
    )


def _part_to_json(part: Part) -> dict[str, Json]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {
        "type": part.type,
        "uri": part.uri,
        "digest": part.digest,
        "options": dict(part.options),
        "facts": dict(part.facts),
    }


def _part_from_json(value: Mapping[str, Json]) -> Part:
    if value["type"] == "text":
        return TextPart(value["text"])
    return MediaPart(value["type"], value["uri"], value["digest"], value["options"], value["facts"])
