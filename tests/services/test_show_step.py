"""What `relax show step` knows of a step."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from relax.core.error import UserError
from relax.services.ledger import Ledger
from relax.services.outline import outline_of
from relax.services.reader import LedgerReader
from relax.services.show_step import StepView, read_step
from tests.services.story import story_config, write_story


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    write_story(ledger, 50)
    ledger.close()
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[LedgerReader]:
    ledger = LedgerReader(path, read_only=True)
    yield ledger
    ledger.close()


def read(ledger: LedgerReader, tmp_path: Path, step: int) -> StepView:
    return read_step(ledger, outline_of(story_config(tmp_path)), step)


def test_a_step_has_its_groups_ages_times_and_metrics(ledger: LedgerReader, tmp_path: Path) -> None:
    view = read(ledger, tmp_path, 24)
    assert (view.step, view.stage, view.in_take_order) == (24, "rl", False)
    assert [group.id for group in view.groups] == ["g000049", "g000050"]
    one = view.groups[1]
    assert (one.rewards, one.reward, one.tokens, one.base, one.deadline, one.age) == ((1.0, 0.0), 0.5, 8, 23, 24, 1)
    assert (one.source, one.record) == ("add", 50)
    assert view.ages == {0: 2, 1: 14}
    assert view.times == {"idle/engine-0": 0.25, "idle/trainer": 0.4, "step/seconds": 2.0}
    assert view.metrics["train/tokens"] == 16
    assert not view.metrics.keys() & view.times.keys()


def test_a_supervised_step_has_no_ages_and_no_rewards(ledger: LedgerReader, tmp_path: Path) -> None:
    view = read(ledger, tmp_path, 3)
    assert (view.stage, view.ages) == ("warm-up", {})
    assert [(group.reward, group.age) for group in view.groups] == [(None, None), (None, None)]


def test_groups_are_in_take_order_where_the_ledger_knows_it(path: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        if "place" not in [row[1] for row in connection.execute("PRAGMA table_info(group_)")]:
            connection.execute("ALTER TABLE group_ ADD COLUMN place INTEGER")
        connection.execute("UPDATE group_ SET place = 1 WHERE id = 'g000049'")
        connection.execute("UPDATE group_ SET place = 0 WHERE id = 'g000050'")
    ledger = LedgerReader(path, read_only=True)
    view = read(ledger, tmp_path, 24)
    ledger.close()
    assert view.in_take_order
    assert [group.id for group in view.groups] == ["g000050", "g000049"]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (50, "step 50 is not done yet; steps 0 to 49 are done"),
        (60, "has no step 60: it has 60, numbered from 0; steps 0 to 49 are done"),
        (-1, "has no step -1"),
    ],
)
def test_a_step_that_is_not_there_is_refused_with_those_that_are(
    ledger: LedgerReader, tmp_path: Path, step: int, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        read(ledger, tmp_path, step)


def test_a_run_that_has_done_nothing_says_so(tmp_path: Path) -> None:
    Ledger(tmp_path / "empty.sqlite").close()
    ledger = LedgerReader(tmp_path / "empty.sqlite", read_only=True)
    with pytest.raises(UserError, match="has not finished a step yet"):
        read(ledger, tmp_path, 0)
    ledger.close()
