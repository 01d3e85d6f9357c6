"""What `relax show sample` knows of a sample: every token where its step was kept, else what the ledger has."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from relax.core.error import UserError
from relax.core.id import GroupId
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger, TrajectoryRow
from relax.services.reader import LedgerReader
from relax.services.sample_file import SampleFiles
from relax.services.show_sample import SampleDetail, read_sample
from tests.services.story import write_story
from tests.services.test_sample_file import ended, fetched

ROOT = Path(__file__).resolve().parents[2]
ID = "g000050"
"""Trained at step 24."""


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    ledger = Ledger(directory.ledger)
    write_story(ledger)
    failed = TrajectoryRow(f"{ID}/2", 1, None, "[]", "timeout", "truncated", 0, "", "")
    ledger.write([failed], {}, {})
    ledger.close()
    return directory


def read(directory: RunDirectory, id: str, tokenizer: str | None = None) -> SampleDetail:
    ledger = LedgerReader(directory.ledger, read_only=True)
    try:
        return read_sample(ledger, directory, id, tokenizer)
    finally:
        ledger.close()


async def keep(directory: RunDirectory, step: int, group: str = ID) -> None:
    """Write the sample file of a step that holds the group."""
    files = SampleFiles(directory.root / "samples", every=1, keep=9)
    files.start_at(step)
    found = fetched(GroupId(group))
    for cells in found.cells.values():
        if "span" in cells:  # the story's samples are one span of ten tokens; only the first six are kept here
            cells["advantages"] = np.array([0, 0, 0.7], np.float32)  # type: ignore[index]
    files.add(ended(int(group[1:]), step), found)
    await files.flush(step)
    await files.close()


def short(directory: RunDirectory, group: str = ID) -> None:
    """Make the story's sample as long as the kept one's first."""
    with closing(sqlite3.connect(directory.ledger)) as connection, connection:
        connection.execute("UPDATE sample SET stop = 3 WHERE id LIKE ?", (f"{group}/%",))


async def test_a_kept_sample_is_shown_token_by_token(directory: RunDirectory) -> None:
    await keep(directory, 24)
    short(directory)
    view = read(directory, f"{ID}/1/0", str(ROOT / "recipes" / "models" / "qwen3-char"))
    assert view.tokens is not None
    assert view.source == str(directory.root / "samples" / "step-000024.parquet")
    assert [token.id for token in view.tokens] == [10, 11, 12]
    assert [token.position for token in view.tokens] == [0, 1, 2]
    assert [token.sampled for token in view.tokens] == [False, False, True]
    assert [token.version for token in view.tokens] == [None, None, 4]
    assert view.tokens[2].values == {
        "behaviour_logprobs": -0.5, "mixed": False, "advantages": pytest.approx(0.7),
    }  # fmt: skip
    assert all(token.text for token in view.tokens)
    assert read(directory, f"{ID}/1/0").tokens[0].text is None  # type: ignore[index]
    assert view.trajectory.id == f"{ID}/1"
    assert view.group.step == 24


def test_without_its_file_the_ledger_speaks_and_says_why(directory: RunDirectory) -> None:
    view = read(directory, f"{ID}/1/0")
    assert view.tokens is None
    assert view.source == "ledger"
    assert "holds no sample files yet; run.samples.every" in view.note
    assert (view.sample.start, view.sample.stop, view.sample.tokens, view.sample.advantage) == (0, 10, 4, -0.7)


async def test_a_step_that_was_not_kept_names_those_that_were(directory: RunDirectory) -> None:
    await keep(directory, 10)
    assert "no sample file was kept of step 24; there are those of steps 10" in read(directory, f"{ID}/1/0").note
    assert (
        "the group was not trained and is in none of the sample files (steps 10)" in read(directory, "g000042/0/0").note
    )


async def test_a_group_that_was_not_trained_is_looked_for_in_every_file(directory: RunDirectory) -> None:
    await keep(directory, 10)
    await keep(directory, 20, "g000042")
    short(directory, "g000042")
    assert read(directory, "g000042/0/0").source.endswith("step-000020.parquet")


async def test_a_file_of_another_attempt_is_not_taken_for_this_one(directory: RunDirectory) -> None:
    await keep(directory, 24)
    view = read(directory, f"{ID}/1/0")
    assert view.tokens is None
    assert "holds another attempt at this trajectory" in view.note


async def test_a_file_that_cannot_be_read_is_said_and_the_ledger_speaks(directory: RunDirectory) -> None:
    await keep(directory, 24)
    spoil(directory)
    view = read(directory, f"{ID}/1/0")
    assert view.tokens is None
    assert "cannot be read (Arrow" in view.note


def spoil(directory: RunDirectory) -> None:
    (directory.root / "samples" / "step-000024.parquet").write_bytes(b"no parquet")


def test_a_trajectory_with_one_sample_stands_for_it(directory: RunDirectory) -> None:
    assert read(directory, f" {ID}/1 ").id == f"{ID}/1/0"


@pytest.mark.parametrize(
    ("id", "words"),
    [
        (ID, f"{ID} is a group; samples of {ID}: {ID}/0/0, {ID}/1/0"),
        (f"{ID}/1/7", f"{ID}/1/7 names no sample; samples of {ID}: {ID}/0/0"),
        (f"{ID}/2", r"has no sample: it failed \(timeout\)"),
        ("g999999/0/0", "try one of g000000"),
        ("e000000/0", "was evaluated, not trained"),
    ],
)
def test_what_is_no_sample_is_refused_with_those_there_are(directory: RunDirectory, id: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(directory, id)
