"""A generative reward model: another model grades the answer, and a number is read out of what it says.

The answer is quoted text in a user turn of the judge's own conversation, so nothing in it can open a turn (TK4), and what the
judge repeats of it earns nothing (SE4). A verdict that cannot be read is asked for again with another seed; without any the
score is a failure with its reason, never a 0 (case H10).
"""

import asyncio
from dataclasses import dataclass

from relax.core.error import TaskError
from relax.core.message import Json, Message, Prompt
from relax.core.protocol import Limits, Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config_judge import AskConfig, JudgeConfig
from relax.tasks.grade import Scale, find_matches, read_last, read_marked, read_matches, read_whole
from relax.tasks.judge_engine import JudgeEngine
from relax.tasks.judge_prompt import GRADE, as_text, judge_messages, mark_of, question_fields, quote

MAX_SHOWN, MAX_REPLIES = 300, 4
"""Characters of a reply, and replies, that are kept."""


@dataclass(frozen=True, slots=True)
class Question:
    """One thing to ask the judge: `answers` are the texts that it judges, as they are. `number` tells it from others of its prompt."""

    prompt: Prompt
    messages: tuple[Message, ...]
    mark: str
    answers: tuple[str, ...]
    number: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A value, or why there is none; `reply` is the last one, `asked` how many there were."""

    value: float | None
    reason: str = ""
    reply: str = ""
    asked: int = 0


class Asking:
    """Asks until a reply can be read, at most `attempts` times."""

    def __init__(self, config: AskConfig, judge: JudgeEngine, pool: Pool, scale: Scale) -> None:
        self._config, self._judge, self._pool, self._scale = config, judge, pool, scale
        self._part = config.name or config.type
        self._limits = Limits(config.timeout_s, config.memory_bytes)

    def mark(self, prompt: Prompt, *answers: str) -> str:
        return mark_of(self._judge.run_seed, self._part, prompt, *answers)

    async def verdict(self, question: Question, shared: bool = False) -> Verdict:
        """Never raises for what the judge does wrong: the reason is one of few, so that equal ones count together."""
        config, text = self._config, ""
        for attempt in range(config.attempts):
            number = question.number * config.attempts + attempt
            try:
                reply = await self._judge.ask(
                    question.messages, question.prompt, self._part, number, config.timeout_s, shared
                )
                text = reply.text
                value = await self._read(reply.text, question) if reply.complete else None
            except TaskError as error:
                return Verdict(None, str(error), text, attempt + 1)
            if value is not None:
                return Verdict(value, reply=text, asked=attempt + 1)
        return Verdict(None, f"judge {self._judge.name}: no verdict that can be read", text, config.attempts)

    async def _read(self, reply: str, question: Question) -> float | None:
        config, scale = self._config, self._scale
        if config.read == "marked":
            return read_marked(reply, question.mark, scale)
        if config.read == "whole":
            return read_whole(reply, scale)
        if config.read == "last":
            return read_last(reply, question.answers, scale)
        assert config.pattern is not None
        matches = await self._pool.run(find_matches, config.pattern, reply, limits=self._limits)
        return read_matches(matches, question.answers, scale)


class Judge:
    """Core's `Reward`."""

    def __init__(self, config: JudgeConfig, judge: JudgeEngine, pool: Pool) -> None:
        self._config = config
        words = {word.casefold(): value for word, value in (config.words or {}).items()}
        self._scale = Scale(config.low, config.high, config.scale == "unit", words)
        self._asking = Asking(config, judge, pool, self._scale)

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """The mean of the verdicts that could be read, with the replies; a failure where none could. Raises TaskError when the record
        lacks the reference that the template shows."""
        count, messages, mark, answers = self._config.samples, *self._shown(prompt, trajectory)
        questions = [Question(prompt, messages, mark, answers, number) for number in range(count)]
        verdicts = await asyncio.gather(*(self._asking.verdict(one, shared=count > 1) for one in questions))
        values = [verdict.value for verdict in verdicts if verdict.value is not None]
        info: dict[str, Json] = {
            "verdicts": values,
            "unread": len(verdicts) - len(values),
            "asked": sum(verdict.asked for verdict in verdicts),
            "replies": [verdict.reply[:MAX_SHOWN] for verdict in verdicts[:MAX_REPLIES]],
        }
        if not values:
            return Score(None, verdicts[0].reason, info)
        return Score(sum(values) / len(values), info=info)

    def _shown(self, prompt: Prompt, trajectory: Trajectory) -> tuple[tuple[Message, ...], str, tuple[str, ...]]:
        """Messages, mark, and the texts that they quote of the policy."""
        config = self._config
        template = config.template or GRADE
        conversation = as_text(trajectory.messages) if trajectory.messages else trajectory.response
        answers = (trajectory.response, conversation)
        mark = self._asking.mark(prompt, *answers)
        fields = {
            **question_fields(prompt, template, config.quote),
            "answer": quote(trajectory.response, config.quote),
            "conversation": quote(conversation, config.quote),
            "scores": self._scale.wording,
            "mark": mark,
        }
        return judge_messages(template, config.system, fields), mark, answers


def build_judge(config: JudgeConfig, *, pool: Pool, judge: JudgeEngine) -> Judge:
    """`judge` is the engine that `config.judge` names."""
    return Judge(config, judge, pool)
