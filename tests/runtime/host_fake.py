"""Two launchers without Ray: one of imaginary processes that a test moves by hand, one of real subprocesses."""

import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax.core.error import TransportError, UserError
from relax.runtime.host import Exit, HostSpec, Placed
from relax.runtime.hosted import Hosted
from relax.runtime.liveness import Beat, RoleBeat, RoleState
from relax.runtime.process import WatchedProcess


class FakeProcess:
    """Does what it is told: `come_up`, `end`; `silent` makes it answer nothing."""

    def __init__(self, spec: HostSpec, incarnation: int) -> None:
        self.spec, self.incarnation = spec, incarnation
        self.log = f"logs/{spec.name}.{incarnation}.log"
        self.silent = False
        self.deaf = False
        self.calls: list[str] = []
        self.beat_now = Beat({"worker": RoleBeat(RoleState.waiting, "work")})
        self._up = asyncio.Event()
        self._ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    def come_up(self) -> None:
        self._up.set()

    def end(self, how: Exit) -> None:
        if not self._ended.done():
            self._ended.set_result(how)

    async def started(self) -> Placed:
        return Placed(1000 + self.incarnation, "here")

    async def ready(self) -> Mapping[str, Any]:
        await self._up.wait()
        return {"incarnation": self.incarnation}

    async def beat(self) -> Beat:
        if self._ended.done():
            raise TransportError("gone")
        if self.silent:
            await asyncio.Event().wait()
        return self.beat_now

    async def inspect(self) -> str:
        return "stopped (T)" if self.silent else "in serve()"

    async def stop(self) -> None:
        self.calls.append("stop")
        if not self.deaf:
            self.end(Exit("it was asked to stop"))

    async def kill(self) -> None:
        self.calls.append("kill")
        self.end(Exit("killed by signal 9"))

    async def exit(self) -> Exit:
        return await asyncio.shield(self._ended)


class FakeLauncher:
    """Keeps every process it made; `refuse` makes the next launches raise."""

    def __init__(self) -> None:
        self.made: list[FakeProcess] = []
        self.refuse: Exception | None = None
        self.up_at_once = True

    def launch(self, spec: HostSpec, incarnation: int) -> FakeProcess:
        if self.refuse is not None:
            raise self.refuse
        process = FakeProcess(spec, incarnation)
        if self.up_at_once:
            process.come_up()
        self.made.append(process)
        return process

    def newest(self, host: str) -> FakeProcess:
        return [process for process in self.made if process.spec.name == host][-1]

    async def close(self) -> None:
        pass


_INSIDE = "import sys; sys.path[:0] = {paths!r}; from tests.runtime.host_fake import answer; import asyncio; asyncio.run(answer())"


async def answer() -> None:
    """The inside of a real subprocess: one JSON question a line on the input, one JSON answer a line on the old output."""
    import os

    reader, out = asyncio.StreamReader(), os.fdopen(os.dup(1), "w", buffering=1)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    hosted, tasks = Hosted(), set[asyncio.Task[None]]()

    async def reply(number: int, method: str, args: list[Any]) -> None:
        print(json.dumps([number, await getattr(hosted, method)(*args)]), file=out)

    while line := await reader.readline():
        tasks.add(asyncio.create_task(reply(*json.loads(line))))


class SubprocessLauncher:
    """Real processes with `Hosted` inside, spoken to over pipes."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    def launch(self, spec: HostSpec, incarnation: int) -> "Subprocess":
        if not spec.entry:
            raise UserError(f"host {spec.name} has no entry")
        process = Subprocess(spec, str(self._logs / f"{spec.name}.{incarnation}.log"))
        process.life = asyncio.create_task(process.live())
        return process

    async def close(self) -> None:
        pass


class Subprocess:
    def __init__(self, spec: HostSpec, log: str) -> None:
        self.spec, self.log = spec, log
        self.life: asyncio.Task[Exit]
        self._process: asyncio.subprocess.Process
        self._watched: WatchedProcess
        self._up = asyncio.Event()
        self._asked = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def live(self) -> Exit:
        code = _INSIDE.format(paths=sys.path)
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=pipe, stdout=pipe)
        self._watched = WatchedProcess(self._process.pid)
        reading = asyncio.create_task(self._read())
        self._up.set()
        await self._ask("open", self.log, str(Path.cwd()))
        running = asyncio.create_task(self._ask("run", self.spec.entry, dict(self.spec.spec)))
        await asyncio.wait([running, reading], return_when=asyncio.FIRST_COMPLETED)
        outcome = Exit(**running.result()) if running.done() and running.exception() is None else None
        await self.kill()
        code_of = await self._process.wait()
        await reading
        running.cancel()
        self._watched.close()
        self._process._transport.close()  # type: ignore[attr-defined]
        return outcome or Exit(f"killed by signal {-code_of} ({signal.Signals(-code_of).name})")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            number, value = json.loads(line)
            if not (future := self._answers.pop(number)).done():
                future.set_result(value)
        for future in self._answers.values():
            if not future.done():
                future.set_exception(TransportError("gone"))
                future.exception()

    async def _ask(self, method: str, *args: Any) -> Any:
        await self._up.wait()
        assert self._process.stdin is not None
        if self._process.returncode is not None:
            raise TransportError("gone")
        self._asked += 1
        future = self._answers[self._asked] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps([self._asked, method, args]).encode() + b"\n")
        return await future

    async def started(self) -> Placed:
        await self._up.wait()
        return Placed(self._process.pid)

    async def ready(self) -> Mapping[str, Any]:
        return await self._ask("ready")  # type: ignore[no-any-return]

    async def beat(self) -> Beat:
        return Beat.from_json(await self._ask("beat"))

    async def inspect(self) -> str:
        return await self._watched.look(self.log)

    async def stop(self) -> None:
        await self._ask("stop")

    async def kill(self) -> None:
        self._watched.kill()

    async def exit(self) -> Exit:
        return await asyncio.shield(self.life)
