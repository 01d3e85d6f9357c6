"""The ledger: rows written once, cut back on resume, audited for staleness."""

import itertools
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.core.error import UserError
from relax.services.ledger import GroupRow, Ledger, SampleRow, TrajectoryRow, pack_versions, parse_versions


def group(id: str, record: int, event: int = 1, state: str = "trained", step: int | None = 3) -> GroupRow:
    return GroupRow(id, event, "rl", "toy", record, 0, 0, "toy", 2, 3, state, "", step, "user: ?", '"!"')


def trajectory(id: str, versions: str, event: int = 1) -> TrajectoryRow:
    return TrajectoryRow(id, event, 1.0, "[]", None, "done", 3, versions, "text")


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(":memory:")


def test_rule_ac3_one_prompt_key_has_one_group(ledger: Ledger) -> None:
    ledger.write([group("g000000", record=7)], {}, {})
    with pytest.raises(sqlite3.IntegrityError, match=r"source, .*record"):
        ledger.write([group("g000001", record=7)], {}, {})
    assert ledger.group("g000001") is None


def test_rule_ac1_a_terminal_row_is_written_once(ledger: Ledger) -> None:
    ledger.write([group("g000000", record=7)], {}, {})
    with pytest.raises(sqlite3.IntegrityError):
        ledger.write([group("g000000", record=8, state="failed")], {}, {})


def test_rule_rr3_a_resume_cuts_off_what_followed_its_checkpoint(ledger: Ledger) -> None:
    rows = [group("g000000", 0, event=5), group("g000001", 1, event=9), trajectory("g000001/0", "2x3", event=9)]
    ledger.write(rows, {2: {"reward/mean": 0.1}, 3: {"reward/mean": 0.2}}, {})
    ledger.cut_after(event=5, step=3)
    assert ledger.group("g000001") is None
    assert ledger.children(TrajectoryRow, "g000001") == []
    assert ledger.metric("reward/mean") == [(2, 0.1)]
    ledger.write([group("g000001", 1, event=7)], {}, {})
    assert ledger.counts() == {"trained": 2}


def test_rule_rr6_a_disk_that_takes_no_more_is_told_of_by_the_ledgers_name(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.write([group("g000000", record=7)], {}, {})
        ledger._connection.execute("PRAGMA max_page_count=1")  # SQLite takes as many as there are
        rows = [group(f"g{number:06d}", record=number) for number in range(8, 2000)]
        with pytest.raises(
            UserError, match=r"cannot write the ledger .*ledger\.sqlite: database or disk is full; .*resume"
        ):
            ledger.write(rows, {}, {})
        assert ledger.counts() == {"trained": 1}


def test_children_come_in_sibling_order_and_belong_to_their_group_only(ledger: Ledger) -> None:
    ids = [f"g000001/{sibling}" for sibling in (10, 2, 0)]
    rows = [trajectory(id, "1x3") for id in [*ids, "g000010/0"]]
    ledger.write([*rows, SampleRow("g000001/2/0", 1, 0, 5, 3, 0.5)], {}, {})
    assert [row["id"] for row in ledger.children(TrajectoryRow, "g000001")] == ["g000001/0", "g000001/2", "g000001/10"]
    assert [row["id"] for row in ledger.children(SampleRow, "g000001/2")] == ["g000001/2/0"]


def test_rule_st1_the_audit_finds_a_trained_token_over_the_bound(ledger: Ledger) -> None:
    ledger.write(
        [
            group("g000000", 0, step=3),
            trajectory("g000000/0", "2x3"),
            trajectory("g000000/1", "3x2,1x1"),
            group("g000001", 1, state="failed", step=None),
            trajectory("g000001/0", "0x3"),
        ],
        {},
        {},
    )
    assert ledger.staleness_violations({"rl": 2}) == []
    assert ledger.staleness_violations({"rl": 1}) == ["g000000/1: version 1 at step 3"]


def test_a_directory_without_a_ledger_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Ledger(tmp_path / "ledger.sqlite", read_only=True)


def test_a_path_with_signs_of_a_uri_opens(tmp_path: Path) -> None:
    path = tmp_path / "run #1?" / "ledger.sqlite"
    path.parent.mkdir()
    written = Ledger(path)
    written.write([group("g000000", 0)], {}, {})
    written.close()
    reader = Ledger(path, read_only=True)
    assert reader.counts() == {"trained": 1}
    reader.close()


@given(st.lists(st.integers(0, 5)))
def test_version_runs_round_trip(versions: list[int]) -> None:
    runs = parse_versions(pack_versions(versions))
    assert [version for version, count in runs for _ in range(count)] == versions
    assert all(first[0] != second[0] for first, second in itertools.pairwise(runs))


@pytest.mark.parametrize("damage", ["half", "garbage", "header"])
def test_a_damaged_ledger_is_a_users_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.write([group(f"g{number:06d}", number, number) for number in range(200)], {}, {})
    ledger.sync()
    ledger.close()
    content = path.read_bytes()
    kept = {"half": len(content) // 2, "garbage": 8192, "header": 0}[damage]
    path.write_bytes(content[:kept] + (b"" if damage == "half" else b"x" * (len(content) - kept)))
    with pytest.raises(UserError, match=r"ledger.sqlite is damaged.*bring it back"), closing(Ledger(path)) as damaged:
        damaged.cut_after(10, 1)
