"""Stands in for `relax.services.run` in tests of the command line: tells the made-up story in place of training.

What it does is the value of FAKE_RUN: finish, error, user_error, invariant, bug, full (the disk), ledger (a full disk, as SQLite
says it), wait (until stopped), stuck (ignores a stop), busy (blocks the loop and ignores a stop), early (trains nothing until it is
stopped).
"""

import asyncio
import errno
import os
import sqlite3
import time
from pathlib import Path

from relax.config.tree import RunConfig
from relax.core.error import InvariantError, RelaxError, UserError
from relax.core.message import Json
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger
from relax.services.monitors.hub import MonitorHub
from relax.services.resume import RunState
from relax.services.summary import write_summary
from relax.training.checkpoint import CheckpointStore
from tests.services.story import STEPS, step_metrics, write_story

HALF = 30


class Run:
    def __init__(self, config: RunConfig, directory: RunDirectory, hub: MonitorHub, resume: bool = False) -> None:
        self._config, self._directory, self._hub, self._resume = config, directory, hub, resume
        self._stop = asyncio.Event()
        self.is_over = False
        self.has_begun = os.environ.get("FAKE_RUN") != "early"

    async def execute(self) -> dict[str, Json]:
        behaviour = os.environ.get("FAKE_RUN", "finish")
        (self._directory.root / "resumed").write_text(str(self._resume))
        print(f"executing {behaviour}", flush=True)
        monitors = asyncio.create_task(self._hub.run())
        try:
            return await self._behave(behaviour)
        finally:
            monitors.cancel()
            await self._hub.close()
            await asyncio.gather(monitors, return_exceptions=True)

    async def _behave(self, behaviour: str) -> dict[str, Json]:
        errors = {
            "error": RelaxError("the weather is bad; wait for sunshine"),
            "user_error": UserError("model folder 'nowhere' does not exist; make it"),
            "invariant": InvariantError("AC1", "two and two are five"),
            "bug": ZeroDivisionError("a bug"),
            "full": ExceptionGroup("two", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]),
            "ledger": sqlite3.OperationalError("database or disk is full"),
        }
        if behaviour in errors:
            if behaviour in ("error", "full", "ledger"):
                self._tell(HALF)
                self._checkpoint(HALF)
            raise errors[behaviour]
        if behaviour == "finish":
            return self._tell(STEPS)
        if behaviour == "stuck":
            await asyncio.Event().wait()
        if behaviour == "busy":
            time.sleep(60)  # noqa: ASYNC251
        await self._stop.wait()
        if behaviour == "early":
            return {}
        self._checkpoint(HALF)
        return self._tell(HALF)

    async def stop(self) -> bool:
        self._stop.set()
        return True

    def _tell(self, steps: int) -> dict[str, Json]:
        for step in range(steps):
            self._hub.step(step, step_metrics(step))
        Path(self._directory.ledger).unlink(missing_ok=True)
        ledger = Ledger(self._directory.ledger)
        try:
            write_story(ledger, steps)
            return write_summary(self._config, self._directory, ledger, {}, stopped=steps < STEPS)
        finally:
            ledger.close()

    def _checkpoint(self, step: int) -> None:
        stages = [(stage.name, stage.steps) for stage in self._config.stages]
        controller = {"register": {"outstanding": []}}
        state = RunState(step, len(stages) - 1, stages, 0, 0, controller, {}, {})
        CheckpointStore(self._directory.checkpoints).write(step, lambda folder: None, state.to_json())
