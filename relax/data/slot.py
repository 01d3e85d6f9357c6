"""Media in the text of a prompt: the strings that a chat template writes for them give way to all the placeholders they take.

Used by the renderer, before anything is tokenised, so that prompts are compared and cut as texts with their media in them.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from relax.core.error import DataError, InvariantError
from relax.core.media import Modality
from relax.core.message import MediaPart, Message
from relax.data.control import Guard
from relax.model.family import Family


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a medium in a message; `text` is what stands in the prompt for it, all its placeholders."""

    modality: Modality
    text: str


Content: TypeAlias = str | tuple[str | Slot, ...]
"""What a message says: text, or its parts when it holds media."""
Pairs: TypeAlias = Sequence[tuple[str, Content]]
"""A conversation: roles and what they say."""


class MediaText:
    """What stands in a prompt for media: the strings that a template writes for them give way to slots of the family's."""

    def __init__(self, family: Family, tokenizer: Any) -> None:
        self._family = family
        self._pattern = re.compile("|".join(map(re.escape, sorted(family.names.values(), key=len, reverse=True))))
        self._modalities = {name: modality for modality, name in family.names.items()}
        self._tokens = {
            modality: (token_id, str(tokenizer.convert_ids_to_tokens(token_id)))
            for modality, token_id in family.placeholders.items()
        }

    def slot(self, part: MediaPart) -> Slot:
        return Slot(part.type, self._family.slot(part))

    def fill(self, rendered: str, slots: Sequence[Slot]) -> tuple[str, list[Slot]]:
        """The text with every slot in its place, and the slots in that order.

        Whatever matches was written by the template: data cannot spell it (TK4). Raises DataError when the template does not write
        one placeholder for each medium.
        """
        waiting: dict[Modality, deque[Slot]] = {modality: deque() for modality in self._tokens}
        for slot in slots:
            waiting[slot.modality].append(slot)
        placed: list[Slot] = []

        def place(match: re.Match[str]) -> str:
            modality = self._modalities[match[0]]
            if not waiting[modality]:
                raise DataError(
                    f"the chat template writes more {modality} placeholders than the conversation has {modality} parts"
                )
            placed.append(waiting[modality].popleft())
            return placed[-1].text

        filled = self._pattern.sub(place, rendered)
        for modality, left in waiting.items():
            if left:
                raise DataError(
                    f"the chat template leaves out {len(left)} {modality} parts of the conversation: it has to write"
                    f" {self._family.names[modality]!r} for each, in every role that holds one"
                )
        return filled, placed

    def check(self, ids: list[int], slots: Sequence[Slot]) -> None:
        """Raises InvariantError unless there are as many placeholders of each modality among `ids` as in the slots (MM1)."""
        for modality, (token_id, text) in self._tokens.items():
            count, expected = ids.count(token_id), sum(slot.text.count(text) for slot in slots)
            if count != expected:
                raise InvariantError(
                    "MM1", f"{count} {modality} placeholders among the tokens, but the media take {expected}"
                )


def texts_of(pairs: Pairs) -> Iterator[str]:
    """Every text of a conversation."""
    for _, content in pairs:
        yield from [content] if isinstance(content, str) else (part for part in content if isinstance(part, str))


def slots_of(pairs: Pairs) -> list[Slot]:
    """Every slot of a conversation, in order."""
    return [part for _, content in pairs if not isinstance(content, str) for part in content if isinstance(part, Slot)]


def protect(guard: Guard, content: Content) -> Content:
    """The content with markers in its texts."""
    if isinstance(content, str):
        return guard.protect(content)
    return tuple(guard.protect(part) if isinstance(part, str) else part for part in content)


def in_order(messages: Sequence[Message], order: Sequence[Modality]) -> tuple[MediaPart, ...]:
    """The media of a conversation in the order in which a template placed them; those of one modality keep theirs."""
    waiting: dict[str, deque[MediaPart]] = {}
    for part in (part for message in messages for part in message.media):
        waiting.setdefault(part.type, deque()).append(part)
    return tuple(waiting[modality].popleft() for modality in order)
