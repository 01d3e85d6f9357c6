"""The rows of the bus's benchmarks, with numpy alone, so that a peer in an environment of its own makes the same ones.

Used by `benchmarks.bus`, `benchmarks.bus_processes` and `benchmarks/bus_peer.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TOKEN_COLUMNS = ("token_ids", "behaviour_logprobs", "mask")
SMALL_ROWS, SMALL_TOKENS = 8, 64


def token_rows(count: int, tokens: int, ragged: bool, writeable: bool = False) -> list[dict[str, Any]]:
    """Rows of int32 ids, float32 logprobs and a bool mask, each of `tokens`, or of 1 up to `tokens`."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, tokens + 1, count) if ragged else np.full(count, tokens)
    rows = [
        {
            "token_ids": random.integers(0, 1000, length, dtype=np.int32),
            "behaviour_logprobs": random.random(length, dtype=np.float32),
            "mask": random.random(length) > 0.5,
        }
        for length in lengths
    ]
    return rows if writeable else [read_only(row) for row in rows]


def tensor_rows(count: int, num_bytes: int) -> list[dict[str, Any]]:
    """Rows of one float32 tensor."""
    random = np.random.default_rng(0)
    return [read_only({"tensor": random.random(num_bytes // 4, dtype=np.float32)}) for _ in range(count)]


def read_only(row: dict[str, Any]) -> dict[str, Any]:
    for cell in row.values():
        cell.flags.writeable = False
    return row


def bytes_of(rows: list[dict[str, Any]]) -> int:
    return sum(cell.nbytes for row in rows for cell in row.values())


@dataclass(frozen=True)
class Load:
    """What is moved: `kind` of rows, how many clients on either side share them, how many rows go into one put (0: a client's whole
    share). `rounds` is for small rows only: how many puts each client makes, one after the other was read."""

    kind: str
    clients: int
    portion: int
    quick: bool
    rounds: int = 0

    def shares(self) -> list[list[list[dict[str, Any]]]]:
        """Per client its portions of rows."""
        if self.kind == "small":
            rows = token_rows(SMALL_ROWS, SMALL_TOKENS, ragged=False)
            return [[rows] * self.rounds for _ in range(self.clients)]
        if self.kind == "tensors":
            rows = tensor_rows(16, 1 << 16) if self.quick else tensor_rows(64, 4 << 20)
        else:
            count, tokens = (64, 512) if self.quick else (1024, 4096)
            rows = token_rows(count, tokens, ragged=self.kind == "ragged")
        shares = [rows[client :: self.clients] for client in range(self.clients)]
        size = self.portion or max(map(len, shares))
        return [[share[i : i + size] for i in range(0, len(share), size)] for share in shares]


def anonymous_bytes(process: int | str = "self") -> int:
    """Memory of a process that is neither a file nor shared with one."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def touch(cell: Any) -> int:
    """The bytes of an array, all of them in memory afterwards. With as little Python as can be: it counts on both sides alike."""
    flat = np.frombuffer(cell, np.uint8) if cell.nbytes else cell
    flat[:: 1 << 12].tobytes(), flat[-1:].tobytes()
    return flat.nbytes
