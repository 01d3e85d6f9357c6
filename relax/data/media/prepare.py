"""Prompts with their media looked at: core's `MediaReader`, the one way in which roles and episodes meet media.

Made by the services, given to every role that reads prompts. A prompt that comes out of `prepare` is within every limit, all of
its media could be decoded, and its placeholders are as many as its features (MM1); one that is not is in the quarantine (MM3).
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from relax.core.completion import Ints
from relax.core.error import DataError
from relax.core.media import Medium, Modality, miscounted
from relax.core.message import MediaPart, Message, Prompt, TextPart
from relax.core.protocol import Renderer
from relax.data.dataset import Refusal
from relax.data.media.reference import shown_uri
from relax.data.media.store import MediaStore
from relax.data.quarantine import EXCERPT_CHARACTERS, Quarantine
from relax.data.stream import PromptRules, check_length


class PromptPreparer:
    """`rules.media` are the origins that the run's prompts came from."""

    def __init__(self, store: MediaStore, renderer: Renderer, rules: PromptRules, quarantine: Quarantine) -> None:
        self.store = store
        self._renderer = renderer
        self._rules = rules
        self._quarantine = quarantine

    async def prepare(self, prompt: Prompt) -> Prompt:
        """The prompt with every medium looked at; one without media as it is. Raises Refusal, once its record is in quarantine."""
        if not any(message.media for message in prompt.messages):
            return prompt
        try:
            return replace(prompt, messages=await self._checked(prompt))
        except Refusal as refusal:
            key, origins = prompt.key, self._rules.media
            location = None if origins is None else origins.location(key.source, key.record)
            self._quarantine.add(key.source, key.record, location, refusal, _excerpt(prompt))
            raise

    async def look(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages of an environment's turn with their media looked at. Raises Refusal."""
        return await self._look(messages, None)

    async def load(self, parts: Sequence[MediaPart]) -> tuple[Medium, ...]:
        """The features of parts that were looked at. Raises Refusal."""
        return await self.store.load(parts)

    async def _checked(self, prompt: Prompt) -> tuple[Message, ...]:
        messages = await self._look(prompt.messages, prompt.key.source)
        try:
            encoded = self._renderer.encode(messages)
        except Refusal:
            raise
        except DataError as error:
            raise Refusal("cannot be rendered", str(error)) from error
        check_length(len(encoded.token_ids), self._rules)
        parts = tuple(part for message in messages for part in message.media)
        if not _are_same(encoded.parts, parts):
            raise Refusal(
                "media lost in the template",
                f"the prompt holds {len(parts)} media, and the chat template shows {len(encoded.parts)}, or others",
            )
        # Decoded here, so that a medium whose damage only decoding shows is refused with its record; loading it again is a hit.
        media = await self.store.load(encoded.parts)
        family = self.store.family
        check_placeholders(encoded.token_ids, {} if family is None else family.placeholders, media)
        return messages

    async def _look(self, messages: Sequence[Message], source: str | None) -> tuple[Message, ...]:
        parts = [part for message in messages for part in message.media]
        limit = self.store.section.max_per_prompt
        if len(parts) > limit:
            raise Refusal("too many media", f"{len(parts)}, data.media.max_per_prompt is {limit}")
        found = await asyncio.gather(*(self.store.look(part, source) for part in parts), return_exceptions=True)
        for one in found:  # the first in the prompt, so that a record is always refused for the same one
            if isinstance(one, BaseException):
                raise one
        looked = iter([one for one in found if isinstance(one, MediaPart)])
        return tuple(
            Message(message.role, tuple(part if isinstance(part, TextPart) else next(looked) for part in message.parts))
            for message in messages
        )


def _are_same(shown: Sequence[MediaPart], parts: Sequence[MediaPart]) -> bool:
    """Whether every part is shown once, in whatever order a template puts them."""
    waiting = list(parts)
    for part in shown:
        if part not in waiting:
            return False
        waiting.remove(part)
    return not waiting


def check_placeholders(token_ids: Ints, placeholders: Mapping[Modality, int], media: Sequence[Medium]) -> None:
    """Raises Refusal unless a prompt's tokens hold as many placeholders of each modality as its media have features (MM1)."""
    for modality, count, features in miscounted(token_ids, placeholders, media):
        raise Refusal(
            "placeholders and features differ",
            f"{count} tokens stand for {modality}, its encoder gives {features} features",
        )


def _excerpt(prompt: Prompt) -> str:
    shown = [
        {"role": message.role, "text": message.text, "media": [shown_uri(part.uri) for part in message.media]}
        for message in prompt.messages
    ]
    return json.dumps(shown)[:EXCERPT_CHARACTERS]
