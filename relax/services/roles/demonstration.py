"""The demonstration role: renders prompts with their reference answers as trajectories, for supervised stages.

Consumes: group rows (`prompt`). Waits for: a group on the bus. Unblocked by: admission. The answer's tokens, its stop token
included, are in the mask; nothing samples them, so they carry no version and no behaviour logprobs.
"""

import numpy as np

from relax.bus.row import Receipt, RowPut
from relax.core.completion import frozen
from relax.core.error import DataError
from relax.core.id import GroupId, trajectory_id
from relax.core.message import Prompt, prompt_from_json, text_message
from relax.core.protocol import Renderer
from relax.core.trajectory import Segment, Trajectory, Turn
from relax.services.access import BusAccess, ControllerAccess
from relax.services.row import trajectory_rows

CONSUMER = "demonstration"


class Demonstration:
    def __init__(
        self, bus: BusAccess, controller: ControllerAccess, renderer: Renderer, max_context_tokens: int, batch: int = 64
    ) -> None:
        self._bus, self._controller, self._renderer = bus, controller, renderer
        self._max_context_tokens = max_context_tokens
        self._batch = batch

    async def run(self) -> None:
        """Endless."""
        while True:
            receipt = await self._bus.take(CONSUMER, CONSUMER, max_rows=self._batch)
            await self._bus.put(await self._rows(receipt), receipt.lease)
            await self._bus.ack(receipt.lease)

    async def _rows(self, receipt: Receipt) -> list[RowPut]:
        fetched = await self._bus.fetch(receipt)
        rows: list[RowPut] = []
        for group in receipt.ids:
            id = trajectory_id(GroupId(group), 0)
            try:
                trajectory = self.demonstrate(prompt_from_json(fetched.get(group, "prompt")))
                rows += trajectory_rows(id, trajectory, sampled=False)
            except DataError as error:
                await self._controller.end(GroupId(group), "failed", str(error)[:200])
        return rows

    def demonstrate(self, prompt: Prompt) -> Trajectory:
        """The prompt answered by its reference. Raises DataError when the reference is not text or does not fit."""
        if not isinstance(prompt.reference, str):
            raise DataError(f"record {prompt.key} has reference {prompt.reference!r}; a supervised stage needs a string")
        answer = text_message("assistant", prompt.reference)
        opened = self._renderer.encode(prompt.messages).token_ids
        answer_ids = self._renderer.encode_reply(prompt.reference)
        if len(opened) + len(answer_ids) > self._max_context_tokens:
            raise DataError(f"record {prompt.key} has {len(opened) + len(answer_ids)} tokens, over {self._max_context_tokens}")
        segment = _segment(opened, answer_ids)
        turn = Turn(0, len(opened), len(opened) + len(answer_ids), "stop", prompt.reference)
        return Trajectory((segment,), (turn,), (answer,), "done")


def _segment(opened: np.ndarray, answer: np.ndarray) -> Segment:
    token_ids = np.concatenate([opened, answer]).astype(np.int32)
    mask = np.arange(len(token_ids)) >= len(opened)
    absent = np.zeros(len(token_ids), dtype=np.float32)
    versions = np.full(len(token_ids), -1, dtype=np.int32)
    none_mixed = np.zeros(len(token_ids), dtype=np.bool_)
    return Segment(frozen(token_ids), frozen(mask), frozen(absent), frozen(versions), frozen(none_mixed))
