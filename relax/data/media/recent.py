"""What was used last, within a number of bytes.

Used wherever media are kept in memory: content, records, features. Those used longest ago go first; the newest stays whatever it
weighs, because somebody is about to use it.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Values by key; `num_bytes` is what they weigh together, at most `max_bytes` once there are two."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> T | None:
        """The value of a key, which is now the one used last."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: str, value: T, num_bytes: int) -> None:
        """Keep a value, in place of what the key had before."""
        self.num_bytes += num_bytes - self._values.pop(key, (None, 0))[1]
        self._values[key] = (value, num_bytes)
        while self.num_bytes > self._max_bytes and len(self._values) > 1:
            _, (_, freed) = self._values.popitem(last=False)
            self.num_bytes -= freed
