"""Placeholders in the text of a record, `<image>`, `<audio>` and `<video>`, and the lists of media that belong to them.

Called by `record`. For a modality with a key in `media_keys` the two are matched exactly, in order, or the record is refused with
the reason; for any other such words are text, and nobody's prose is rewritten (case F3).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from relax.core.media import Modality
from relax.core.message import MediaPart, Message, Part, TextPart
from relax.data.dataset import Refusal


def fill_placeholders(
    messages: Sequence[Message], lists: Mapping[Modality, Sequence[MediaPart]], keys: Mapping[Modality, str]
) -> tuple[Message, ...]:
    """The messages with each placeholder replaced by the next medium of its modality's list (`keys` names it in refusals).

    A placeholder is the word in the text of anybody but the assistant, or a media part that holds none. Raises Refusal.
    """
    waiting = {modality: iter(lists.get(modality, ())) for modality in keys}
    counts: dict[Modality, int] = dict.fromkeys(keys, 0)
    filled = []
    for message in messages:
        parts: list[Part] = []
        for part in _split(message, keys):
            if isinstance(part, MediaPart) and not part.uri:
                if part.type not in keys:
                    raise Refusal(
                        "missing medium",
                        f"a part of type {part.type!r} holds none, and media_keys names no key for {part.type}",
                    )
                counts[part.type] += 1
                found = next(waiting[part.type], None)
                part = part if found is None else replace(found, options={**found.options, **part.options})
            parts.append(part)
        filled.append(Message(message.role, tuple(parts)))
    for modality, key in keys.items():
        given = len(lists.get(modality, ()))
        if given != counts[modality]:
            raise Refusal(
                "media and placeholders differ",
                f"the messages have {counts[modality]} <{modality}>, {key!r} {f'holds {given}' if given else 'is absent or empty'}",
            )
    return tuple(filled)


def _split(message: Message, keys: Mapping[Modality, str]) -> Iterator[Part]:
    """The parts, each text cut at its placeholders; an empty `MediaPart` stands for one."""
    if message.role == "assistant" or not keys:
        yield from message.parts
        return
    word = re.compile(f"<({'|'.join(keys)})>")
    for part in message.parts:
        if isinstance(part, MediaPart) or not word.search(part.text):
            yield part
            continue
        for number, piece in enumerate(word.split(part.text)):
            if number % 2:
                yield MediaPart(piece, "")  # type: ignore[arg-type]
            elif piece:
                yield TextPart(piece)
