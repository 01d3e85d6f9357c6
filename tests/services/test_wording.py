"""What a person reads of an operation: no names of fields, no `True`."""

from typing import get_args

import pytest

from relax.config.secret import Secret
from relax.core.message import Json
from relax.services.control.request import (
    Attach,
    Checkpoint,
    Detach,
    Evaluate,
    Pause,
    Request,
    Restart,
    Resume,
    Scale,
    arguments_of,
    kind_of,
)
from relax.services.control.wording import asked, outcome

CASES: list[tuple[Request, str, dict[str, Json], str]] = [
    (Scale({"rollout": 4}), "scale rollout to 4", {"rollout": 4}, "4 engines"),
    (
        Scale({"rollout": 1, "reward": 2}, reason="engines are full"),
        "scale rollout to 1 and reward to 2, because engines are full",
        {"rollout": 1, "reward": 2},
        "1 engine and 2 reward processes",
    ),
    (
        Attach("lab", "http://10.0.0.7:8000", 4, Secret("env:RELAX_ENGINE_LAB")),
        "attach lab at http://10.0.0.7:8000, for 4 requests at a time",
        {"engines": 2},
        "2 engines now",
    ),
    (Detach("lab"), "drain lab", {"engines": 1}, "1 engine left"),
    (
        Restart("advantage"),
        "restart advantage",
        {"host": "light", "incarnation": 2},
        "light is ready again; its log is light.2.log",
    ),
    (Restart("controller"), "restart controller", {"host": "controller"}, "controller starts anew"),
    (Pause(), "pause", {"paused": True}, "nothing new begins; `relax resume` lets the run go on"),
    (Resume(), "resume", {"paused": False}, "the run goes on"),
    (Checkpoint(), "checkpoint", {"step": 40}, "written at step 40"),
    (Evaluate(), "evaluate", {"step": 40}, "step 40 is evaluated"),
]


@pytest.mark.parametrize(("request_", "words", "result", "came_of_it"), CASES, ids=lambda value: str(value)[:20])
def test_an_operation_in_words(request_: Request, words: str, result: dict[str, Json], came_of_it: str) -> None:
    assert asked(kind_of(request_), arguments_of(request_)) == words
    assert outcome(kind_of(request_), result) == came_of_it


def test_every_operation_has_words() -> None:
    assert {type(case[0]) for case in CASES} == set(get_args(Request))


@pytest.mark.parametrize("kind", ["scale", "attach", "restart", "pause", "something new"])
def test_what_is_not_known_is_told_as_it_is(kind: str) -> None:
    unknown = {"sort": {"of": 3}, "none": None}
    assert asked(kind, unknown).endswith("of=3")
    assert outcome(kind, unknown) in ("of=3", "nothing new begins; `relax resume` lets the run go on")
    assert outcome(kind, {}) == ""
