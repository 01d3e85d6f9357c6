"""Regular expressions: checked with the configuration, judged in the pool, stopped when they never end."""

import asyncio
from typing import Any

import pytest
import toy

from relax.config.base import check_rules
from relax.core.error import LimitError, TaskError
from relax.core.trajectory import Score
from relax.runtime.pool import ProcessPool
from relax.tasks.config import RegexConfig
from relax.tasks.rewards.regex import build_regex


async def judge(pool: ProcessPool, response: str, reference: Any = "42", **options: Any) -> Score:
    return await build_regex(RegexConfig(**options), pool=pool)(toy.prompt(reference=reference), toy.answered(response))


async def test_presence_is_enough_without_a_group(pool: ProcessPool) -> None:
    for response, match, value in [
        ("it is 42!", "search", 1.0),
        ("it is", "search", 0.0),
        ("42", "full", 1.0),
        (" 42\n", "full", 1.0),
        ("it is 42!", "full", 0.0),
    ]:
        score = await judge(pool, response, None, pattern=r"\d+", match=match)
        assert score == Score(value, info={"matched": value == 1.0}), (response, match)


async def test_the_last_match_of_a_group_is_compared_with_the_reference(pool: ProcessPool) -> None:
    group = {"pattern": r"#### (?P<answer>\S+)", "group": "answer"}
    assert await judge(pool, "#### 41 and then #### 42", **group) == Score(1.0, info={"found": "42"})
    assert await judge(pool, "#### 42 and then #### 41", **group) == Score(0.0, info={"found": "41"})
    assert await judge(pool, "42", **group) == Score(0.0, info={"found": None})
    assert (await judge(pool, "#### 42", 42, **group)).value == 1.0
    # An alternative without the group says nothing of it: the last match that has it counts.
    assert (await judge(pool, "#### 42 none", pattern=r"#### (\d+)|none", group=1)).value == 1.0
    assert (await judge(pool, "x", "x", pattern="(x)", group=1, match="full")).value == 1.0


async def test_flags_change_what_matches(pool: ProcessPool) -> None:
    assert (await judge(pool, "PARIS", "Paris", pattern="(paris)", group=1, ignore_case=True)).value == 1.0
    assert (await judge(pool, "PARIS", "Paris", pattern="(paris)", group=1)).value == 0.0
    assert (await judge(pool, "a\n42\nb", pattern="^42$", multiline=True)).value == 1.0
    assert (await judge(pool, "a\n42\nb", pattern="^42$")).value == 0.0
    assert (await judge(pool, "a\nb", pattern="a.b", dot_all=True)).value == 1.0
    assert (await judge(pool, "a\nb", pattern="a.b")).value == 0.0


@pytest.mark.parametrize("reference", [None, True, ["42"]])
async def test_case_g9_a_group_needs_a_reference(pool: ProcessPool, reference: Any) -> None:
    with pytest.raises(TaskError, match=r"record 7 of source 'toy' has the reference .*; regex compares"):
        await judge(pool, "42", reference, pattern="(42)", group=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "(42"}, "no regular expression"),
        ({"pattern": "x*"}, "matches an empty text"),
        ({"pattern": "^|x"}, "matches an empty text"),
        ({"pattern": "(x)", "group": 2}, "has these groups: 1"),
        ({"pattern": "(?P<a>x)", "group": "b"}, "has these groups: 1, a"),
        ({"pattern": "x", "group": "b"}, "has these groups: none"),
    ],
)
def test_a_pattern_is_checked_with_the_configuration(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rules(RegexConfig(**options))
    check_rules(RegexConfig(pattern="x"))


async def test_case_h2_catastrophic_backtracking_is_killed_and_blocks_nobody(pool: ProcessPool) -> None:
    stuck = asyncio.create_task(judge(pool, "a" * 60 + "!", pattern="(a+)+$", timeout_s=0.3))
    beats = 0
    while not stuck.done():
        await asyncio.sleep(0.01)
        beats += 1
    with pytest.raises(LimitError, match=r"longer than 0\.3 s and was killed"):
        await stuck
    assert beats > 5
    assert pool.killed == 1
    assert (await judge(pool, "42", pattern="42")).value == 1.0
