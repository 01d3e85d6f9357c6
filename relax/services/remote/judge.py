"""The judge role in a process of its own: engines of every judge of the run, asked by the processes that give rewards.

Whoever asks while the judge's process is being replaced waits for the next one; how long that may take is the reward's time limit.
"""

from dataclasses import dataclass

from relax.core.completion import Completion, GenerateInput, Sampling, Session
from relax.core.error import EngineError
from relax.core.protocol import Generate
from relax.runtime.task import TaskSet
from relax.runtime.wire_client import LinkError, WireClient
from relax.services.remote.host import Host
from relax.services.remote.occupation import CountedCalls, Occupation

ROLE = "judge"
TRIES = 3
"""Processes of the judge that one question is asked of."""


async def start_judge(host: Host, tasks: TaskSet) -> None:
    """Load the models of all judges, then serve each under its name."""
    judges = host.assembly.judges
    host.busy("loading", ROLE)
    await judges.open(judges.names)
    occupation = Occupation(host.pulse.of(ROLE), "judging", "questions")
    for name in judges.names:
        host.server.serve(_target(name), CountedCalls(JudgeService(judges.router(name)), occupation))
    occupation.has(0)


def ask_elsewhere(host: Host) -> None:
    """The judges of this process are those of the judge's process."""
    judges = host.assembly.judges
    judges.elsewhere.update({name: RemoteJudge(host, name) for name in judges.names})


@dataclass(frozen=True, slots=True)
class JudgeService:
    """What rewards may call."""

    router: Generate

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        return await self.router.generate(input, sampling, session)


class RemoteJudge:
    """`Generate` of one judge, wherever its process is now."""

    def __init__(self, host: Host, name: str) -> None:
        self._host, self._name = host, name
        self._client: WireClient | None = None
        self._address = ""

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        """Raises EngineError when several processes of the judge were lost under this question."""
        lost = ""
        for _ in range(TRIES):
            client, address = await self._connect(but=lost)
            try:
                found: Completion = await client.call(_target(self._name), "generate", input, sampling, session)
            except LinkError:
                lost = address  # others may have found the next process already
            else:
                return found
        raise EngineError(f"judge {self._name!r}: its process was lost {TRIES} times under one question; see its log")

    async def _connect(self, but: str) -> tuple[WireClient, str]:
        """The judge's process, another one than that at address `but`, and its address."""
        if self._client is None or self._address == but:
            address: str = await self._host.client.call("desk", "where", ROLE, but)
            if address != self._address:
                self._address = address
                self._client = WireClient(address, self._host.spec.host, self._host.spec.secret)
        assert self._client is not None
        return self._client, self._address


def _target(name: str) -> str:
    return f"judge-{name}"
