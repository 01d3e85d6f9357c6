"""The bus's benchmark across processes: every row arrives, and what is printed compares like with like."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.bus_processes import PEER, Moved, Site, aims_of, processes, table_of
from benchmarks.bus_rows import Load, bytes_of


@pytest.mark.parametrize("clients", [1, 3, 16])
@pytest.mark.parametrize("kind", ["regular", "ragged", "tensors"])
@pytest.mark.parametrize("portion", [0, 5])
def test_clients_share_all_rows(kind: str, clients: int, portion: int) -> None:
    shares = Load(kind, clients, portion, quick=True).shares()
    assert len(shares) == clients
    (whole,) = Load(kind, 1, 0, quick=True).shares()
    rows = [row for portions in shares for rows in portions for row in rows]
    assert sum(map(len, whole)) == len(rows)
    assert bytes_of(rows) == sum(map(bytes_of, whole))
    assert all(len(rows) <= portion for portions in shares for rows in portions) or portion == 0


def test_every_byte_of_a_load_arrives(tmp_path: Path) -> None:
    loads = [Load("ragged", 2, 8, True), Load("tensors", 4, 1, True), Load("small", 2, 0, True, rounds=3)]

    async def move() -> list[Moved]:
        site = Site(tmp_path)
        await site.connect()
        moved = [await site.move(load) for load in loads]
        await site.close()
        return moved

    with processes(tmp_path):
        moved = asyncio.run(move())
    for load, one in zip(loads, moved, strict=True):
        rows = [row for portions in load.shares() for rows in portions for row in rows]
        assert one.num_bytes == bytes_of(rows)
        assert len(one.latencies) == sum(map(len, load.shares()))
        assert 0 < min(one.latencies) <= max(one.latencies) <= one.seconds


def test_aims_need_the_peer_and_memory_does_not() -> None:
    bulk, small = {"gb_s": 2.0, "memory": 1.1}, {"p50_us": 10.0, "p99_us": 30.0, "puts_s": 5.0}
    alone = {"regular, 1 clients": {"relax": bulk}, "8 small rows, 1 clients": {"relax": small}}
    assert [aim.name for aim in aims_of(alone)] == ["regular, 1 clients: memory / bytes stored"]
    both = {
        "regular, 1 clients": {"relax": bulk, PEER: {"gb_s": 0.5, "memory": 3.0}},
        "8 small rows, 1 clients": {"relax": small, PEER: {"p50_us": 100.0, "p99_us": 60.0, "puts_s": 1.0}},
    }
    assert [(aim.value, aim.met) for aim in aims_of(both)] == [(4.0, False), (1.1, True), (0.1, True), (0.5, False)]
    assert all(aim.reason for aim in aims_of(both) if not aim.met)
    assert ["regular, 1 clients", "2", "0.5", "GB/s"] in table_of(both)["rows"]
    assert ["regular, 1 clients", "2", "-", "GB/s"] in table_of(alone)["rows"]
