"""Evaluation sets and stop strings: what their own rules refuse, and where the violation is said to lie."""

from typing import Any

import pytest
from pydantic import ValidationError

from relax.config.base import check_rules
from relax.config.section import EvalSet, SamplingSection

SOURCE = {"type": "generator", "name": "held", "task": "addition", "function": "relax.data.arithmetic:addition"}


def problems(node: Any) -> dict[tuple[Any, ...], str]:
    try:
        check_rules(node)
    except ValidationError as error:
        return {item["loc"]: item["msg"] for item in error.errors()}
    return {}


def evaluation_set(**fields: Any) -> EvalSet:
    return EvalSet.model_validate({"name": "heldout", **fields})


def test_a_set_has_one_source_or_several() -> None:
    other = {**SOURCE, "name": "seen"}
    single, mixed = evaluation_set(source=SOURCE), evaluation_set(sources=[SOURCE, other])
    assert [problems(node) for node in (single, mixed)] == [{}, {}]
    assert [path for path, _ in single.source_nodes] == [("source",)]
    assert [(path, node.name) for path, node in mixed.source_nodes] == [  # type: ignore[attr-defined]
        (("sources", 0), "held"),
        (("sources", 1), "seen"),
    ]
    assert "is missing" in problems(evaluation_set())[("source",)]
    assert "beside `source`" in problems(evaluation_set(source=SOURCE, sources=[other]))[("sources",)]
    assert "also the name" in problems(evaluation_set(sources=[SOURCE, SOURCE]))[("sources", 1, "name")]


def test_k_is_at_most_the_samples_of_a_prompt() -> None:
    assert problems(evaluation_set(source=SOURCE, samples=8, k=[1, 8])) == {}
    found = problems(evaluation_set(source=SOURCE, samples=4, k=[1, 8]))
    assert found == {("k", 1): "is 8, more than the 4 samples of a prompt; raise `samples` to it, or leave it out"}
    for wrong in ({"k": [0]}, {"threshold": float("nan")}, {"samples": 0}):
        with pytest.raises(ValidationError):
            evaluation_set(source=SOURCE, **wrong)


def test_stop_strings_are_whole_text_that_can_end_something() -> None:
    assert problems(SamplingSection(stop=("\n\n", "Question:"))) == {}
    assert "half of a character" in problems(SamplingSection(stop=("a", "\ufffd")))[("stop", 1)]
    for wrong in (("",), ("x" * 257,), tuple(map(str, range(17)))):
        with pytest.raises(ValidationError):
            SamplingSection(stop=wrong)
