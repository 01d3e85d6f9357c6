"""A judge whose process is replaced under several questions (RR1)."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from relax.core.error import EngineError
from relax.runtime.wire_client import LinkError
from relax.services.remote import judge as module
from relax.services.remote.judge import TRIES, RemoteJudge


class Judges:
    """The processes of a judge by address; each question to one that is lost fails when its gate opens."""

    def __init__(self, lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses = [f"judge.{number}" for number in range(lost + 1)]
        self.gates: list[asyncio.Event] = []
        client = SimpleNamespace(call=self._where)
        spec = SimpleNamespace(host="reward-0", secret=None)
        self.host: Any = SimpleNamespace(client=client, spec=spec)
        monkeypatch.setattr(module, "WireClient", self._client)

    async def _where(self, target: str, method: str, role: str, but: str) -> str:
        """As the desk: the oldest process that is not `but`, or never."""
        number = self.addresses.index(but) + 1 if but else 0
        if number == len(self.addresses):
            await asyncio.Event().wait()
        return self.addresses[number]

    def _client(self, address: str, *names: Any) -> Any:
        async def call(*args: Any) -> str:
            if address == self.addresses[-1]:
                return "judged"
            gate = asyncio.Event()
            self.gates.append(gate)
            await gate.wait()
            raise LinkError("lost")

        return SimpleNamespace(call=call)


async def ask(judge: RemoteJudge) -> Any:
    nothing: Any = None
    return await judge.generate(nothing, nothing, nothing)


async def test_a_question_that_hears_late_of_a_lost_judge_goes_to_the_one_that_others_have_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judges = Judges(1, monkeypatch)
    judge = RemoteJudge(judges.host, "grader")
    first, second = asyncio.create_task(ask(judge)), asyncio.create_task(ask(judge))
    for _ in range(5):
        await asyncio.sleep(0)
    judges.gates[0].set()
    assert await asyncio.wait_for(first, 5) == "judged"
    judges.gates[1].set()
    assert await asyncio.wait_for(second, 5) == "judged"


async def test_a_question_is_asked_of_a_few_processes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    judges = Judges(TRIES, monkeypatch)
    asked = asyncio.create_task(ask(RemoteJudge(judges.host, "grader")))
    for number in range(TRIES):
        for _ in range(5):
            await asyncio.sleep(0)
        judges.gates[number].set()
    with pytest.raises(EngineError, match=f"was lost {TRIES} times under one question"):
        await asyncio.wait_for(asked, 5)
