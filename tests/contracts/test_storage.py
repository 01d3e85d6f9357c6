"""What every Storage must do (core protocol, TQ6)."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from relax.bus.segment_storage import SegmentStorage
from relax.bus.storage import MemoryStorage
from relax.core.column import Column, Scope
from relax.core.error import InvariantError, TransportError
from relax.core.id import Table
from relax.core.protocol import Storage

COLUMNS = {
    name: Column(name, Table.sample, dtype, shape, Scope.trajectory, "test", nullable)
    for name, dtype, shape, nullable in [
        ("tokens", "int32", ("T",), False),
        ("grid", "float32", ("A", "B"), False),
        ("half", "bfloat16", ("T",), False),
        ("score", "float64", (), True),
        ("text", "str", (), True),
        ("blob", "bytes", (), False),
        ("tree", "json", (), False),
    ]
}


@pytest.fixture(params=["memory", "segments"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "memory":
        yield MemoryStorage(COLUMNS)
    else:
        with closing(SegmentStorage(COLUMNS, tmp_path / "journal")) as storage:
            yield storage


def test_rule_tq6_every_kind_of_cell_round_trips(storage: Storage) -> None:
    cells = {
        "tokens": np.array([3, 1, 2], np.int32),
        "grid": np.zeros((0, 5), np.float32),
        "half": np.array([0x3F80, 0x7FC0], np.uint16),
        "score": np.array(0.25),
        "text": "a\0é",
        "blob": b"\x00\xff",
        "tree": {"parts": [{"name": "exact", "value": 1.0}, None], "n": 2},
    }
    size = storage.put({"g000001/0/0": cells})
    assert size == 12 + 0 + 4 + 8 + 4 + 2 + len('{"n": 2, "parts": [{"name": "exact", "value": 1.0}, null]}')
    out = storage.get("g000001/0/0", list(cells))
    assert list(out) == list(cells)
    for name, value in cells.items():
        if isinstance(value, np.ndarray):
            assert out[name].dtype == value.dtype
            assert out[name].shape == value.shape
            assert out[name].tobytes() == value.tobytes()
        else:
            assert out[name] == value
            assert type(out[name]) is type(value)


def test_rule_tq6_ragged_columns_are_one_array_per_row(storage: Storage) -> None:
    lengths = [0, 1, 7, 3]
    for index, length in enumerate(lengths):
        storage.put({f"g000001/{index}/0": {"tokens": np.arange(length, dtype=np.int32)}})
    assert [len(storage.get(f"g000001/{i}/0", ["tokens"])["tokens"]) for i in range(4)] == lengths


def test_rule_tq6_none_is_a_value(storage: Storage) -> None:
    storage.put({"g000001/0/0": {"score": None, "text": None, "tree": None}})
    assert storage.get("g000001/0/0", ["score", "text", "tree"]) == {"score": None, "text": None, "tree": None}


def test_rule_tq6_stored_cells_cannot_be_changed_by_writer_or_reader(storage: Storage) -> None:
    tokens, tree = np.array([1, 2], np.int32), {"a": [1]}
    storage.put({"g000001/0/0": {"tokens": tokens, "tree": tree}})
    tokens[0] = 9
    tree["a"].append(2)
    out = storage.get("g000001/0/0", ["tokens", "tree"])
    out["tree"]["a"].append(3)
    with pytest.raises(ValueError, match="read-only"):
        out["tokens"][0] = 9
    again = storage.get("g000001/0/0", ["tokens", "tree"])
    assert again["tokens"].tolist() == [1, 2]
    assert again["tree"] == {"a": [1]}


def test_rule_tq6_a_wrong_cell_is_refused_and_nothing_of_the_put_is_kept(storage: Storage) -> None:
    with pytest.raises(InvariantError, match="'grid'"):
        storage.put({"g000001/0/0": {"tokens": np.zeros(2, np.int32), "grid": np.zeros(2, np.float32)}})
    with pytest.raises(TransportError):
        storage.get("g000001/0/0", ["tokens"])
    with pytest.raises(InvariantError, match="unknown column 'nope'"):
        storage.put({"g000001/0/0": {"nope": 1}})


def test_rows_are_independent_and_a_dropped_one_is_gone(storage: Storage) -> None:
    storage.put({"g000001/0/0": {"text": "a"}})
    storage.put({"g000001/0/1": {"text": "b"}})
    storage.put({"g000001/0/1": {"blob": b"c"}})
    storage.drop("g000001/0/0")
    storage.drop("g000001/0/0")
    with pytest.raises(TransportError, match="g000001/0/0"):
        storage.get("g000001/0/0", ["text"])
    assert storage.get("g000001/0/1", ["blob", "text"]) == {"blob": b"c", "text": "b"}
    with pytest.raises(TransportError, match="score"):
        storage.get("g000001/0/1", ["score"])


def test_memory_storage_accounts_for_every_byte() -> None:
    storage = MemoryStorage(COLUMNS)
    storage.put({"g000001/0/0": {"tokens": np.zeros(10, np.int32), "text": "ab"}})
    storage.put({"g000001/0/1": {"blob": b"123"}})
    assert (storage.num_bytes, len(storage)) == (45, 2)
    storage.put({"g000001/0/0": {"tokens": np.zeros(1, np.int32)}})
    assert storage.num_bytes == 9
    storage.drop("g000001/0/0")
    assert (storage.num_bytes, len(storage)) == (3, 1)
