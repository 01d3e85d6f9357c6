"""A judge's engine of which the test says what it answers, and rewards on it."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from relax.core.completion import Completion, GenerateInput, Sampling, Session
from relax.runtime.pool import ProcessPool
from relax.tasks.judge_engine import JudgeEngine
from relax.tasks.rewards.judge import Judge
from relax.tasks.rewards.pairwise_judge import PairwiseJudge
from relax.tasks.table import REWARDS
from tests.tasks.toy import END, ToyRenderer, ids, reply


class Says:
    """Answers with what a function makes of the text it is asked, and remembers texts and sessions."""

    def __init__(self, answer: Callable[[str], str | Exception | Completion]) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.sessions: list[Session] = []
        self.running = self.most = 0

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        text = "".join(chr(int(token) - 10) if token >= 10 else f"<{token}>" for token in input.token_ids)
        self.asked.append(text)
        self.sessions.append(session)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        answer = self.answer(text)
        if isinstance(answer, Exception):
            raise answer
        return reply(answer) if isinstance(answer, str) else answer


class Never:
    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError


def cut_off(text: str) -> Completion:
    token_ids = ids(text)
    flat = np.zeros(len(token_ids))
    return Completion(token_ids, flat.astype(np.float32), flat.astype(np.int32), flat.astype(bool), "length")


def engine(generate: Any, places: int = 8, **sampling: Any) -> JudgeEngine:
    return JudgeEngine(
        "grader", ToyRenderer(), generate, Sampling(max_tokens=400, stop_ids=(END,), **sampling), 3, places
    )  # type: ignore[arg-type]


def judge(generate: Any, pool: ProcessPool | None = None, places: int = 8, **fields: Any) -> Judge:
    config = REWARDS.config_class("judge").model_validate({"type": "judge", "judge": "grader", **fields})
    return REWARDS.component("judge")(config, pool=pool, judge=engine(generate, places))  # type: ignore[no-any-return]


def pairwise(generate: Any, **fields: Any) -> PairwiseJudge:
    node = {"type": "pairwise_judge", "judge": "grader", **fields}
    config = REWARDS.config_class("pairwise_judge").model_validate(node)
    return REWARDS.component("pairwise_judge")(config, pool=None, judge=engine(generate))  # type: ignore[no-any-return]
