"""The critic role in a process of its own: the service that the trainer's process calls.

The trainer's service begins, loads and captures it together with the policy (B9), and hands it receipts during a stage; rows come and
go by the bus. Whoever lost the other begins again from a snapshot: a critic that restarted answers nothing before it was loaded.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from relax.bus.row import Receipt
from relax.core.error import InvariantError, TransportError
from relax.core.protocol import Captured
from relax.model.name import copy_tensors
from relax.runtime.task import TaskSet
from relax.runtime.wire_client import WireClient
from relax.services.access import BusAccess
from relax.services.assembly import Assembly
from relax.services.critic import CriticWeights, load_critic, open_critic
from relax.services.remote.desk import RoleLostError, StageNotice
from relax.services.remote.host import Host
from relax.services.remote.occupation import CountedCalls, Occupation
from relax.services.roles.critic import Critic

ROLE = "critic"


class CriticService:
    """Served by the critic's process. `access` gives the bus of a stage."""

    def __init__(self, assembly: Assembly, access: Callable[[int], BusAccess]) -> None:
        self._assembly, self._access = assembly, access
        self._weights: CriticWeights | None = None
        self._captured: Captured | None = None
        self._critic: Critic | None = None

    async def begin(self, stage: int, policy: str) -> None:
        """Start a stage from the weights of the policy in file `policy`, as `write_reference` wrote it."""
        compute = self._assembly.compute("critic")
        model = await compute.run(self._assembly.copy_model)
        await compute.run(lambda: copy_tensors(load_file(policy), model))
        self._weights, self._critic = await open_critic(self._assembly, stage, model), None

    async def load(self, stage: int, folder: str) -> None:
        """Go on with a stage from what stands beside the policy in `folder`. Raises UserError (B9)."""
        self._weights, self._critic = await load_critic(self._assembly, stage, Path(folder)), None

    async def join(self, notice: StageNotice) -> None:
        """The steps of a stage follow."""
        setup = self._assembly.stage(notice.index, notice.first, notice.end)
        self._critic = Critic(self._access(notice.index), self._begun(), setup.algorithm, setup.trainer)

    async def evaluate(self, step: int, receipts: Sequence[Receipt]) -> None:
        await self._joined().evaluate(step, receipts)

    async def train(self, step: int, receipts: Sequence[Receipt]) -> Mapping[str, float]:
        return await self._joined().train(step, receipts)

    async def capture(self) -> None:
        """Copy the state; `write_capture` takes it to the disk."""
        self._captured = await self._begun().capture()

    async def write_capture(self, folder: str) -> None:
        if self._captured is None:
            raise InvariantError("RR4", "write_capture was called without a capture")
        captured, self._captured = self._captured, None
        await self._assembly.compute("writer").run(captured.write, folder)

    def _begun(self) -> CriticWeights:
        if self._weights is None:
            raise TransportError("the critic's process has restarted and holds no weights; begin again from a snapshot")
        return self._weights

    def _joined(self) -> Critic:
        self._begun()
        if self._critic is None:
            raise InvariantError("TQ10", "the critic was asked for a step before it had joined a stage")
        return self._critic


class CriticLink:
    """The critic as the trainer's process has it: `access.CriticAccess`, and what the trainer's service asks between steps.

    A critic that is lost, or that holds nothing, is lost for the trainer's state too: both begin again from a snapshot (B9).
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._client: WireClient | None = None

    async def evaluate(self, step: int, receipts: Sequence[Receipt]) -> None:
        await self.call("evaluate", step, receipts)

    async def train(self, step: int, receipts: Sequence[Receipt]) -> Mapping[str, float]:
        found: Mapping[str, float] = await self.call("train", step, receipts)
        return found

    async def call(self, method: str, *args: Any) -> Any:
        """Waits for the critic's process where there is none yet. Raises RoleLostError."""
        try:
            if self._client is None:
                address: str = await self._host.client.call("desk", "where", ROLE)
                self._client = WireClient(address, self._host.spec.host, self._host.spec.secret)
            return await self._client.call(ROLE, method, *args)
        except TransportError as error:
            client, self._client = self._client, None
            if client is not None:
                await client.close()
            raise RoleLostError(f"the critic's process was lost in {method}: {error}") from error


async def start_critic(host: Host, tasks: TaskSet) -> None:
    """Serve it; the trainer commands it."""
    occupation = Occupation(host.pulse.of(ROLE), "with what the trainer asked for", "the trainer")
    service = CriticService(host.assembly, lambda stage: host.access(stage)[0])
    host.server.serve(ROLE, CountedCalls(service, occupation))
    occupation.has(0)
    tasks.start("stay", host.stay(), endless=True)
