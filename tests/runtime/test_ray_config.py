"""The Ray runtime's node of the configuration tree."""

from typing import Any

import pytest
from pydantic import ValidationError

from relax.config.base import check_rules
from relax.runtime.config import RayConfig
from relax.runtime.table import RUNTIMES


def problems(node: dict[str, Any]) -> list[tuple[Any, str]]:
    try:
        check_rules(RayConfig.model_validate(node))
    except ValidationError as error:
        return [(problem["loc"], problem["msg"]) for problem in error.errors()]
    return []


def test_the_defaults_are_sound() -> None:
    assert problems({}) == []
    assert RUNTIMES.config_class("ray") is RayConfig


def test_light_roles_can_share_a_process() -> None:
    node = {"hosts": [{"name": "light", "roles": ["reward", "advantage"]}], "resources": {"reward": {"node": "n"}}}
    assert problems(node) == []


@pytest.mark.parametrize(
    ("node", "place", "message"),
    [
        (
            {"hosts": [{"name": "x", "roles": ["a", "b"]}, {"name": "y", "roles": ["b"]}]},
            ("hosts", 1, "roles", 0),
            "'b' is already in host 'x'",
        ),
        ({"hosts": [{"name": "x", "roles": ["a", "a"]}]}, ("hosts", 0, "roles", 1), "already in host 'x'"),
        (
            {"hosts": [{"name": "x", "roles": ["a"]}, {"name": "x", "roles": ["b"]}]},
            ("hosts", 0, "name"),
            "names 2 hosts",
        ),
        (
            {"rewards": 2, "hosts": [{"name": "x", "roles": ["reward", "b"]}]},
            ("hosts", 0, "roles"),
            "rewards is 2; set rewards: 1",
        ),
        (
            {"hosts": [{"name": "x", "roles": ["a", "b"]}], "resources": {"a": {"node": "n"}, "b": {"node": "m"}}},
            ("hosts", 0, "roles"),
            "ask for a on n, b on m",
        ),
        ({"liveness": {"beat_s": 10, "silent_s": 15}}, ("liveness", "silent_s"), "less than two beats"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(node: dict[str, Any], place: Any, message: str) -> None:
    found = problems(node)
    assert place in [where for where, _ in found]
    assert any(message in text for _, text in found)


@pytest.mark.parametrize(
    "node",
    [
        {"hosts": [{"name": "a/b", "roles": ["a"]}]},
        {"hosts": [{"name": "a", "roles": []}]},
        {"rewards": 0},
        {"rest": 1},
    ],
)
def test_malformed_nodes_are_refused(node: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RayConfig.model_validate(node)
