"""The recipes and the rooms' real component tables: they load without torch, every component is described, dumps read back."""

import subprocess
import sys
from pathlib import Path

import pytest

from relax.config.load import dump_config, load_config
from relax.config.reference import components_of, describe, reference_page
from relax.config.tree import RunConfig, warnings_of

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TABLES = components_of(RunConfig)


def test_there_is_a_quickstart() -> None:
    assert ROOT / "recipes" / "quickstart.yaml" in RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_recipe_is_valid_without_warnings_and_survives_a_dump(path: Path, tmp_path: Path) -> None:
    config = load_config([path])
    assert warnings_of(config) == []
    dumped = tmp_path / "config.yaml"
    dumped.write_text(dump_config(config))
    assert load_config([dumped]) == config


@pytest.mark.parametrize("table_path", TABLES)
def test_every_component_of_a_real_table_has_a_config_with_meanings(table_path: str) -> None:
    component = TABLES[table_path]
    table = component.table()
    assert table.entries
    undescribed = [
        f"{name}.{row.path}"
        for name, entry in table.entries.items()
        for row in describe(component.config_class(name))
        if not row.meaning or not entry.summary
    ]
    assert undescribed == []


def test_reference_page_of_the_real_tables_and_a_recipe_load_without_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from relax.config.load import load_config;"
        "from relax.config.reference import reference_page; reference_page();"
        f"load_config([Path({str(RECIPES[0])!r})]);"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.stdout == "[]\n", result.stderr


def test_reference_page_lists_the_components_of_the_quickstart() -> None:
    page = reference_page()
    for name in ("grpo", "supervised", "adamw", "generator", "exact", "single_turn", "local", "console"):
        assert f"### `type: {name}`\n" in page
