"""The demonstration role: renders prompts with their reference answers as trajectories, for stages that sample nothing.

Consumes: group rows (`prompt`). Waits for: a group on the bus. Unblocked by: admission. An answer's tokens, its stop token
included, are in the mask; nothing samples them, so they carry no version and no behaviour logprobs. What a reference holds,
one answer or a preferred pair, is the algorithm's `demonstrates`.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import NoReturn

import numpy as np

from relax.bus.row import Fetched, RowPut
from relax.core.completion import frozen
from relax.core.error import DataError
from relax.core.id import GroupId, trajectory_id
from relax.core.media import MediaReader, Medium
from relax.core.message import Prompt, prompt_from_json, text_message
from relax.core.protocol import Renderer
from relax.core.trajectory import Segment, Trajectory, Turn
from relax.services.access import BusAccess, ControllerAccess
from relax.services.consume import consume
from relax.services.media_row import MAX_REASON, group_media_put, read_prompt_media, refusal_reason
from relax.services.row import trajectory_rows


class Demonstration:
    def __init__(
        self,
        bus: BusAccess,
        controller: ControllerAccess,
        renderer: Renderer,
        max_context_tokens: int,
        demonstrates: str = "answer",
        batch: int = 64,
        media: MediaReader | None = None,
    ) -> None:
        self._bus, self._controller, self._renderer = bus, controller, renderer
        self._max_context_tokens = max_context_tokens
        self._answers = ANSWERS[demonstrates]
        self._batch = batch
        self._media = media

    async def run(self) -> NoReturn:
        """Endless. A prompt without a usable reference ends its group as failed, with the reason."""
        await consume(self._bus, "demonstration", self._batch, self._rows)

    async def _rows(self, fetched: Fetched) -> list[RowPut]:
        rows: list[RowPut] = []
        groups = [GroupId(id) for id in fetched.ids]
        read = await asyncio.gather(*(self._read(prompt_from_json(fetched.get(group, "prompt"))) for group in groups))
        prompts = dict(zip(groups, read, strict=True))
        for group in groups:
            prompt, media = prompts[group]
            if isinstance(media, DataError):
                await self._controller.end(group, "failed", refusal_reason(media))
                continue
            try:
                trajectories = self.demonstrate(prompt, media or ())
            except DataError as error:
                await self._controller.end(group, "failed", str(error)[:MAX_REASON])
                continue
            if media is not None:
                rows.append(group_media_put(group, media))
            for sibling, trajectory in enumerate(trajectories):
                rows += trajectory_rows(trajectory_id(group, sibling), trajectory, sampled=False, shared=media)
        return rows

    async def _read(self, prompt: Prompt) -> tuple[Prompt, tuple[Medium, ...] | DataError | None]:
        """The prompt and its media: None in a run that reads none, or why they cannot be read."""
        if self._media is None:
            return prompt, None
        try:
            return await read_prompt_media(self._media, prompt)
        except DataError as error:
            return prompt, error

    def demonstrate(self, prompt: Prompt, media: tuple[Medium, ...] = ()) -> list[Trajectory]:
        """The prompt answered by its reference, once or as a pair. Raises DataError when the reference is not usable or does not fit."""
        opened = self._renderer.encode(prompt.messages).token_ids
        return [self._answered(prompt, opened, media, text) for text in self._answers(prompt)]

    def _answered(self, prompt: Prompt, opened: np.ndarray, media: tuple[Medium, ...], text: str) -> Trajectory:
        answer = self._renderer.encode_reply(text)
        length = len(opened) + len(answer)
        if length > self._max_context_tokens:
            raise DataError(f"record {prompt.key} has {length} tokens, over {self._max_context_tokens}")
        turn = Turn(0, len(opened), length, "stop", text)
        return Trajectory((_segment(opened, answer, media),), (turn,), (text_message("assistant", text),), "done")


def _one_answer(prompt: Prompt) -> tuple[str, ...]:
    """The reference itself."""
    if not isinstance(prompt.reference, str):
        raise DataError(f"record {prompt.key} has reference {prompt.reference!r}; a supervised stage needs a string")
    return (prompt.reference,)


def _preferred_pair(prompt: Prompt) -> tuple[str, ...]:
    """The chosen text, then the rejected one."""
    reference = prompt.reference
    texts = [reference.get(key) for key in ("chosen", "rejected")] if isinstance(reference, dict) else []
    chosen, rejected = texts or (None, None)
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise DataError(
            f'record {prompt.key} has reference {reference!r}; a preference stage needs {{"chosen": text, "rejected": text}}; '
            "name the keys of a record that hold the two in fields.chosen and fields.rejected of the source"
        )
    if chosen == rejected:
        raise DataError(f"record {prompt.key} prefers {chosen!r} to itself; a pair needs two different texts")
    return chosen, rejected


ANSWERS: Mapping[str, Callable[[Prompt], tuple[str, ...]]] = {"answer": _one_answer, "preference": _preferred_pair}
"""By `Algorithm.demonstrates`: the texts that answer a prompt, one trajectory each. They raise DataError."""


def _segment(opened: np.ndarray, answer: np.ndarray, media: tuple[Medium, ...]) -> Segment:
    token_ids = np.concatenate([opened, answer]).astype(np.int32)
    mask = np.arange(len(token_ids)) >= len(opened)
    absent = np.zeros(len(token_ids), dtype=np.float32)
    versions = np.full(len(token_ids), -1, dtype=np.int32)
    none_mixed = np.zeros(len(token_ids), dtype=np.bool_)
    return Segment(frozen(token_ids), frozen(mask), frozen(absent), frozen(versions), frozen(none_mixed), media)
