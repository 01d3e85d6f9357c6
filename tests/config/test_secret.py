"""Secrets never appear: not in dumps, not in errors (SE1)."""

from pathlib import Path

import pytest

from relax.config.load import dump_config, load_config
from relax.config.secret import Secret
from relax.core.error import ConfigError, UserError

pytestmark = pytest.mark.usefixtures("tables")


def problems_of(recipe: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config([recipe], overrides)
    return caught.value.problems


@pytest.mark.parametrize("value", ["hunter2", "'env:'", "12345678", "[hunter2]"])
def test_literal_secret_is_refused_without_showing_it(recipe: Path, value: str) -> None:
    problems = problems_of(recipe, f"monitors=[{{type: tracker, token: {value}}}]")
    assert len(problems) == 1
    assert "monitors.0.token: holds a secret" in problems[0]
    assert "hunter2" not in problems[0]
    assert "12345678" not in problems[0]


def test_secret_in_a_broken_override_is_not_shown(recipe: Path) -> None:
    for override in ("monitors.0.token=hunter2", "a..token=hunter2", "run.token=[hunter2", "run.api_key=hunter2"):
        assert "hunter2" not in "".join(problems_of(recipe, override))


def test_pydantic_secret_is_masked_in_a_dump_and_the_mask_is_refused(recipe: Path, tmp_path: Path) -> None:
    config = load_config([recipe], ["monitors=[{type: tracker, login: {password: hunter2}}]"])
    text = dump_config(config)
    assert "hunter2" not in text
    path = tmp_path / "dump.yaml"
    path.write_text(text)
    problems = problems_of(path)
    assert len(problems) == 1
    assert "monitors.0.login.password: is the mask of a secret" in problems[0]


def test_wrong_value_under_a_secret_key_is_not_shown(recipe: Path) -> None:
    problems = problems_of(recipe, "monitors=[{type: tracker, login: {password: 12345678}}]")
    assert "monitors.0.login.password: is a value that is not shown, but should be a valid string" in problems[0]
    assert "12345678" not in "".join(problems)


def test_unset_variable_is_named_when_the_secret_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_SECRET", raising=False)
    with pytest.raises(UserError, match="NO_SUCH_SECRET is not set"):
        Secret("NO_SUCH_SECRET").reveal()
