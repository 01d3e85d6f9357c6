"""The demonstration role: renders prompts with their reference answers as trajectories, for supervised stages.

Consumes: group rows (`prompt`). Waits for: a group on the bus. Unblocked by: admission. The answer's tokens, its stop token
included, are in the mask; nothing samples them, so they carry no version and no behaviour logprobs.
"""

from typing import NoReturn

import numpy as np

from relax.bus.row import Fetched, RowPut
from relax.core.completion import frozen
from relax.core.error import DataError
from relax.core.id import GroupId, trajectory_id
from relax.core.message import Prompt, prompt_from_json, text_message
from relax.core.protocol import Renderer
from relax.core.trajectory import Segment, Trajectory, Turn
from relax.services.access import BusAccess, ControllerAccess
from relax.services.consume import consume
from relax.services.row import trajectory_rows


class Demonstration:
    def __init__(
        self, bus: BusAccess, controller: ControllerAccess, renderer: Renderer, max_context_tokens: int, batch: int = 64
    ) -> None:
        self._bus, self._controller, self._renderer = bus, controller, renderer
        self._max_context_tokens = max_context_tokens
        self._batch = batch

    async def run(self) -> NoReturn:
        """Endless. A prompt without a usable reference ends its group as failed, with the reason."""
        await consume(self._bus, "demonstration", self._batch, self._rows)

    async def _rows(self, fetched: Fetched) -> list[RowPut]:
        rows: list[RowPut] = []
        for group in map(GroupId, fetched.ids):
            try:
                trajectory = self.demonstrate(prompt_from_json(fetched.get(group, "prompt")))
                rows += trajectory_rows(trajectory_id(group, 0), trajectory, sampled=False)
            except DataError as error:
                await self._controller.end(group, "failed", str(error)[:200])
        return rows

    def demonstrate(self, prompt: Prompt) -> Trajectory:
        """The prompt answered by its reference. Raises DataError when the reference is not text or does not fit."""
        if not isinstance(prompt.reference, str):
            raise DataError(
                f"record {prompt.key} has reference {prompt.reference!r}; a supervised stage needs a string"
            )
        opened = self._renderer.encode(prompt.messages).token_ids
        answer = self._renderer.encode_reply(prompt.reference)
        length = len(opened) + len(answer)
        if length > self._max_context_tokens:
            raise DataError(f"record {prompt.key} has {length} tokens, over {self._max_context_tokens}")
        turn = Turn(0, len(opened), length, "stop", prompt.reference)
        return Trajectory((_segment(opened, answer),), (turn,), (text_message("assistant", prompt.reference),), "done")


def _segment(opened: np.ndarray, answer: np.ndarray) -> Segment:
    token_ids = np.concatenate([opened, answer]).astype(np.int32)
    mask = np.arange(len(token_ids)) >= len(opened)
    absent = np.zeros(len(token_ids), dtype=np.float32)
    versions = np.full(len(token_ids), -1, dtype=np.int32)
    none_mixed = np.zeros(len(token_ids), dtype=np.bool_)
    return Segment(frozen(token_ids), frozen(mask), frozen(absent), frozen(versions), frozen(none_mixed))
