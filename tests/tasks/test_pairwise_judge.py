"""Siblings compared two at a time: who meets whom, what a win is worth, and that nobody is scored for nothing."""

import re

import pytest
from pydantic import ValidationError

from relax.config.base import check_rules
from relax.tasks.config_judge import PairwiseJudgeConfig
from relax.tasks.rewards.pairwise_judge import pairs
from relax.tasks.score import score_group
from tests.tasks.judge_world import Says, pairwise
from tests.tasks.toy import answered, prompt


def longer(text: str) -> str:
    """Prefers the longer answer; says nothing that can be read about `?`."""
    first, second = (re.findall(rf"Answer {name}:\n\| (.*)", text)[0] for name in "AB")
    mark = re.findall(r"VERDICT-\w+", text)[-1]
    verdict = "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"
    return "hm" if "?" in first + second else f"{mark}: {verdict}"


async def test_each_answer_is_worth_the_share_of_its_comparisons_that_it_wins() -> None:
    generate = Says(longer)
    scores = await pairwise(generate)(prompt("go"), [answered(text) for text in ("aa", "aaaa", "a", "bb")])
    assert [one.value for one in scores] == pytest.approx([0.5, 1.0, 0.0, 0.5])
    assert len(generate.asked) == 12


async def test_a_judge_that_prefers_a_place_gives_nobody_anything_for_it() -> None:
    first = Says(lambda text: f"{re.findall(r'VERDICT-[0-9a-f]+', text)[-1]}: A")
    scores = await pairwise(first)(prompt("go"), [answered("aa"), answered("a")])
    assert [one.value for one in scores] == [0.5, 0.5]
    scores = await pairwise(first, both_orders=False)(prompt("go"), [answered("aa"), answered("a")])
    assert [one.value for one in scores] == [1.0, 0.0]


async def test_case_h10_comparisons_that_cannot_be_read_are_left_out_and_an_answer_without_any_fails() -> None:
    group = [answered(text) for text in ("aa", "a", "?")]
    scores = await pairwise(Says(longer), attempts=1)(prompt("go"), group)
    assert [one.value for one in scores] == [1.0, 0.0, None]
    assert scores[2].failure == "judge grader: no verdict that can be read"


async def test_an_only_sibling_has_nobody_to_be_compared_with() -> None:
    (only,) = await pairwise(Says(longer))(prompt("go"), [answered("a")])
    assert (only.value, only.failure) == (None, "no sibling to compare it with")


@pytest.mark.parametrize(("count", "opponents"), [(2, 1), (4, 2), (5, 2), (8, 3), (3, 9), (1, 1), (6, None)])
def test_everybody_meets_at_least_as_many_as_asked_and_nobody_twice(count: int, opponents: int | None) -> None:
    found = list(pairs(count, opponents))
    assert len({frozenset(pair) for pair in found}) == len(found)
    assert all(first != second for first, second in found)
    for sibling in range(count):
        met = sum(sibling in pair for pair in found)
        assert met >= min(count - 1 if opponents is None else opponents, count - 1)


async def test_a_group_reward_gives_parts_like_any_other() -> None:
    group = [answered("aa"), answered("a")]
    first, second = await score_group(prompt("go"), group, [("pairwise", 0.5, pairwise(Says(longer)))])
    assert (first[0]["value"], second[0]["value"]) == (1.0, 0.0)
    assert first[0]["info"] == {"comparisons": 2}


def test_a_template_that_hides_an_answer_is_refused() -> None:
    with pytest.raises(ValidationError, match="second"):
        check_rules(PairwiseJudgeConfig(judge="g", template="{first} {mark}"))
    assert PairwiseJudgeConfig(judge="g").judges_groups
