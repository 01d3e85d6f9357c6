"""What `--help` shows in a terminal of 80 columns."""

import re
from collections.abc import Callable

import pytest
from typer.main import get_command

from relax.services.cli.application import app
from tests.services.command import Done, run_command

Relax = Callable[..., Done]
GROUPS = ([], ["show"], ["config"], ["engine"])


@pytest.fixture
def relax(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Relax:
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: run_command(arguments, capfd)


def listed(text: str) -> dict[str, str]:
    """The commands of a help text, each with what is said of it, on however many lines."""
    found: dict[str, str] = {}
    name = ""
    for line in text.partition("Commands:\n")[2].splitlines():
        start = re.match(r"  ([a-z]+) +(.*)", line)
        name = start[1] if start else name
        found[name] = f"{found.get(name, '')} {start[2] if start else line.strip()}".strip()
    return found


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_a_list_of_commands_has_the_first_sentence_of_each_to_its_end(relax: Relax, group: list[str]) -> None:
    shown = relax(*group, "--help").out
    assert max(len(line) for line in shown.splitlines()) <= 80
    commands = listed(shown)
    assert commands
    for name, said in commands.items():
        whole = " ".join(relax(*group, name, "--help").out.split("\n\n")[1].split())
        assert whole.startswith(said)
        assert said.endswith(".")
        assert not said.endswith("..")


def test_every_group_of_commands_is_looked_at() -> None:
    root = get_command(app)
    groups = {name for name, command in root.commands.items() if hasattr(command, "commands")}  # type: ignore[attr-defined]
    assert groups == {name for group in GROUPS for name in group}
