"""The inside of a host's process: takes its output to its log, awaits its entry, answers for its life.

Made by a launcher in a fresh process (as a Ray actor, or by a test), driven by that launcher's `HostProcess`. What leaves it is
plain JSON, errors included: nothing that user code raised has to be unpickled elsewhere.
"""

import asyncio
import faulthandler
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from relax.config.table import load_object
from relax.core.error import TaskError, UserError
from relax.runtime.isolation import die_with_parent
from relax.runtime.liveness import Pulse


class Hosted:
    """One host, from the inside. Its methods run on the process's event loop; `run` is called once, the others at any time."""

    def __init__(self) -> None:
        self._pulse = Pulse()
        self._ready = asyncio.Event()
        self._work: asyncio.Task[Any] | None = None

    async def open(self, log: str, directory: str) -> dict[str, Any]:
        """Prepare the process: output to the file `log`, the launcher's working directory, death with the parent.

        SIGUSR1 writes the stacks of all threads to the log from then on, also while the event loop hangs. Raises OSError when
        the log cannot be written.
        """
        with suppress(OSError):  # not Linux: the launcher and its cluster see to it alone
            die_with_parent()  # from the loop's thread, which lives as long as the process
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable(file=2, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        with suppress(FileNotFoundError):  # on another node it may not be there
            os.chdir(directory)
        return {"pid": os.getpid()}

    async def run(self, entry: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Await `entry`, a `module:function`, as `function(spec, pulse)`. Returns how it ended, as `Exit` is built from."""
        self._work = asyncio.create_task(self._enter(entry, spec), name=entry)
        try:
            result = json.loads(json.dumps(await self._work))
            return {"reason": "its work is done", "finished": True, "result": result}
        except asyncio.CancelledError:
            return {"reason": "it was asked to stop"}
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            print(text, file=sys.stderr, flush=True)
            final = isinstance(error, UserError)
            return {"reason": f"{type(error).__name__}: {error}", "final": final, "detail": text}

    async def _enter(self, entry: str, spec: Mapping[str, Any]) -> Any:
        function = load_object(entry)
        if not inspect.iscoroutinefunction(function):
            raise UserError(f"{entry} is no async function(spec, pulse), so no host can run it")
        self._pulse.when_ready(self._ready.set)
        try:
            return await function(spec, self._pulse)
        except SystemExit as error:  # asyncio would end the loop with it, and nobody would hear how
            raise TaskError(f"it called sys.exit({error.code!r})") from error

    async def ready(self) -> dict[str, Any]:
        """Wait until the entry has called `pulse.ready()`; returns `pulse.about`."""
        await self._ready.wait()
        return self._pulse.about

    async def beat(self) -> dict[str, Any]:
        """What the roles say of themselves now."""
        return self._pulse.read().to_json()

    async def stop(self) -> None:
        """Cancel the entry; `run` returns once it has ended."""
        if self._work is not None:
            self._work.cancel()
