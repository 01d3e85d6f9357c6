"""The work of a host: its roles, stage after stage, until it is ended.

Entry of every host but the controller's. Roles of a stage are the very objects that the local runtime runs; here they get
remote faces of bus and controller. Other roles stand for the whole life of their process.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from relax.bus.row import QueueClosedError
from relax.config.table import load_object
from relax.core.error import TransportError
from relax.runtime.collector import calm_collector
from relax.runtime.liveness import Pulse
from relax.runtime.task import TaskSet
from relax.services.remote.desk import StageNotice
from relax.services.remote.host import BEAT_S, HOLDERS, Host, RoleSpec, begin_log, open_host
from relax.services.remote.judge import ask_elsewhere
from relax.services.remote.occupation import Occupation
from relax.services.stage import RoleParts, StageSetup, start_role

END_S = 2.0
"""How long a role whose queue was closed waits to hear that the stage is over, before it joins the stage anew."""

_log = logging.getLogger(__name__)

Role = Callable[[Host, TaskSet], Awaitable[None]]
"""Starts a role in a host's task set."""


async def run_host(value: Mapping[str, Any], pulse: Pulse) -> None:
    """Work as the roles of `value`, a `RoleSpec`. Ends only by cancellation or an error."""
    spec = RoleSpec.from_json(value)
    begin_log(spec)
    async with AsyncExitStack() as stack:
        host = await open_host(spec, pulse, stack)
        async with TaskSet(f"host {spec.host}") as tasks:
            tasks.start("device turns", host.turns.run(), endless=True)
            stage_roles = [role for role in spec.roles if role not in STANDING]
            if "judge" not in spec.roles:
                ask_elsewhere(host)
            for role in spec.roles:
                start = STANDING.get(role) or PREPARING.get(role)
                if start is not None:
                    await load_object(start)(host, tasks)
            stack.enter_context(calm_collector())
            # What is called from outside is served by now: the first word to the controller gives this host's address away.
            tasks.start("beat", host.beat(BEAT_S), endless=True)
            if stage_roles:
                tasks.start("stages", work(host, stage_roles), endless=True)
            pulse.ready()
            _log.info("ready at %s", host.address)
            await asyncio.Event().wait()  # no deadline: the launcher ends this process


STANDING: Mapping[str, str] = {
    "trainer": "relax.services.remote.trainer:start_trainer",
    "critic": "relax.services.remote.critic:start_critic",
    "engine": "relax.services.remote.engine:start_engine",
    "evaluation": "relax.services.remote.evaluation:start_evaluation",
    "judge": "relax.services.remote.judge:start_judge",
}
"""Roles that stand for the whole life of their process, and what starts each."""
PREPARING: Mapping[str, str] = {
    "rollout": "relax.services.remote.engine:prepare_rollout",
    "reward": "relax.services.remote.work:prepare_reward",
}
"""Roles of stages that need something for the life of their process."""


async def prepare_reward(host: Host, tasks: TaskSet) -> None:
    await host.assembly.check_pool()


async def work(host: Host, roles: list[str]) -> None:
    """Endless. Consumes: stage notices. Waits for: the next stage, then its end. Unblocked by: the controller."""
    desk = host.client.proxy("desk")
    done = -1
    while True:
        host.waits("a stage", *roles)
        notice = await desk.next_stage(done)
        setup = host.assembly.stage(notice.index, notice.first, notice.end)
        mine = [role for role in setup.plan.roles if role in roles]
        idle = [role for role in roles if role not in mine]
        if mine:
            _log.info("stage %s from step %d on: %s", setup.bounds.name, setup.bounds.first, ", ".join(mine))
            host.busy(f"with stage {setup.bounds.name}", *mine)
        if idle:
            host.waits(f"stage {setup.bounds.name} to end", *idle)
        is_over = await _stage(host, desk, notice, setup, mine)
        _log.info("stage %s %s", setup.bounds.name, "is over" if is_over else "is joined anew")
        done = notice.index if is_over else -1


async def _stage(host: Host, desk: Any, notice: StageNotice, setup: StageSetup, roles: list[str]) -> bool:
    """Work until the stage is over; false when it was begun anew, or the connection was lost for so long that it may be."""
    parts = await _parts(host, notice, setup, roles)
    left = False

    async def leave() -> None:
        nonlocal left
        await host.left.wait_for(lambda: host.is_left)  # no deadline: the end of the stage ends this wait
        left = True

    try:
        async with TaskSet(f"stage {setup.bounds.name}") as tasks:
            for role in roles:
                start_role(role, tasks, setup, parts)
            follow_leases(host, roles, f"with stage {setup.bounds.name}")
            ends = [asyncio.ensure_future(desk.stage_over(notice.index)), asyncio.ensure_future(leave())]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    if end.done():
                        end.result()
            finally:
                for end in ends:
                    end.cancel()
    except (QueueClosedError, TransportError):
        # The queue was closed, or a call was lost: the stage is over or about to be said so, or else it goes on without us.
        try:
            async with asyncio.timeout(END_S):
                await desk.stage_over(notice.index)
        except TimeoutError:
            left = True
    finally:
        await host.leave()
    return not left


AWAITED: Mapping[str, str] = {
    "rollout": "new groups",
    "demonstration": "new groups",
    "reward": "trajectories",
    "verdict": "trajectories",
    "advantage": "judged groups",
    "reference": "judged groups",
    "teacher": "judged groups",
}
"""What each role of a stage takes from the bus."""


def follow_leases(host: Host, roles: Sequence[str], work: str) -> None:
    """From now on each of these roles, which have joined a stage, is busy while it has a lease."""
    queue = host.queue
    assert queue is not None
    occupations = [(Occupation(host.pulse.of(role), work, AWAITED[role]), HOLDERS[role]) for role in roles]

    def tell() -> None:
        for occupation, holders in occupations:
            occupation.has(sum(map(queue.held_by, holders(host.spec.host))))

    queue.on_held = tell
    tell()


async def _parts(host: Host, notice: StageNotice, setup: StageSetup, roles: list[str]) -> RoleParts:
    """What the roles of this host are made of."""
    assembly = host.assembly
    bus, controller = host.join(notice.index)
    for holder in host.holders:
        # What an earlier stay left held goes back.
        await host.client.call(f"bus-{notice.index}", "reattach", holder, ())
    reference = None
    if "reference" in roles:
        from relax.services.reference import bind_reference

        compute = assembly.compute("reference")
        model = await compute.run(assembly.copy_model)
        reference = await bind_reference(assembly, model, host.directory.reference(setup.bounds.name)), compute
    teacher = None
    if "teacher" in roles:
        from relax.services.teacher import open_teacher

        teacher = await open_teacher(assembly, setup.bounds.name)
    return RoleParts(
        bus,
        controller,
        # What takes long is done on threads: whoever asks meanwhile whether this process lives must hear it.
        await asyncio.to_thread(lambda: assembly.renderer),
        assembly.tasks,
        host.generate,
        reference,
        assembly.supply.media,
        holder=host.spec.host,
        places=host.places,
        teacher=teacher,
    )
