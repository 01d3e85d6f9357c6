"""Operations in words, for people: what was asked for, and what came of it. From the JSON of either, as the control API gives it.

What is not known here, as from a controller of another release, is told as `name=value`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from relax.core.message import Json

_REPLICAS: Mapping[str, tuple[str, str]] = {
    "rollout": ("engine", "engines"),
    "reward": ("reward process", "reward processes"),
}
"""What a role that can be scaled has several of."""


def asked(kind: str, arguments: Mapping[str, Json]) -> str:
    """Such as `scale rollout to 4` or `restart engine-0`."""
    try:
        return _ASKED[kind](arguments)
    except (KeyError, TypeError, AttributeError):
        return f"{kind} {_flat(arguments)}".strip()


def outcome(kind: str, result: Mapping[str, Json]) -> str:
    """Such as `2 engines`; empty when nothing came of it that could be told."""
    try:
        return _OUTCOMES[kind](result) if result else ""
    except (KeyError, TypeError, AttributeError):
        return _flat(result)


def _asked_scale(arguments: Mapping[str, Any]) -> str:
    wanted = " and ".join(f"{role} to {number}" for role, number in arguments["replicas"].items())
    return f"scale {wanted}" + (f", because {arguments['reason']}" if arguments.get("reason") else "")


def _asked_attach(arguments: Mapping[str, Any]) -> str:
    return f"attach {arguments['name']} at {arguments['url']}, for {arguments['capacity']} requests at a time"


_ASKED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "scale": _asked_scale,
    "attach": _asked_attach,
    "detach": lambda arguments: f"drain {arguments['name']}",
    "restart": lambda arguments: f"restart {arguments['role']}",
}


def _replicas(role: str, number: int) -> str:
    one, several = _REPLICAS[role]
    return f"{number} {one if number == 1 else several}"


def _restarted(result: Mapping[str, Any]) -> str:
    host = result["host"]
    if result.get("incarnation") is None:
        return f"{host} starts anew"
    return f"{host} is ready again; its log is {host}.{result['incarnation']}.log"


_OUTCOMES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "scale": lambda result: " and ".join(_replicas(role, number) for role, number in result.items()),
    "attach": lambda result: f"{_replicas('rollout', result['engines'])} now",
    "detach": lambda result: f"{_replicas('rollout', result['engines'])} left",
    "restart": _restarted,
    "pause": lambda result: "nothing new begins; `relax resume` lets the run go on",
    "resume": lambda result: "the run goes on",
    "checkpoint": lambda result: f"written at step {result['step']}",
    "evaluate": lambda result: f"step {result['step']} is evaluated",
}


def _flat(facts: Mapping[str, Json]) -> str:
    """`{"replicas": {"rollout": 4}}` to `rollout=4`."""
    return " ".join(
        _flat(value) if isinstance(value, Mapping) else f"{name}={value}"
        for name, value in facts.items()
        if value is not None
    )
