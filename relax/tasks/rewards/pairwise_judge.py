"""Siblings compared by a model that is shown two answers at a time: each is worth the share of its comparisons that it wins.

A group reward: it is called once for all surviving siblings of a prompt. A comparison whose verdict cannot be read is left out; an
answer with none left has a failure for a score, never a 0 (case H10).
"""

import asyncio
from collections.abc import Iterator, Sequence

from relax.core.message import Prompt
from relax.core.protocol import Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config_judge import PairwiseJudgeConfig
from relax.tasks.grade import Scale
from relax.tasks.judge_engine import JudgeEngine
from relax.tasks.judge_prompt import COMPARE, judge_messages, question_fields, quote
from relax.tasks.rewards.judge import Asking, Question, Verdict

WORDS = {"a": 1.0, "b": 0.0, "tie": 0.5}
"""What the judge may say, and what it is worth to the answer shown first."""


def pairs(count: int, opponents: int | None) -> Iterator[tuple[int, int]]:
    """Which of `count` siblings meet: all of them, or each with the next ones in a ring so that it meets at least `opponents`."""
    reach = count - 1 if opponents is None else min(-(-opponents // 2), count - 1)
    seen: set[frozenset[int]] = set()
    for step in range(1, reach + 1):
        for first in range(count):
            pair = first, (first + step) % count
            if frozenset(pair) not in seen:
                seen.add(frozenset(pair))
                yield pair


class PairwiseJudge:
    """Core's `GroupReward`."""

    def __init__(self, config: PairwiseJudgeConfig, judge: JudgeEngine, pool: Pool) -> None:
        self._config = config
        self._asking = Asking(config, judge, pool, Scale(words=WORDS))

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        """One score per trajectory, in order; an only one has nobody to be compared with, which is a failure."""
        meetings = list(pairs(len(trajectories), self._config.opponents))
        if self._config.both_orders:
            meetings += [(second, first) for first, second in meetings]
        questions = [self._question(prompt, trajectories, pair, number) for number, pair in enumerate(meetings)]
        verdicts = await asyncio.gather(*map(self._asking.verdict, questions))
        won: list[list[float]] = [[] for _ in trajectories]
        for (first, second), verdict in zip(meetings, verdicts, strict=True):
            if verdict.value is not None:
                won[first].append(verdict.value)
                won[second].append(1.0 - verdict.value)
        reason = _reason(verdicts)
        return [
            Score(sum(values) / len(values), info={"comparisons": len(values)}) if values else Score(None, reason)
            for values in won
        ]

    def _question(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], pair: tuple[int, int], number: int
    ) -> Question:
        config = self._config
        template = config.template or COMPARE
        first, second = (trajectories[index].response for index in pair)
        mark = self._asking.mark(prompt, first, second)
        fields = {
            **question_fields(prompt, template, config.quote),
            "first": quote(first, config.quote),
            "second": quote(second, config.quote),
            "scores": "A, B or tie",
            "mark": mark,
        }
        return Question(prompt, judge_messages(template, config.system, fields), mark, (first, second), number)


def _reason(verdicts: Sequence[Verdict]) -> str:
    return next((verdict.reason for verdict in verdicts if verdict.value is None), "no sibling to compare it with")


def build_pairwise_judge(config: PairwiseJudgeConfig, *, pool: Pool, judge: JudgeEngine) -> PairwiseJudge:
    """`judge` is the engine that `config.judge` names."""
    return PairwiseJudge(config, judge, pool)
