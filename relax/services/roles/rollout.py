"""The rollout role: runs the episodes of admitted groups.

Consumes: group rows (`prompt`, `base`). Waits for: a group on the bus, then a free engine place for each sibling.
Unblocked by: admission, and any sibling that ends. Writes each trajectory as soon as it exists; one that fails is tried again
and then written as a failure with its reason (AC4). A group that was interrupted goes on with the siblings that are missing.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relax.bus.row import Receipt, RowPut
from relax.core.completion import Sampling
from relax.core.error import DataError, EngineError, LateError, TaskError
from relax.core.id import GroupId, Table, table_of, trajectory_id
from relax.core.media import MediaReader, Medium
from relax.core.message import Prompt, prompt_from_json
from relax.core.protocol import Generate, Renderer
from relax.runtime.task import TaskSet
from relax.services.access import BusAccess, ControllerAccess
from relax.services.joined import Joined
from relax.services.media_row import GROUP as MEDIA
from relax.services.media_row import group_media, group_media_put, read_prompt_media, refusal_reason
from relax.services.places import Places
from relax.services.play import EpisodeLimits, Player
from relax.services.row import failed_row, trajectory_rows
from relax.services.task import Task

CONSUMER = "rollout"
MAX_PREPARING = 32
"""Groups whose media are read at one time, ahead of those that run."""
MAX_TAKEN = 64
"""Groups that are taken at one time: those of a step come together, and an engine does most for requests that come together."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """`concurrency` bounds the trajectories in flight."""

    group_size: int
    sampling: Sampling
    limits: EpisodeLimits
    concurrency: int


@dataclass(slots=True)
class GroupRun:
    """One leased group while its siblings run; the last sibling to end acks the lease."""

    group: GroupId
    prompt: Prompt
    lease: str
    remaining: int
    base: Joined[int]
    """Asks the controller before a request is sent, once for siblings that begin together."""
    media: tuple[Medium, ...] | None = None
    """What the group's own cell holds; None until it is written, and in a run that reads no media."""
    finished: list[RowPut] = field(default_factory=list)
    """Rows that the next put writes."""


class Rollout:
    def __init__(
        self,
        bus: BusAccess,
        controller: ControllerAccess,
        generate: Generate,
        renderer: Renderer,
        tasks: Mapping[str, Task],
        settings: RolloutSettings,
        media: MediaReader | None = None,
        places: Places | None = None,
    ) -> None:
        """`places` bounds the trajectories in flight where their number changes with the engines; None: `settings.concurrency`."""
        self._bus, self._controller = bus, controller
        self._tasks, self._settings, self._media = tasks, settings, media
        self._player = Player(renderer, generate, settings.sampling, settings.limits, media)
        self._preparing = asyncio.Semaphore(MAX_PREPARING)
        self._places = places or Places(settings.concurrency)

    async def run(self) -> None:
        """Endless. Groups are taken as far as all their siblings have a place now; when none has, one, which then waits for places."""
        async with TaskSet("rollout") as siblings:
            while True:
                for number, receipt in enumerate(await self._bus.take_each(CONSUMER, CONSUMER, self._room())):
                    if number and self._room() == 0:
                        # An engine left meanwhile: the lease would run out in a wait for places.
                        await self._bus.release(receipt.lease)
                    else:
                        await self._dispatch(receipt, siblings)

    def _room(self) -> int:
        """Groups that could run now. Where prompts have media they wait to be read first, so they are not taken ahead."""
        return 0 if self._media is not None else min(MAX_TAKEN, self._places.free // self._settings.group_size)

    async def _dispatch(self, receipt: Receipt, siblings: TaskSet) -> None:
        group = GroupId(receipt.ids[0])
        try:
            # What an interrupted run left in the group's cell stays there, also if its media would be read otherwise now.
            fetched = await self._bus.fetch(receipt, None if self._media is None else ("prompt", MEDIA))
            written = await self._bus.written(receipt.lease) if receipt.is_begun else {}
            missing = self._missing(group, written)
            if not missing:
                return await self._bus.ack(receipt.lease)
        except LateError:
            return None  # the group ended, or its lease ran out, between the take and now
        prompt, held = prompt_from_json(fetched.get(group, "prompt")), group_media(fetched, group)
        run = GroupRun(group, prompt, receipt.lease, len(missing), Joined(lambda: self._controller.start(group)), held)
        if self._media is None:
            return await self._start(run, missing, siblings)
        await self._preparing.acquire()  # no deadline: looking at a prompt's media has one
        siblings.start(f"{group} media", self._prepare(self._media, run, missing, siblings))
        return None

    async def _prepare(self, media: MediaReader, run: GroupRun, missing: Sequence[int], siblings: TaskSet) -> None:
        """Read the prompt's media, once for all siblings, and put them on the bus; a bad one ends the group (MM2, MM3)."""
        try:
            async with asyncio.timeout(self._tasks[run.prompt.task].timeout_s):
                run.prompt, read = await read_prompt_media(media, run.prompt)
            if run.media is None:
                run.media = read
                await self._bus.put([group_media_put(run.group, read)], run.lease)
        except TimeoutError:
            return await self._controller.end(run.group, "failed", "media: not read within the task's timeout_s")
        except DataError as error:
            return await self._controller.end(run.group, "failed", refusal_reason(error))
        except LateError:
            return None  # the group ended meanwhile
        finally:
            self._preparing.release()
        return await self._start(run, missing, siblings)

    async def _start(self, run: GroupRun, missing: Sequence[int], siblings: TaskSet) -> None:
        for sibling in missing:
            await self._places.acquire()  # no deadline: places come back when a trajectory ends, which has one
            siblings.start(trajectory_id(run.group, sibling), self._run_sibling(run, sibling))

    def _missing(self, group: GroupId, written: Mapping[str, Sequence[str]]) -> list[int]:
        """The siblings that no earlier holder of the group has written: a row of a trajectory is written whole."""
        siblings = range(self._settings.group_size)
        return [sibling for sibling in siblings if "turns" not in written.get(trajectory_id(group, sibling), ())]

    async def _run_sibling(self, run: GroupRun, sibling: int) -> None:
        try:
            rows = await self._attempt(run, sibling)
        finally:
            self._places.release()
        run.finished += rows
        if len(run.finished) == len(rows):
            await self._write(run)

    async def _write(self, run: GroupRun) -> None:
        """Put what the group's siblings have finished. An engine ends many of them at one moment: those go together."""
        await asyncio.sleep(0)
        rows, run.finished = run.finished, []
        siblings = sum(table_of(row.id) is Table.trajectory for row in rows)
        is_last = siblings == run.remaining
        try:
            await self._bus.put(rows, run.lease, is_last)  # which also renews the lease
            # Counted only once the rows are on the bus: the ack must not overtake another put under the lease.
            run.remaining -= siblings
            if run.remaining == 0 and not is_last:
                await self._bus.ack(run.lease)
        except LateError:
            return  # the lease is gone; the bus has counted what came late (TQ4)

    async def _attempt(self, run: GroupRun, sibling: int) -> list[RowPut]:
        """Up to `max_attempts` tries, with the same request seeds each time (AC2); then a failure with the last reason."""
        id = trajectory_id(run.group, sibling)
        task = self._tasks[run.prompt.task]
        reason = ""
        for _ in range(task.max_attempts):
            try:
                async with asyncio.timeout(task.timeout_s):
                    base = await run.base.ask()
                    played = await self._player.play(run.prompt, task, run.group, sibling, base)
                    return trajectory_rows(id, played, shared=run.media)
            except TimeoutError:
                reason = "timeout"
            except (TaskError, EngineError) as error:
                reason = f"{type(error).__name__}: {error}"
        return failed_row(id, reason, shared=run.media)
