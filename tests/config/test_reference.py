"""The reference lists every key with a type, a default and a meaning."""

from dataclasses import replace

import pytest

from relax.config.reference import Row, components_of, describe, reference_page
from relax.config.tree import RunConfig

pytestmark = pytest.mark.usefixtures("tables")


def rows() -> dict[str, Row]:
    return {row.path: row for row in describe(RunConfig)}


def test_every_key_of_the_tree_has_a_meaning() -> None:
    assert [row.path for row in describe(RunConfig) if not row.meaning] == []


@pytest.mark.parametrize(
    ("path", "type_text", "default"),
    [
        ("schema", "1", "1"),
        ("run.seed", "integer >= 0", "0"),
        ("run.deterministic", "true | false", "false"),
        ("model.path", "text", "required"),
        ("model.tokenizer", "text | null", "null"),
        ("model.dtype", "float32 | bfloat16 | float16", "float32"),
        ("data.sources", "list of source (at least 1)", "required"),
        ("tasks", "mapping of section (at least 1)", "required"),
        ("tasks.<name>.env", "environment", "single_turn"),
        ("tasks.<name>.rewards", "list of reward", "[]"),
        ("stages[].optimizer", "optimizer | null", "null"),
        ("rollout.sampling", "section", ""),
        ("rollout.sampling.temperature", "number > 0", "1.0"),
        ("rollout.sampling.top_p", "number > 0, <= 1", "1.0"),
        ("training.grad_clip", "number > 0 | null", "1.0"),
        ("bus.max_bytes", "bytes > 0", "2.0GiB"),
        ("bus.max_rows", "auto | integer > 0", "auto"),
        ("monitors", "list of monitor", "[console, jsonl]"),
        ("eval.sets[].source", "source | null", "null"),
    ],
)
def test_row_says_type_and_default(path: str, type_text: str, default: str) -> None:
    row = rows()[path]
    assert replace(row, meaning="") == Row(path, type_text, default, "")


def test_components_are_listed_once_each() -> None:
    kinds = [component.table().kind for component in components_of(RunConfig).values()]
    assert sorted(kinds) == [
        "algorithm",
        "curriculum",
        "engine",
        "environment",
        "monitor",
        "optimizer",
        "reward",
        "runtime",
        "schedule",
        "source",
        "training backend",
    ]


def test_page_holds_the_tree_and_every_component() -> None:
    page = reference_page()
    assert "## `rollout`\n" in page
    assert "| `rollout.max_staleness` | integer &gt;= 0".replace("&gt;", ">") in page
    assert "| `tasks.<name>.min_survivors` |" in page
    assert "## Components: optimizer\n" in page
    assert "### `type: adamw`\n\nThe adamw optimizer.\n\n| key | type | default | meaning |" in page
    assert "| `betas` | list of 2: number, number | `[0.9, 0.95]` | Decay of the moments. |" in page
    assert all(line.count(" | ") == 3 for line in page.replace(" \\| ", " or ").splitlines() if line.startswith("|"))
