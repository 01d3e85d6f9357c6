"""A scripted engine, a word-level renderer and two-turn environments for the episode tests."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relax.core.completion import Completion, GenerateInput, Ints, Sampling, Session, StopReason
from relax.core.id import group_id
from relax.core.message import Message, Prompt, PromptKey, text_message
from relax.core.protocol import Encoded, Step
from relax.core.trajectory import Trajectory, Turn

END, USER, ASSISTANT, TOOL, BREAK = 1, 2, 3, 4, 5
"""Special ids; every other id is 10 + the character's code."""
_OPEN = {"user": USER, "assistant": ASSISTANT, "tool": TOOL, "system": USER}


def ids(*parts: int | str) -> Ints:
    found: list[int] = []
    for part in parts:
        found += [part] if isinstance(part, int) else [10 + ord(letter) for letter in part]
    return np.array(found, dtype=np.int32)


class ToyRenderer:
    """`role text END BREAK` for each message. With `strip_thoughts`, earlier replies lose what stands before `=`."""

    stops = (END,)

    def __init__(self, strip_thoughts: bool = False) -> None:
        self.strip_thoughts = strip_thoughts

    def encode(self, messages: Sequence[Message], generate: bool = True) -> Encoded:
        found: list[int] = []
        last = len(messages) - 1
        for index, message in enumerate(messages):
            text = message.text
            if self.strip_thoughts and message.role == "assistant" and index != last:
                text = text.rpartition("=")[2]
            found += ids(_OPEN[message.role], text, END, BREAK).tolist()
        return Encoded(ids(*found, *([ASSISTANT] if generate else [])))

    def extend(self, history: Sequence[Message], token_ids: Ints, messages: Sequence[Message]) -> Encoded | None:
        whole = self.encode([*history, *messages]).token_ids
        if whole[: len(token_ids)].tolist() != token_ids.tolist():
            return None
        return Encoded(whole[len(token_ids) :])

    def decode(self, token_ids: Ints) -> str:
        return "".join(chr(int(token) - 10) for token in token_ids if int(token) != END)

    def is_stable(self, token_ids: Ints) -> bool:
        return "?" not in self.decode(token_ids)


def reply(text: str, stop: StopReason = "stop", version: int = 3) -> Completion:
    token_ids = ids(text, END) if stop == "stop" else ids(text)
    count = len(token_ids)
    return Completion(
        token_ids,
        -np.arange(1, count + 1, dtype=np.float32),
        np.full(count, version, np.int32),
        np.zeros(count, bool),
        stop,
    )


class Scripted:
    """An engine that gives the next completion of a script and remembers what it was asked."""

    def __init__(self, *script: Completion | Exception) -> None:
        self.script = list(script)
        self.asked: list[tuple[list[int], Sampling, Session]] = []

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        self.asked.append((input.token_ids.tolist(), sampling, session))
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class TwoTurn:
    """Answers the first reply as a tool would, and ends after the second."""

    def __init__(self, turns: int = 2) -> None:
        self.turns = turns
        self.replies: list[str] = []
        self.closed = 0

    async def start(self, prompt: Prompt) -> tuple[Message, ...]:
        return prompt.messages

    async def step(self, reply: Message) -> Step:
        self.replies.append(reply.text)
        if len(self.replies) == self.turns:
            return Step(done="done", info={"replies": len(self.replies)})
        return Step((text_message("tool", f"saw {reply.text}"),))

    async def close(self) -> None:
        self.closed += 1


class Broken(TwoTurn):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    async def start(self, prompt: Prompt) -> tuple[Message, ...]:
        self._fail("start")
        return prompt.messages

    async def step(self, reply: Message) -> Step:
        self._fail("step")
        return Step(done="done") if self.where == "close" else Step()

    async def close(self) -> None:
        await super().close()
        self._fail("close")

    def _fail(self, where: str) -> None:
        if self.where == where:
            raise KeyError("lost")


def prompt(text: str = "hi", reference: Any = None, **metadata: Any) -> Prompt:
    return Prompt(PromptKey("toy", 7, 0), "task", (text_message("user", text),), reference, metadata)


def answered(response: str, end: Any = "done") -> Trajectory:
    """A trajectory as the reward role reads it: turns, no tokens."""
    return Trajectory((), (Turn(0, 0, len(response), "stop", response),), (text_message("assistant", response),), end)


def sessions(seed: Callable[[int], int] = lambda turn: 100 + turn) -> Callable[[int], Session]:
    return lambda turn: Session(group_id(1), 0, turn, 0, seed(turn))
