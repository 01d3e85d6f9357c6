"""What the pages say is true: their Python runs, their recipes load, their commands parse, the files they name exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from page import PAGES, ROOT, Block, all_blocks, blocks, prose

from relax.config.load import load_config
from relax.config.reference import reference_page
from relax.core.error import ConfigError

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
LANGUAGES = {"python", "yaml", "sh", "text", "bibtex"}
OTHER_COMMANDS = {"git", "cd", "tensorboard", "kill"}
"""Commands of shell blocks that are not ours to parse."""
CODE = re.compile(r"`([^`\n]+)`")
NAMED = re.compile(
    r"[\w.-]+(?:/[\w.-]+)*\.(?:py|md|yaml|toml|txt)|(?:relax|docs|examples|tests|recipes|benchmarks)/[\w/]*"
)
LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")


def ids(values: list[Any]) -> list[str]:
    return [value.where if isinstance(value, Block) else str(value.relative_to(ROOT)) for value in values]


def with_python() -> list[Path]:
    return [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_there_is_something_to_check() -> None:
    names = {page.name for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "quickstart.md", "staleness.md", "index.md"} <= names
    assert len(with_python()) >= 5
    assert {block.language for block in all_blocks(*LANGUAGES)} >= {"python", "yaml", "sh"}


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_every_block_names_its_language(page: Path) -> None:
    found = [(block.where, block.language) for block in blocks(page) if block.language not in LANGUAGES]
    assert found == []


@pytest.mark.parametrize("page", with_python(), ids=ids(with_python()))
def test_python_runs_from_top_to_bottom(page: Path) -> None:
    """One namespace for each page. A traceback shows the page's own line."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=ids(all_blocks("yaml")))
def test_yaml_is_a_recipe_or_can_be_laid_over_one(block: Block, tmp_path: Path) -> None:
    assert block.marks in ((), ("fragment",)), f"{block.where}: mark a block that is no whole recipe as `yaml fragment`"
    path = tmp_path / "block.yaml"
    path.write_text(block.text, "utf-8")
    config = load_config([QUICKSTART, path] if block.marks else [path])
    assert config.stages


def commands() -> list[Any]:
    found = []
    for block in all_blocks("sh"):
        for number, line in enumerate(block.text.splitlines()):
            words = shlex.split(line, comments=True)
            if words:
                found.append(pytest.param(words, id=f"{block.page.name}:{block.line + number}"))
    return found


@pytest.mark.parametrize("words", commands())
def test_commands_parse(words: list[str]) -> None:
    program, *arguments = words
    if program == "relax":
        parse_relax(arguments)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert set(arguments) <= set(targets)
    elif program == "python" and arguments[0] == "-m":
        assert module_path(arguments[1]) is not None, f"there is no module {arguments[1]}"
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()
    else:
        assert program in OTHER_COMMANDS


def parse_relax(arguments: list[str]) -> None:
    """Every sub-command and option is known, and every recipe that is named loads. Nothing is run."""
    from relax.services.cli.application import app
    from relax.services.cli.argument import split_arguments

    words = [word for word in arguments if word not in (">", "docs/configuration.md")]
    command: Any = typer.main.get_command(app)
    context: Any = command.make_context("relax", words, resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    paths, overrides = split_arguments([word for word in words if word.endswith(".yaml") or "=" in word])
    if paths:
        assert load_config(paths, overrides).stages


def module_path(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((found for found in (path.with_suffix(".py"), path / "__main__.py") if found.is_file()), None)


def test_a_command_that_is_wrong_is_seen() -> None:
    with pytest.raises(Exception, match="No such option: --no-such-option"):
        parse_relax(["train", "--no-such-option"])
    with pytest.raises(Exception, match="No such command 'no-such-command'"):
        parse_relax(["no-such-command"])
    with pytest.raises(ConfigError, match="no_such_key"):
        parse_relax(["train", "recipes/quickstart.yaml", "rollout.no_such_key=1"])


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [match[1] for match in LINK.finditer(prose(page)) if "://" not in match[1]]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_files_that_are_named_exist(page: Path) -> None:
    """A path in backticks is one from the root, from `relax/`, or from the page's own folder; a bare name may lie anywhere."""
    named = {match[1] for match in CODE.finditer(prose(page)) if NAMED.fullmatch(match[1])}
    assert {name for name in named if not exists(name)} <= RUN_FILES


RUN_FILES = {"config.yaml", "my_rewards.py"}
"""Named files that a run or a user makes."""


def exists(name: str) -> bool:
    if any((root / name).exists() for root in (ROOT, ROOT / "relax")):
        return True
    folders = ("relax", "docs", "examples", "tests", "benchmarks", "recipes")
    return "/" not in name and any(next((ROOT / folder).rglob(name), None) is not None for folder in folders)


def test_the_configuration_page_is_the_generated_one() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert page == reference_page(), "run `relax config reference > docs/configuration.md`"


def test_the_index_links_every_page() -> None:
    linked = {match[1] for match in LINK.finditer((ROOT / "docs" / "index.md").read_text("utf-8"))}
    assert linked >= {page.name for page in PAGES if page.parent.name == "docs" and page.name != "index.md"}


def test_the_readme_is_short_and_names_every_room() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 160
    rooms = {path.name for path in (ROOT / "relax").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert {room for room in rooms if f"| `{room}` |" not in text} == set()
