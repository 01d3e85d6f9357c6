"""Versions sent between processes: one broadcast in buckets to all engines that ask for the same version at the same time.

`BroadcastSource` runs beside the trainer, over whatever reads its versions; `BroadcastReader` in each engine. Waits for: more askers
(`gather_s`), then peers (`timeout_s`). A rank that dies ends that round only: the others raise TransportError, serve on, and ask again.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed
from torch import Tensor

from relax.core.error import RelaxError, TransportError
from relax.core.protocol import WeightReader
from relax.core.version import Version
from relax.core.weight import WeightSet
from relax.weights.bucket import Assembly, Header, cut
from relax.weights.cost import TransferCounters

T = TypeVar("T")
_c10d: Any = torch.distributed
"""Groups are made from their parts, not by `init_process_group`: the one default group of a process belongs to its trainer."""
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Invitation:
    """To round `number` at the store `host:port`. The source is rank 0, then come `names`, sorted; `name` is who was invited."""

    number: int
    host: str
    port: int
    name: str
    names: tuple[str, ...]

    @property
    def rank(self) -> int:
        return 1 + self.names.index(self.name)


class Source(Protocol):
    """What a reader asks, here or in the trainer's process."""

    async def invite(self, name: str, version: Version) -> Invitation: ...


@dataclass(slots=True)
class _Round:
    """Who has asked for one version, each with the future of its invitation."""

    askers: dict[str, "asyncio.Future[Invitation]"] = field(default_factory=dict)


class BroadcastSource:
    """Sends what `reader` reads. `host` is this process's address, as the others reach it."""

    def __init__(
        self,
        reader: WeightReader,
        host: str = "127.0.0.1",
        bucket_bytes: int = BUCKET_BYTES,
        gather_s: float = 0.02,
        timeout_s: float = 30.0,
    ) -> None:
        self.counters = TransferCounters()
        self.failures = 0
        self._reader = reader
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._gather_s = gather_s
        self._timeout_s = timeout_s
        self._number = 0
        self._gathering: dict[Version, _Round] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def invite(self, name: str, version: Version) -> Invitation:
        """Ask to be sent a version; answered when the round begins. The caller then joins it at once.

        Raises what fetching the version raises here. No deadline: a round begins `gather_s` after its first asker.
        """
        round = self._gathering.get(version)
        if round is None:
            round = self._gathering[version] = _Round()
            task = asyncio.create_task(self._run_round(version, round), name=f"broadcast of {version}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        asked: asyncio.Future[Invitation] = asyncio.get_running_loop().create_future()
        before, round.askers[name] = round.askers.get(name), asked
        if before is not None and not before.done():
            before.set_exception(TransportError(f"{name} asked again for {version}; the later request is answered"))
        return await asked  # an asker that is cancelled before the round begins is not waited for

    async def close(self) -> None:
        """Fail whoever waits. A round that is being sent ends by itself or by its deadline."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_round(self, version: Version, round: _Round) -> None:
        """One round; whatever goes wrong is told to the askers, or is theirs to see."""
        try:
            await asyncio.sleep(self._gather_s)  # engines that were told of the version together ask together
            weights = await self._reader.fetch(version)
            self._close(version, round)
            waiting = {name: asked for name, asked in sorted(round.askers.items()) if not asked.done()}
            if waiting:
                await self._send_to(waiting, weights)
        except Exception as error:
            # Nobody waits for this task: its failure is counted, and told to those who were not invited yet.
            self.failures += 1
            _fail(round, error)
        finally:
            self._close(version, round)
            _fail(round, TransportError(f"the broadcast of {version} was given up; ask again"))

    def _close(self, version: Version, round: _Round) -> None:
        """Whoever asks from now on is in the next round."""
        if self._gathering.get(version) is round:
            del self._gathering[version]

    async def _send_to(self, waiting: dict[str, "asyncio.Future[Invitation]"], weights: WeightSet) -> None:
        timeout = timedelta(seconds=self._timeout_s)
        store = _c10d.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._number += 1
        names = tuple(waiting)
        for name, asked in waiting.items():
            asked.set_result(Invitation(self._number, self._host, store.port, name, names))
        prefixed = _c10d.PrefixStore(str(self._number), store)
        await in_thread(
            _send, _Group(prefixed, 0, len(names) + 1, self._host, timeout), weights, self._bucket_bytes, self.counters
        )


class BroadcastReader:
    """WeightReader for the engine `name`; `host` is this process's address, as the others reach it."""

    def __init__(self, source: Source, name: str, host: str = "127.0.0.1", timeout_s: float = 30.0) -> None:
        self.counters = TransferCounters()
        self._source = source
        self._name = name
        self._host = host
        self._timeout_s = timeout_s

    async def fetch(self, version: Version) -> WeightSet:
        """The tensors of a version, this process's own, verified bucket by bucket and as a whole (WS3).

        Raises TransportError when something of it is damaged or a peer dies or is silent for `timeout_s` seconds.
        """
        invitation = await self._source.invite(self._name, version)
        weights = await in_thread(
            _receive, invitation, self._host, timedelta(seconds=self._timeout_s), version, self.counters
        )
        if weights.manifest.version != version:
            raise TransportError(f"{version} was asked for and {weights.manifest.version} came; it is refused")
        self.counters.versions += 1
        return weights


class _Group:
    """A gloo group of its own, beside any other of the process. Entered, it is connected; errors of peers are TransportErrors."""

    def __init__(self, store: Any, rank: int, size: int, host: str, timeout: timedelta) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._host, self._timeout = host, timeout
        self._group: Any = None
        self._options = _c10d.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = 0, 0

    def __enter__(self) -> "_Group":
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = self._timeout
        try:
            self._group = _c10d.ProcessGroupGloo(self._store, self._rank, self._size, options)
        except RuntimeError as error:
            raise self._lost(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group = None  # closes its sockets, which is how peers learn of a failure
        self._store = None

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's bytes into everybody's tensor; nothing is sent for an empty one (C6)."""
        if tensor.numel() == 0:
            return
        try:
            self._group.broadcast([tensor], self._options).wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> TransportError:
        reason = str(error).splitlines()[0][:200]
        return TransportError(
            f"rank {self._rank} of {self._size} lost the broadcast: {reason}; a peer died or was silent for"
            f" {self._timeout.total_seconds():g} s; the version is fetched again without it"
        )


def _send(group: _Group, weights: WeightSet, bucket_bytes: int, counters: TransferCounters) -> None:
    with group:
        buckets = cut(weights, bucket_bytes)
        while True:
            with counters.phase("copy"):
                bucket = next(buckets, None)
            if bucket is None:
                break
            with counters.phase("send", bucket.header.num_bytes):
                group.broadcast(torch.frombuffer(bytearray(bucket.header.pack()), dtype=torch.uint8))
                group.broadcast(bucket.payload)
    counters.versions += 1


def _receive(
    invitation: Invitation, host: str, timeout: timedelta, version: Version, counters: TransferCounters
) -> WeightSet:
    try:
        store = _c10d.TCPStore(invitation.host, invitation.port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise TransportError(
            f"the source of {version} at {invitation.host}:{invitation.port} cannot be reached: {error}"
        ) from error
    prefixed, size = _c10d.PrefixStore(str(invitation.number), store), len(invitation.names) + 1
    assembly, last = Assembly(), False
    with _Group(prefixed, invitation.rank, size, host, timeout) as group:
        packed = torch.empty(Header.FORMAT.size, dtype=torch.uint8)
        while not last:
            with counters.phase("receive"):
                group.broadcast(packed)
                header = Header.unpack(packed.numpy().tobytes())
                payload = assembly.place(header)
                group.broadcast(payload)
            with counters.phase("hash", header.num_bytes):
                last = assembly.take(header, payload)
    with counters.phase("verify"):
        return assembly.finish()


def _fail(round: _Round, error: Exception) -> None:
    for asked in round.askers.values():
        if not asked.done():
            asked.set_exception(
                error if isinstance(error, RelaxError) else TransportError(f"{type(error).__name__}: {error}")
            )


async def in_thread(function: Callable[..., T], *args: object) -> T:
    """Call on a thread of its own: collective calls wait for one another, so none may wait for another's thread.

    Whoever stops waiting does not stop the call, which ends by its own deadline.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="broadcast")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)
    finally:
        executor.shutdown(wait=False)
