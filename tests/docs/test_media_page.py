"""The tables of the media page hold everything that the code has: reasons, columns, metrics, options, models."""

import ast
import re
from pathlib import Path

import pytest
from page import ROOT

from relax.core.column import COLUMNS
from relax.data.media.codec import REASONS
from relax.data.media.reference import PART_TYPES
from relax.services.media_row import COLUMNS as MEDIA_COLUMNS
from relax.services.metric import METRICS

PAGE = (ROOT / "docs" / "media.md").read_text("utf-8")
MEDIA = sorted((ROOT / "relax" / "data" / "media").glob("*.py"))


def section(title: str) -> str:
    """The text below a heading of level 2."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/media.md has no section {title!r}"
    return found[1]


def reasons_in(path: Path) -> set[str]:
    """The reasons that a file's calls of `Refusal` and `BadMedium` give as text."""
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    named = [node.args[0] for node in calls if getattr(node.func, "id", "") in ("Refusal", "BadMedium") and node.args]
    return {node.value for node in named if isinstance(node, ast.Constant)}


def test_every_reason_for_which_a_medium_is_refused_is_in_the_table() -> None:
    found = set(REASONS).union(*map(reasons_in, MEDIA))
    assert len(found) > 50
    known = {"not a record", "unencodable text"}  # of any record; the page of data speaks of them
    table = section("Refused media")
    assert {reason for reason in found - known if f"`{reason}`" not in table} == set()


def test_the_table_of_reasons_names_none_that_the_code_does_not_give() -> None:
    told = set(re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.*?) \|", section("Refused media"), re.MULTILINE))))
    elsewhere = {"over-long prompt", "text only", "cannot be rendered"}  # relax/data/stream.py
    assert told - elsewhere - set(REASONS).union(*map(reasons_in, MEDIA)) == set()


@pytest.mark.parametrize("column", MEDIA_COLUMNS)
def test_every_column_of_media_is_in_the_table(column: str) -> None:
    assert f"| `{column}` | {COLUMNS[column].table.value} |" in section("How a feature travels")


def test_every_metric_of_media_is_in_the_table() -> None:
    names = {name for name in METRICS if name.startswith(("media/", "training/encoder/"))}
    assert len(names) == 13
    assert {name for name in names if f"`{name}`" not in section("Metrics")} == set()


def test_every_type_of_part_is_named() -> None:
    assert {kind for kind in PART_TYPES if f"`{kind}`" not in section("Where media stand in a record")} == set()
