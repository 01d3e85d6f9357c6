"""Multiple choice: the usual forms of an answer, the last one wins, two at once are none."""

from typing import Any

import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from relax.config.base import check_rules
from relax.core.error import TaskError
from relax.core.trajectory import Score
from relax.tasks.choice import stated
from relax.tasks.config import MultipleChoiceConfig
from relax.tasks.rewards.multiple_choice import MultipleChoice

LETTERS = dict.fromkeys("ABCDE")
CITIES = ["Paris", "Rome", "New York", "a number"]


async def judge(response: str, reference: Any = "B", cities: Any = CITIES, **options: Any) -> Score:
    reward = MultipleChoice(MultipleChoiceConfig(**options))
    return await reward(toy.prompt(reference=reference, cities=cities), toy.answered(response))


@pytest.mark.parametrize(
    "response",
    [
        *("B", "(B)", "b", "B.", "**B**", "[B]", "B) Rome", "I add them.\nSo:\nB"),
        *("Answer: B", "answer: b", "The answer is B.", "Final answer: (B)", "**Answer:** B", "**Answer**: **B**"),
        *("Answer:\nB", "the answer is option B", "The correct choice is B because it fits", "answer = B"),
        *(r"\boxed{B}", r"so $\boxed{\text{B}}$", r"\boxed{(B)}", r"Answer: \boxed{B}", r"Answer: \(B\)"),
        *("Answer: A\nno, the answer is B", r"\boxed{A} or rather \boxed{B}", "Option A is wrong. Answer: B"),
        "A) Paris\nB) Rome\nAnswer: B, a city of hills",
    ],
)
async def test_the_usual_forms_state_an_option(response: str) -> None:
    assert await judge(response) == Score(1.0, info={"answer": "B"})


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: A", "A"),
        ("Answer: B\nAnswer: A", "A"),
        ("Answer: Z", "Z"),
        ("I think B", None),
        ("B is what I would not say", None),
        ("The answer is not B", None),
        ("the answer is a good one", None),
        ("Answer choices: A, B", None),
        ("", None),
        (r"\boxed{", None),
        (r"\boxed{" + "B" * 1000, None),
    ],
)
async def test_what_states_another_option_or_none_scores_zero(response: str, answer: str | None) -> None:
    assert await judge(response) == Score(0.0, info={"answer": answer})


@pytest.mark.parametrize(
    "response",
    ["Answer: A or B", "Answer: A, B", "the answer is A/B", r"\boxed{A, B}", "A) Paris B) Rome", "Answer: (A) and (B)"],
)
async def test_two_options_at_once_score_zero_and_say_so(response: str) -> None:
    assert await judge(response) == Score(0.0, info={"answer": None, "ambiguous": ["A", "B"]})


async def test_rule_se4_listing_every_option_is_one_guess_at_most() -> None:
    listed = "\n".join(f"Answer: {letter}" for letter in "ABCDE")
    assert [(await judge(listed, letter)).value for letter in "ABCDE"] == [0, 0, 0, 0, 1]
    for hedge in ("Answer: A, B, C, D, E", "A B C D E", r"\boxed{A}\boxed{B}" * 3 + r"\boxed{A or B}"):
        assert [(await judge(hedge, letter)).value for letter in "ABCDE"] == [0.0] * 5, hedge


async def test_texts_of_the_record_name_options_too() -> None:
    for response in ("Rome", "Answer: Rome.", r"\boxed{\text{rome}}", "Answer: B. Rome", "I walk there.\n**Rome**"):
        assert (await judge(response, options="cities")).info == {"answer": "B"}, response
    assert (await judge("the answer is a number", "D", options="cities")).value == 1.0
    assert (await judge("Answer: B. Paris", options="cities")).info == {"answer": None, "ambiguous": ["A", "B"]}
    assert (await judge("Answer: Rome", options=None)).value == 0.0


async def test_a_reference_is_a_letter_a_text_or_a_position() -> None:
    for reference in ("B", "b", "(B)", "B.", 1):
        assert (await judge("B", reference)).value == 1.0, reference
    assert (await judge("B", "ROME", options="cities")).value == 1.0


@pytest.mark.parametrize("reference", [None, True, 5, -1, "F", "Rome", "", "AB", 1.0, ["B"]])
async def test_case_g9_a_reference_that_names_no_option_is_refused(reference: Any) -> None:
    with pytest.raises(TaskError, match=r"record 7 of source 'toy' has the reference .* a letter of ABCDE"):
        await judge("B", reference)


@pytest.mark.parametrize("cities", [None, "Paris", [], ["Paris"], ["Paris", 2], ["Paris", " . "], ["x"] * 6])
async def test_case_g9_options_that_are_no_list_of_texts_are_refused(cities: Any) -> None:
    with pytest.raises(TaskError, match=r"record 7 .* the options .* in 'cities'; .* a list of 2 to 5 texts"):
        await judge("B", cities=cities, options="cities")


def test_letters_are_checked() -> None:
    with pytest.raises(ValueError, match="repeats a letter"):
        check_rules(MultipleChoiceConfig(letters="ABA"))
    for letters in ("A", "ab", "A B"):
        with pytest.raises(ValueError, match="letters"):
            MultipleChoiceConfig(letters=letters)


@given(st.text(alphabet="ABab ().:,\n\\boxed{}answer is$*", max_size=80))
def test_any_text_can_be_read(text: str) -> None:
    assert all(len(letter) == 1 and letter.isupper() for letter in stated(text, LETTERS))


def test_case_h2_a_long_text_of_markers_is_read_once() -> None:
    """A pattern that went back for every marker would not end in the life of this test."""
    for text in ("answer: " * 50_000, r"\boxed{" * 50_000, "answer" + "*" * 200_000, "(" * 200_000, "A, " * 50_000):
        stated(text, LETTERS)
