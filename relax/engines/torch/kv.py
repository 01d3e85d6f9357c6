"""Keys and values of all running requests: one rectangle of rows (slots) and columns (positions) per layer.

A transformers `Cache`: the model writes into it and reads from it through its own attention code. Driven by `forward` and
`batcher`. Position `p` of row `r` is valid only if it was written for the request that now holds the row; the mask hides the
rest, and everything ever stored is finite or wiped, because 0 * NaN behind a mask would still be NaN.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

KeyValues = list[tuple[Tensor, Tensor] | None]
"""Per layer keys and values [T, heads, width]; None for a layer that keeps none."""


@dataclass(slots=True)
class Window:
    """What the next decode forward reads and writes: the first `rows` x `columns`, one new token at each flat `index`."""

    rows: int
    columns: int
    index: Tensor


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers carries no types
    """One layer's keys and values [rows, columns, heads, width], allocated at the first token."""

    is_sliding = False

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        self._owner = owner
        self.captured: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (self._owner.rows, self._owner.columns)
        # Zeros, not empty: hidden columns are multiplied by 0, which must not meet a NaN left in memory.
        self.keys = key_states.new_zeros((*shape, key_states.shape[1], key_states.shape[3]))
        self.values = value_states.new_zeros((*shape, value_states.shape[1], value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new tokens [B, heads, T, width]; returns what attention reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self._owner.window
        if window is None:
            self.captured = (key_states, value_states)
            return self.captured
        assert self.keys is not None
        assert self.values is not None
        rows, columns = window.rows, window.columns
        self.keys.flatten(0, 1).index_copy_(0, window.index, key_states.squeeze(2))
        self.values.flatten(0, 1).index_copy_(0, window.index, value_states.squeeze(2))
        return self.keys[:rows, :columns].transpose(1, 2), self.values[:rows, :columns].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self._owner.window is None else self._owner.window.columns), 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """With `window` None a forward is a prefill: its keys and values are captured for `scatter`; else it is a decode step."""

    def __init__(self, num_layers: int) -> None:
        self.rows = 0
        self.columns = 0
        self.window: Window | None = None
        self._slots = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slots))

    @property
    def tokens(self) -> int:
        """Positions that are allocated."""
        return self.rows * self.columns

    @torch.inference_mode()
    def reshape(self, rows: int, columns: int, used_rows: int) -> None:
        """Allocate another rectangle and carry over the first `used_rows`; layer by layer, so the peak is one layer more."""
        kept = min(columns, self.columns)
        for layer in self._stored():
            layer.keys = _resized(layer.keys, rows, columns, used_rows, kept)
            layer.values = _resized(layer.values, rows, columns, used_rows, kept)
        self.rows, self.columns = rows, columns

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> None:
        for layer in self._stored():
            layer.keys[target, :length] = layer.keys[source, :length]
            layer.values[target, :length] = layer.values[source, :length]

    @torch.inference_mode()
    def scatter(self, source: Tensor, target: Tensor) -> None:
        """Copy captured positions `source` (row * T + position of the prefill) to flat positions `target` of the rectangle."""
        for layer in self._stored():
            assert layer.captured is not None
            for stored, captured in zip((layer.keys, layer.values), layer.captured, strict=True):
                flat = captured.transpose(1, 2).flatten(0, 1)
                stored.flatten(0, 1).index_copy_(0, target, flat.index_select(0, source))

    @torch.inference_mode()
    def captured(self, row: int, length: int) -> KeyValues:
        """A copy of the first `length` positions of a row of the last prefill."""
        return [None if layer.captured is None else _row(layer.captured, row, length) for layer in self._slots]

    def forget_captured(self) -> None:
        for layer in self._slots:
            layer.captured = None

    @torch.inference_mode()
    def write(self, row: int, parts: KeyValues) -> None:
        """Put keys and values kept by `captured` at the start of a row."""
        for layer, part in zip(self._slots, parts, strict=True):
            if part is not None:
                layer.keys[row, : len(part[0])] = part[0]
                layer.values[row, : len(part[1])] = part[1]

    @torch.inference_mode()
    def wipe(self, row: int) -> None:
        """Zero a row, after values that were not finite."""
        for layer in self._stored():
            layer.keys[row].zero_()
            layer.values[row].zero_()

    @torch.inference_mode()
    def wipe_all(self) -> None:
        for layer in self._stored():
            layer.keys.zero_()
            layer.values.zero_()

    def release(self) -> None:
        """Give the memory back; the rectangle is allocated again, wiped, with the next token."""
        for layer in self._stored():
            layer.keys = layer.values = None
            layer.is_initialized = False

    def _stored(self) -> list[Any]:
        return [layer for layer in self._slots if layer.is_initialized]


def _resized(old: Tensor, rows: int, columns: int, used_rows: int, kept: int) -> Tensor:
    new = old.new_zeros((rows, columns, *old.shape[2:]))
    new[:used_rows, :kept] = old[:used_rows, :kept]
    return new


def _row(captured: tuple[Tensor, Tensor], row: int, length: int) -> tuple[Tensor, Tensor]:
    keys, values = (part[row, :, :length].transpose(0, 1).clone() for part in captured)
    return keys, values
