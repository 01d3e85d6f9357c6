"""Cases H: rewards, with math-verify in the killable pool; and what a completion cannot do to a grader (SE4)."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relax.core.error import LimitError, TaskError
from relax.core.message import Prompt, PromptKey, text_message
from relax.core.trajectory import Trajectory, Turn
from relax.runtime.pool import ProcessPool
from relax.tasks.config import FunctionConfig, MathVerifyConfig, NumericConfig
from relax.tasks.rewards.function import build_function
from relax.tasks.rewards.math_verify import build_math_verify
from relax.tasks.rewards.numeric import build_numeric
from relax.tasks.score import score

NEVER_ENDS = r"The answer is \boxed{9^{9^{9^{9^{9^{9}}}}}}"


def _prompt(reference: Any) -> Prompt:
    return Prompt(PromptKey("toy", 7, 0), "task", (text_message("user", "?"),), reference)


def _answered(response: str) -> Trajectory:
    return Trajectory((), (Turn(0, 0, 1, "stop", response),), (), "done")


@pytest.fixture
async def pool() -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(2)
    yield pool
    await pool.close()


async def _verify(pool: ProcessPool, reference: Any, response: str, **options: Any) -> float | None:
    reward = build_math_verify(MathVerifyConfig(**options), pool=pool)
    return (await reward(_prompt(reference), _answered(response))).value


async def test_case_h1_math_verify_scores_right_in_an_event_loop(pool: ProcessPool) -> None:
    expected = [
        (r"\frac{1}{2}", r"so it is \boxed{0.5}", 1.0),
        ("1/2", r"$\frac{2}{4}$", 1.0),
        ("42", "the answer is 42", 1.0),
        (42, "the answer is $43$", 0.0),
        ("$x^2+2x+1$", "$(x+1)^2$", 1.0),
        ("42", "I cannot say", 0.0),
    ]
    values = await asyncio.gather(*(_verify(pool, reference, response) for reference, response, _ in expected))
    assert values == [value for _, _, value in expected]


async def test_case_h1_math_verify_scores_right_from_a_loop_on_a_worker_thread() -> None:
    async def run() -> float | None:
        pool = ProcessPool()
        try:
            return await _verify(pool, "1/2", r"\boxed{0.5}")
        finally:
            await pool.close()

    assert await asyncio.to_thread(lambda: asyncio.run(run())) == 1.0


async def test_case_h2_one_endless_expression_among_64_delays_nobody(pool: ProcessPool) -> None:
    reward = build_math_verify(MathVerifyConfig(timeout_s=2.0), pool=pool)
    slow = asyncio.create_task(reward(_prompt("7"), _answered(NEVER_ENDS)))
    await asyncio.sleep(0)
    others = await asyncio.gather(
        *(reward(_prompt(str(index)), _answered(f"\\boxed{{{index}}}")) for index in range(63))
    )
    assert [score.value for score in others] == [1.0] * 63
    with pytest.raises(LimitError, match="longer than 2 s and was killed"):
        await slow
    assert pool.killed == 1
    assert await asyncio.gather(*(_verify(pool, "3", "3") for _ in range(2))) == [1.0, 1.0]


async def test_case_h2_a_killed_reward_is_counted_and_is_not_zero(pool: ProcessPool) -> None:
    reward = build_math_verify(MathVerifyConfig(timeout_s=0.5), pool=pool)
    total, parts = await score(_prompt("7"), _answered(NEVER_ENDS), [("math_verify", 1.0, reward)])
    assert total is None
    assert parts[0]["failure"].startswith("math_verify: LimitError: ")


async def test_case_h3_the_reference_is_the_gold_side(pool: ProcessPool) -> None:
    """math-verify lets a gold relation match an interval, not the other way round."""
    assert await _verify(pool, "$1<x<2$", "$(1,2)$") == 1.0
    assert await _verify(pool, "$(1,2)$", "$1<x<2$") == 0.0


async def test_case_g9_math_verify_refuses_a_reference_it_cannot_read(pool: ProcessPool) -> None:
    for reference, message in [(None, "needs text or a number"), ("", "no mathematical")]:
        with pytest.raises(TaskError, match=message):
            await _verify(pool, reference, "42")


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("hello", "words are no expression"),
        ("Hello, world!", "words are no expression"),
        ("pi", "words are no expression"),
        (float("nan"), "words are no expression"),
        (r"\frac{{{", "its braces do not pair"),
        (r"3\sqrt{2", "its braces do not pair"),
        (r"$\frac{{{$ 3", "its braces do not pair"),
        (r"$}{$", "its braces do not pair"),
        (r"\frac", "it holds no mathematical expression"),
        ("$$", "it holds no mathematical expression"),
    ],
)
async def test_case_g9_a_reference_that_math_verify_would_misread_fails_with_a_reason(
    pool: ProcessPool, reference: Any, reason: str
) -> None:
    reward = build_math_verify(MathVerifyConfig(), pool=pool)
    for response in ("42", r"so \boxed{hello}"):
        total, parts = await score(_prompt(reference), _answered(response), [("math_verify", 1.0, reward)])
        assert total is None
        assert "cannot be parsed" in parts[0]["failure"]
        assert reason in parts[0]["failure"]


async def test_case_g9_letters_in_an_expression_are_read(pool: ProcessPool) -> None:
    expected = [
        ("x", r"$x$", 1.0),
        ("(B)", r"\boxed{B}", 1.0),
        ("12 apples", r"\boxed{12}", 1.0),
        (r"\{1,2\}", r"$\{2,1\}$", 1.0),
        (r"\text{Monday}", r"$\text{Monday}$", 1.0),
        ("$xy$", "$yx$", 1.0),
        ("$xy$", r"\frac{{{", 0.0),
    ]
    values = await asyncio.gather(*(_verify(pool, reference, response) for reference, response, _ in expected))
    assert values == [value for _, _, value in expected]


MARKERS = [
    '{"value": 1.0, "failure": null, "info": {}}',
    "v\x00\x00\x00\x00\x00\x00\x00\x031.0",
    "reward: 1.0\nSCORE: 1\n[PASS]\n",
    "\\boxed{} $ \\text{correct} $ True",
    "correct\x00correct",
]


async def test_rule_se4_printing_a_graders_markers_earns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers travel apart from anything that a graded text makes a function print."""
    (tmp_path / "printing.py").write_text(
        "import os, sys\n"
        "def reward(response, reference):\n"
        "    print(response, flush=True)\n"
        "    sys.stderr.write(response)\n"
        "    for descriptor in (0, 1, 2):\n"
        "        os.write(descriptor, response.encode())\n"
        "    return response == reference\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    pool = ProcessPool(2)
    rewards = [
        ("function", 1.0, build_function(FunctionConfig(type="printing:reward"), pool=pool)),
        ("math", 1.0, build_math_verify(MathVerifyConfig(), pool=pool)),
        ("numeric", 1.0, build_numeric(NumericConfig(answer="whole"), pool=pool)),
    ]
    try:
        for response in MARKERS:
            total, parts = await score(_prompt("123456"), _answered(response), rewards)
            assert [part["value"] for part in parts] == [0.0, 0.0, 0.0], response
            assert total == 0.0
        assert (await score(_prompt("123456"), _answered("123456"), rewards))[0] == 3.0
    finally:
        monkeypatch.delitem(sys.modules, "printing")
        await pool.close()
