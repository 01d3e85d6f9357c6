"""Prompts of groups, kept between the first sibling's prefill and the last sibling's start.

Used by the batcher. Least recently used entries go first, those that a waiting request could use last; all go at a load,
so every entry belongs to the version that the engine serves (WS6).
"""

from collections import OrderedDict
from collections.abc import Container

from relax.engines.torch.kv import KeyValues
from relax.engines.torch.request import Prefix


class PrefixStore:
    """Holds at most `max_tokens` tokens and `max_entries` prompts."""

    def __init__(self, max_tokens: int, max_entries: int) -> None:
        self._entries: OrderedDict[Prefix, tuple[int, KeyValues]] = OrderedDict()
        self._max_tokens = max_tokens
        self._max_entries = max_entries
        self.tokens = 0

    def __contains__(self, prefix: Prefix | None) -> bool:
        return prefix in self._entries

    def get(self, prefix: Prefix) -> KeyValues:
        self._entries.move_to_end(prefix)
        return self._entries[prefix][1]

    def put(self, prefix: Prefix, length: int, parts: KeyValues) -> None:
        """Keep a prompt of `length` tokens. `make_room` must have been asked first."""
        self.drop(prefix)
        self._entries[prefix] = (length, parts)
        self.tokens += length

    def drop(self, prefix: Prefix) -> None:
        length, _ = self._entries.pop(prefix, (0, []))
        self.tokens -= length

    def make_room(self, length: int, wanted: Container[Prefix]) -> bool:
        """Evict until a prompt of `length` tokens fits; false, and nothing is evicted, when it never can."""
        if length > self._max_tokens or not self._max_entries:
            return False
        while self.tokens + length > self._max_tokens or len(self._entries) >= self._max_entries:
            self.evict(wanted)
        return True

    def evict(self, wanted: Container[Prefix] = ()) -> bool:
        """Drop one prompt: the oldest that nobody in `wanted` waits for, else the oldest. False when there is none."""
        if not self._entries:
            return False
        self.drop(next((prefix for prefix in self._entries if prefix not in wanted), next(iter(self._entries))))
        return True

    def clear(self) -> None:
        self._entries.clear()
        self.tokens = 0
