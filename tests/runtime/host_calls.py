"""What hosts of the tests run: small entries, each awaited as `function(spec, pulse)` inside its own process."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from relax.core.error import UserError
from relax.runtime.liveness import Pulse


async def serve(spec: Mapping[str, Any], pulse: Pulse) -> None:
    """Ready at once, then works for ever; tells what it was given."""
    role = pulse.of("worker")
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "RELAX_PLACE", "COLOUR")
    pulse.about = {"spec": dict(spec), "cwd": os.getcwd(), "env": {name: os.environ.get(name) for name in names}}
    print("serving", spec.get("text", ""))
    pulse.ready()
    role.busy("work")
    while True:
        role.advance()
        await asyncio.sleep(0.05)


async def crash(spec: Mapping[str, Any], pulse: Pulse) -> None:
    raise RuntimeError("no wheels on this bus")


async def misconfigured(spec: Mapping[str, Any], pulse: Pulse) -> None:
    raise UserError("model.path names nothing")


async def leave(spec: Mapping[str, Any], pulse: Pulse) -> None:
    sys.exit(3)


async def finish(spec: Mapping[str, Any], pulse: Pulse) -> dict[str, Any]:
    pulse.ready()
    return {"steps": spec["steps"]}


async def loop(spec: Mapping[str, Any], pulse: Pulse) -> str:
    """Whose event loop it runs on."""
    return type(asyncio.get_running_loop()).__module__


async def returns_an_object(spec: Mapping[str, Any], pulse: Pulse) -> object:
    return object()


async def hang(spec: Mapping[str, Any], pulse: Pulse) -> None:
    """The event loop itself hangs, but only in the first incarnation."""
    pulse.of("worker")
    pulse.ready()
    await asyncio.sleep(0.1)
    try:
        os.mkdir(spec["marker"])
    except FileExistsError:
        await asyncio.Event().wait()
    sleep_in_the_loop()


def sleep_in_the_loop() -> None:
    time.sleep(600)


async def stubborn(spec: Mapping[str, Any], pulse: Pulse) -> None:
    """Will not stop when it is asked to."""
    pulse.of("worker")
    pulse.ready()
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            print("not me")


async def segfault(spec: Mapping[str, Any], pulse: Pulse) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)
    await asyncio.Event().wait()
