from decimal import Decimal
from typing import Any

import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from relax.core.error import TaskError
from relax.core.trajectory import Score
from relax.tasks.config import ExactConfig, NumericConfig
from relax.tasks.rewards.exact import Exact
from relax.tasks.rewards.numeric import Numeric, find_numbers


async def _exact(response: str, reference: Any, **options: Any) -> float | None:
    return (await Exact(ExactConfig(**options))(toy.prompt(reference=reference), toy.answered(response))).value


async def _numeric(response: str, reference: Any, **options: Any) -> Score:
    return await Numeric(NumericConfig(**options))(toy.prompt(reference=reference), toy.answered(response))


@pytest.mark.parametrize(
    ("response", "reference", "options", "value"),
    [
        ("42", "42", {}, 1.0),
        (" 42\n", "42", {}, 1.0),
        (" 42", "42", {"strip": False}, 0.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"ignore_case": True}, 1.0),
        ("42", 42, {}, 1.0),
        ("1.5", 1.5, {}, 1.0),
        ("b", ["a", "b"], {}, 1.0),
        ("c", ["a", "b"], {}, 0.0),
        ("", "a", {}, 0.0),
    ],
)
async def test_exact(response: str, reference: Any, options: Any, value: float) -> None:
    assert await _exact(response, reference, **options) == value


@pytest.mark.parametrize("reference", [None, True, {"a": 1}, [None], ["a", {}]])
async def test_case_g9_exact_refuses_a_reference_it_cannot_read(reference: Any) -> None:
    with pytest.raises(TaskError, match=r"record 7 of source 'toy' has the reference"):
        await _exact("None", reference)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("no number, v2, x3", []),
        ("12", [12]),
        ("-3 and +4", [-3, 4]),
        ("\N{MINUS SIGN}3", [-3]),
        ("7-5=2", [7, 5, 2]),
        ("(7)-5", [7, 5]),
        ("x=-5.", [-5]),
        ("1,234,567.5", ["1234567.5"]),
        ("1,2", [1, 2]),
        ("$1,200 or 50%", [1200, 50]),
        ("1e-5", ["0.00001"]),
        (".5 and 0.5", ["0.5", "0.5"]),
        ("version 1.2.3", []),
        ("12km", [12]),
        ("1e1000", []),
        ("9" * 101, []),
        ("- 3 apples", [3]),
    ],
)
def test_numbers_of_a_text(text: str, numbers: list[Any]) -> None:
    assert find_numbers(text) == [Decimal(number) for number in numbers]


@given(st.text(alphabet="0123456789.,-+eE ()x", max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    assert all(number.is_finite() for number in find_numbers(text))


@given(st.integers(-(10**30), 10**30))
async def test_every_integer_equals_itself_and_no_neighbour(number: int) -> None:
    assert (await _numeric(f"So it is {number:,}.", number)).value == 1.0
    assert (await _numeric(f"So it is {number + 1}", number)).value == 0.0


@pytest.mark.parametrize(
    ("response", "reference", "options", "value"),
    [
        ("the answer is 12", "12", {}, 1.0),
        ("12 then 13", "12", {}, 0.0),
        ("12 then 13", "13", {}, 1.0),
        ("0.50", "0.5", {}, 1.0),
        ("1,000", 1000, {}, 1.0),
        ("3.14", "3.14159", {}, 0.0),
        ("3.14", "3.14159", {"tolerance": 0.01}, 1.0),
        ("12", "12", {"answer": "whole"}, 1.0),
        (" 12 ", "12", {"answer": "whole"}, 1.0),
        ("it is 12", "12", {"answer": "whole"}, 0.0),
        ("12 13", "12", {"answer": "whole"}, 0.0),
        ("12", 12.0, {}, 1.0),
        ("0.00001", 1e-05, {}, 1.0),
    ],
)
async def test_numeric(response: str, reference: Any, options: Any, value: float) -> None:
    assert (await _numeric(response, reference, **options)).value == value


@pytest.mark.parametrize("reference", ["12 km", "$12", "12%", "12 apples", "about 12"])
async def test_case_g9_a_reference_with_a_unit_is_its_number(reference: str) -> None:
    assert (await _numeric("12", reference)).value == 1.0


@pytest.mark.parametrize("reference", [None, True, "", "many", "1 or 2", [12], float("nan")])
async def test_case_g9_numeric_refuses_a_reference_without_exactly_one_number(reference: Any) -> None:
    with pytest.raises(TaskError, match="numeric needs one number"):
        await _numeric("12", reference)


async def test_case_h5_a_response_without_a_number_still_has_one_score() -> None:
    assert await _numeric("I do not know", 12) == Score(0.0, info={"answer": None})
