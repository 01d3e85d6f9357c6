"""Sample files: what a step trained on, whole, bounded, and never in the way of training."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from relax.bus.row import Fetched
from relax.core.column import COLUMNS, Column, Scope
from relax.core.id import GroupId, Table, group_id
from relax.core.message import Prompt, PromptKey, text_message
from relax.services import sample_file
from relax.services.sample_file import EndedGroup, SampleFiles, find_trajectory, sample_files, write_samples


def ended(number: int, step: int | None = 0, state: str = "trained") -> EndedGroup:
    prompt = Prompt(PromptKey("add", number, 0), "addition", (text_message("user", "1+2="),), "3")
    return EndedGroup(group_id(number), prompt, "rl", 4, state, "" if state == "trained" else "zero_signal", step)


def fetched(group: GroupId, siblings: int = 2, advantages: bool = True, text: str = "3") -> Fetched:
    """Each sibling has two segments, of tokens 0-2 and 3-5; only the last token of each was sampled."""
    cells: dict[str, dict[str, Any]] = {group: {"prompt": {}}}
    for sibling in range(siblings):
        id = f"{group}/{sibling}"
        cells[id] = {
            "token_ids": np.arange(6, dtype=np.int32) + 10 * sibling,
            "mask": np.array([0, 0, 1, 0, 0, 1], bool),
            "behaviour_logprobs": np.array([0, 0, -0.5, 0, 0, -1.25], np.float32),
            "versions": np.array([-1, -1, 4, -1, -1, 5], np.int32),
            "mixed": np.zeros(6, bool),
            "turns": {
                "turns": [[0, 2, 3, "stop", text], [1, 5, 6, "length", "b"]],
                "messages": [],
                "end": "done",
                "info": {},
            },
            "failure": None,
            "reward": np.float64(sibling),
            "reward_parts": [{"name": "exact", "weight": 1.0, "value": float(sibling), "failure": None, "info": {}}],
        }
        for index in range(2):
            sample: dict[str, Any] = {"span": np.array([3 * index, 3 * index + 3])}
            if advantages:
                sample["advantages"] = np.array([0, 0, sibling - 0.5 + index], np.float32)
            cells[f"{id}/{index}"] = sample
    return Fetched(tuple(cells), cells)


def fill(files: SampleFiles, number: int, step: int | None = 0, **options: Any) -> None:
    files.add(ended(number, step), fetched(group_id(number), **options))


async def test_a_file_holds_every_trajectory_of_its_step_token_by_token(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path / "samples", every=2, keep=5)
    fill(files, 7)
    files.add(ended(8, None, "filtered"), fetched(group_id(8), siblings=1, advantages=False))
    await files.flush(0)
    await files.close()
    (path,) = sample_files(tmp_path / "samples")
    assert path.name == "step-000000.parquet"
    rows = parquet.read_table(path).to_pylist()
    assert [row["trajectory"] for row in rows] == ["g000007/0", "g000007/1", "g000008/0"]
    one = rows[1]
    assert one["token_ids"] == [10, 11, 12, 13, 14, 15]
    assert one["mask"] == [False, False, True, False, False, True]
    assert one["behaviour_logprobs"] == [0, 0, -0.5, 0, 0, -1.25]
    assert one["versions"] == [-1, -1, 4, -1, -1, 5]
    assert one["advantages"] == [0, 0, 0.5, 0, 0, 1.5]
    assert one["spans"] == [[0, 3], [3, 6]]
    assert (one["reward"], json.loads(one["parts"])[0]["name"]) == (1.0, "exact")
    assert (one["text"], one["prompt"], json.loads(one["reference"])) == ("3\nb", "user: 1+2=", "3")
    assert (one["state"], one["step"], one["stage"], one["base"]) == ("trained", 0, "rl", 4)
    assert (rows[2]["advantages"], rows[2]["state"], rows[2]["reason"], rows[2]["step"]) == (
        None,
        "filtered",
        "zero_signal",
        None,
    )
    assert json.loads(parquet.read_schema(path).metadata[b"relax"]) == {"format": 1, "step": 0, "groups_left_out": 0}


async def test_only_every_nth_step_is_written_and_the_newest_files_are_kept(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, every=3, keep=2)
    for step in range(10):
        fill(files, step, step)
        await files.flush(step)
    await files.close()
    assert [path.name for path in sample_files(tmp_path)] == ["step-000006.parquet", "step-000009.parquet"]
    assert parquet.read_table(sample_files(tmp_path)[0], columns=["group"]).to_pydict() == {"group": ["g000006"] * 2}


async def test_a_group_that_ends_a_second_time_after_a_rollback_is_in_its_file_once(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, every=1, keep=2)
    fill(files, 1, siblings=2)
    fill(files, 2)
    fill(files, 1, siblings=1)
    fill(files, 3, step=7)  # of another step than the one that is being filled
    await files.flush(0)
    await files.close()
    found = parquet.read_table(sample_files(tmp_path)[0], columns=["trajectory"]).to_pydict()
    assert found == {"trajectory": ["g000002/0", "g000002/1", "g000001/0"]}


async def test_off_writes_nothing(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path / "samples", every=0, keep=2)
    fill(files, 0)
    await files.flush(0)
    await files.close()
    assert not (tmp_path / "samples").exists()


async def test_what_a_resume_took_back_is_gone(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, every=1, keep=9)
    for step in range(4):
        fill(files, step, step)
        await files.flush(step)
    await files.close()
    again = SampleFiles(tmp_path, every=2, keep=9)
    again.start_at(3)
    fill(again, 30, 3)
    await again.flush(3)
    fill(again, 40, 4)
    await again.flush(4)
    await again.close()
    assert [path.stem[-1] for path in sample_files(tmp_path)] == ["0", "1", "2", "4"]


async def test_a_step_of_any_size_is_bounded_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_file, "MAX_TRAJECTORIES", 5)
    files = SampleFiles(tmp_path, every=1, keep=2)
    for number in range(4):
        fill(files, number)
    await files.flush(0)
    monkeypatch.setattr(sample_file, "MAX_TOKENS", 20)
    for number in range(4):
        fill(files, number, 1)
    await files.flush(1)
    await files.close()
    for path, groups, missing in zip(sample_files(tmp_path), (2, 1), (2, 3), strict=True):
        assert parquet.read_table(path).num_rows == 2 * groups
        assert json.loads(parquet.read_schema(path).metadata[b"relax"])["groups_left_out"] == missing


@pytest.mark.parametrize("problem", ["file in the way", "full"])
async def test_a_disk_that_takes_nothing_is_said_once_and_stops_nothing(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "samples"
    if problem == "full":
        monkeypatch.setattr(parquet, "write_table", failing)
    else:
        folder.write_text("")
    files = SampleFiles(folder, every=1, keep=2)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            fill(files, step, step)
            await files.flush(step)
        await files.close()
    assert len(caplog.records) == 1
    assert "samples of step 0 are not kept" in caplog.text
    assert sample_files(folder) == []


def failing(table: Any, where: Path, **options: Any) -> None:
    where.write_bytes(b"half")
    raise OSError(28, "No space left on device")


async def test_a_step_does_not_wait_for_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    go, real = threading.Event(), sample_file.write_samples
    written: list[int] = []

    def slow(folder: Path, step: int, *rest: Any) -> Path:
        assert threading.current_thread() is not threading.main_thread()
        go.wait(10)
        written.append(step)
        return real(folder, step, *rest)

    monkeypatch.setattr(sample_file, "write_samples", slow)
    files = SampleFiles(tmp_path, every=1, keep=2)
    fill(files, 0)
    await files.flush(0)
    assert written == []
    go.set()
    fill(files, 1, 1)
    await files.flush(1)  # one at a time, in order
    assert written[0] == 0
    await files.close()
    assert written == [0, 1]


def test_a_write_that_is_cut_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sample_file._rows(ended(1), fetched(group_id(1)))
    path = write_samples(tmp_path, 0, rows)
    before = path.read_bytes()
    monkeypatch.setattr(parquet, "write_table", failing)
    with pytest.raises(OSError, match="No space"):
        write_samples(tmp_path, 0, rows)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_new_column_of_the_bus_is_kept_without_a_line_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, dtype in (("scores", "float32"), ("halves", "bfloat16")):
        monkeypatch.setitem(COLUMNS, name, Column(name, Table.sample, dtype, ("T",), Scope.step, "made up"))
    found = fetched(group_id(1), siblings=1)
    found.cells["g000001/0/0"]["scores"] = np.array([1, 2, 3], np.float32)  # type: ignore[index]
    found.cells["g000001/0/1"]["halves"] = np.array([0x3F80, 0xC000, 0], np.uint16)  # type: ignore[index]
    path = write_samples(tmp_path, 0, sample_file._rows(ended(1), found))
    row = parquet.read_table(path).to_pylist()[0]
    assert row["scores"] == [1, 2, 3, 0, 0, 0]
    assert row["halves"] == [0, 0, 0, 1.0, -2.0, 0]


def test_a_text_that_is_no_utf8_is_kept_with_a_question_mark(tmp_path: Path) -> None:
    rows = sample_file._rows(ended(1), fetched(group_id(1), siblings=1, text="a\ud800b"))
    assert parquet.read_table(write_samples(tmp_path, 0, rows)).to_pylist()[0]["text"] == "a?b\nb"


@pytest.mark.parametrize(("step", "found"), [(0, True), (None, True), (1, False)])
def test_a_trajectory_is_found_by_its_id(step: int | None, found: bool, tmp_path: Path) -> None:
    write_samples(tmp_path, 0, sample_file._rows(ended(1), fetched(group_id(1))))
    write_samples(tmp_path, 2, sample_file._rows(ended(2), fetched(group_id(2))))
    row = find_trajectory(tmp_path, "g000001/1", step)
    assert (row is not None) == found
    if row is not None:
        assert (row["trajectory"], row["file"].name) == ("g000001/1", "step-000000.parquet")
    assert find_trajectory(tmp_path / "nowhere", "g000001/1", step) is None
