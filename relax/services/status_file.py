"""`status.json` of a run: what `relax status` reads while it is under way.

Written after each step; where roles are processes of their own, between steps too.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import NoReturn

from relax.core.error import RelaxError
from relax.core.message import Json
from relax.services.controller import Controller
from relax.services.directory import RunDirectory
from relax.services.site import Site

EVERY_S = 2.0
"""Seconds between two writings beside those after steps."""


class StatusFile:
    """`end` gives the last step of the stage under way."""

    def __init__(self, directory: RunDirectory, controller: Controller, site: Site, end: Callable[[], int]) -> None:
        self._directory, self._controller, self._site, self._end = directory, controller, site, end

    async def keep(self) -> NoReturn:
        """Endless. Roles in other processes change between two steps too; waits for nothing but time."""
        while True:
            await asyncio.sleep(EVERY_S)
            if self._controller.status():
                self.write(self._controller.gate.step)

    def write(self, step: int) -> None:
        """Raises RelaxError when the disk does not take it."""
        status: Mapping[str, Json] = {
            **self._controller.status(),
            **self._site.gauge.status(),
            "step": step,
            "end": self._end(),
            "account": self._controller.account.counts(),
        }
        try:
            self._directory.write_json(self._directory.status, status)
        except OSError as error:
            raise RelaxError(
                f"cannot write {self._directory.status}: {error.strerror}; free some space and --resume"
            ) from error
