"""One whole run: its stages in order, publication, evaluation, checkpoints, resume, and a clean end on every path.

Called by `relax train`, or by the process of the controller on a runtime with several. What ends the run leaves a ledger, and a
checkpoint to resume from (RR1).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from relax.bus.journal import Journal
from relax.bus.log import MemoryLog
from relax.config.load import dump_config
from relax.config.tree import RunConfig
from relax.core.column import COLUMNS
from relax.core.error import UserError
from relax.core.message import Json
from relax.core.version import Version
from relax.data.quarantine import Quarantine
from relax.runtime.collector import calm_collector
from relax.runtime.task import TaskSet
from relax.services.account import Account
from relax.services.assembly import Assembly
from relax.services.beginning import Beginning
from relax.services.best import open_checkpoints
from relax.services.controller import Controller, NoProgressError, StopRequested
from relax.services.directory import RunDirectory
from relax.services.evaluation_book import EvaluationBook
from relax.services.gate import Gate
from relax.services.ledger import CONFIG, Ledger
from relax.services.local_site import LocalSite
from relax.services.projection import Projection
from relax.services.publisher import StepHooks
from relax.services.recovery import RecoveredStage, StagePlace, recover
from relax.services.register import Register
from relax.services.resume import RunState, check_stages, complete_states, newest_state
from relax.services.sample_file import SampleFiles
from relax.services.site import Control, Hooks, Hub, Site
from relax.services.snapshot import KEPT, Snapshots, StageCursor
from relax.services.stage import run_stage
from relax.services.stage_progress import StageProgress
from relax.services.stall import watch
from relax.services.status_file import StatusFile
from relax.services.summary import write_summary
from relax.services.timeline import Timeline
from relax.training.checkpoint import CheckpointStore

_report = logging.getLogger(__name__)

EVENTS_KEPT = 200
"""Events that stay in memory for the report of a stall; everything else has listened to them."""


class Run:
    """`resume` goes on from the newest complete checkpoint of the directory; without one the run starts again from the data.

    `site` says where the roles are; `assembly` makes what the run itself needs: data, stages, and the names in the tree.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        hub: Hub,
        resume: bool = False,
        make_site: Callable[[Assembly, RunDirectory], Site] | None = None,
    ) -> None:
        self._config, self._directory, self._hub = config, directory, hub
        self._timeline = Timeline(directory.timeline, config.run.timeline.every, config.run.timeline.steps)
        self._assembly = Assembly(config, Quarantine(directory.quarantine), timeline=self._timeline)
        self._site: Site = (make_site or LocalSite)(self._assembly, directory)
        self._samples = SampleFiles(directory.samples, config.run.samples.every, config.run.samples.keep)
        self._checkpoints = open_checkpoints(config, directory)
        self._snapshot_store = CheckpointStore(directory.snapshots, KEPT)
        self._journal: Journal | None = None
        self._state: RunState | None = None
        self._recovered: RecoveredStage | None = None
        self._resume = resume
        self._incarnation = 0
        self._beginning = Beginning()
        self._is_built = self.is_over = self.has_begun = False
        self._progress = StageProgress()
        self._checkpoint: asyncio.Future[int] | None = None
        self._is_between = True
        """Whether the trainer waits, between two steps, until the version that goes out is out."""

    async def execute(self) -> dict[str, Json]:
        """Run to the end, or to a requested stop; returns the summary, empty when it had not begun."""
        async with AsyncExitStack() as stack:
            self._ledger = Ledger(self._directory.ledger)
            stack.callback(self._ledger.close)
            stack.push_async_callback(self._hub.close)
            stack.push_async_callback(self._timeline.close)
            stack.push_async_callback(self._samples.close)
            stack.push_async_callback(self._assembly.close)
            stack.callback(self._close_journal)
            # First to go: who calls from outside finds everything open, or nobody.
            stack.push_async_callback(self._site.close)
            try:
                await self._beginning.run(self._build())
                self._is_built = True
                if self._beginning.is_asked:
                    await self._controller.request_stop()
                stack.enter_context(calm_collector())
                stack.push_async_callback(self._projection.flush)  # what ended before a failure is what explains it
                ended = await self._run()
            except StopRequested:  # before it was built
                ended = True
            except UserError as error:
                self._hub.notice("failure", f"{self._config.run.name}: {error}")
                raise
            self.is_over = True
            self._hub.notice("end", f"{self._config.run.name} {'was stopped' if ended else 'is finished'}")
            await self._hub.settle()  # what follows holds the loop for a while
            if ended and not self.has_begun:
                return {}  # there is nothing new to sum up, and half of a recovery would not balance
            return write_summary(self._config, self._directory, self._ledger, self._progress.seconds, stopped=ended)

    async def _run(self) -> bool:
        """Run the stages; true when a stop was requested. Either way, and when steps train nothing, a checkpoint is left."""
        failure, is_stopped = None, False
        async with TaskSet("run") as tasks:
            if self._site.evaluation is not None:
                tasks.start("evaluation", self._site.evaluation.run(), endless=True)
            tasks.start("monitors", self._hub.run(), endless=True)
            stall_s = self._config.run.stall_s
            tasks.start("stall watch", watch(self._progress_mark, self._stall_report, stall_s), endless=True)
            if self._site.is_remote:
                tasks.start("status", self._status.keep(), endless=True)
            try:
                await self._stages()
                await self._settle_evaluation()
            except StopRequested:
                is_stopped = True
                if self.has_begun:
                    await self._snapshots.checkpoint()
            except NoProgressError as error:
                failure = error
                await self._snapshots.checkpoint()
        if failure is not None:
            raise failure
        return is_stopped

    async def stop(self, has_begun: bool = False) -> bool:
        """Ask it to end at the next safe point, with a checkpoint; at once when it has not begun, nor had before (`has_begun`). True."""
        self._beginning.stop(has_begun)
        if self._is_built:
            await self._controller.request_stop()
        return True

    # --- what may be asked while it goes on ---

    @property
    def controller(self) -> Controller:
        return self._controller

    async def checkpoint(self) -> int:
        """A checkpoint at the next step boundary; returns its step."""
        if self._checkpoint is None:
            self._checkpoint = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._checkpoint)  # no deadline: who asks has one

    async def evaluate(self) -> int:
        """Evaluate the newest version on every set; returns its step. Raises UserError when the run has none."""
        if self._site.evaluation is None:
            raise UserError("the run has no evaluation sets; add some under eval.sets")
        version = self._site.trainer.version
        self._evaluations.ask(version.number)
        await self._site.evaluation.request(version, version.number)
        await self._site.evaluation.idle()
        return version.number

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _progress_mark(self) -> tuple[float, ...]:
        """Changes whenever anything happens: an event, or work of a role. A paused run is meant to do nothing."""
        if self._controller.is_paused:
            return (time.monotonic(),)
        return (self._log.last_number, *self._site.gauge.progress())

    def _stall_report(self) -> str:
        events = [f"{event.kind} {dict(event.data)}"[:200] for event in self._log.events()[-10:]]
        return f"controller: {dict(self._controller.status())}; last events: {'; '.join(events)}"

    # --- building ---

    async def _build(self) -> None:
        config, assembly = self._config, self._assembly
        # On a thread: it may take minutes, and whoever asks meanwhile whether this process lives must hear it.
        await asyncio.to_thread(self._open_data)
        for note in assembly.vocabulary.notes:
            _report.info("tokenizer: %s", note)
        if config.bus.journal:
            self._journal = Journal(self._directory.journal, COLUMNS, shared=self._site.is_remote)
        self._log = MemoryLog(assembly.clock, EVENTS_KEPT, None if self._journal is None else self._journal.write)
        gate = Gate(self._log, config.stages[0].groups_per_step, config.max_staleness_of(config.stages[0]))
        self._projection = Projection(
            self._ledger,
            assembly.compute("ledger"),
            lambda: self._log.last_number,
            self._hub.step,
            self._hub.samples,
            self._samples,
        )
        self._projection.note(CONFIG, dump_config(config))
        self._evaluations = EvaluationBook(self._projection)
        register = Register(Account(), self._projection)
        self._controller = Controller(gate, register, settles_at_once=self._journal is None)
        self._snapshots = self._make_snapshots()
        self._status = StatusFile(self._directory, self._controller, self._site, lambda: self._progress.end)
        steps = StepHooks(self._before_step, self._snapshots.complete, self._evaluated, self._after_step)
        hooks = Hooks(steps, lambda: self._log.last_number, self._evaluations.report)
        await self._site.open(hooks)
        if self._resume:
            await self._restore()
        elif self._journal is not None:
            self._journal.begin(1)

    def _open_data(self) -> None:
        """A data set or tokenizer that is not there is found before anything is trained."""
        for stream in self._assembly.supply.streams.values():
            stream.state()
        self._assembly.vocabulary  # noqa: B018 - read by this, kept by the assembly

    def _make_snapshots(self) -> Snapshots:
        config, assembly = self._config, self._assembly
        return Snapshots(
            self._controller,
            self._log,
            self._ledger,
            self._journal,
            self._snapshot_store,
            self._checkpoints,
            [(stage.name, stage.steps) for stage in config.stages],
            lambda: {name: stream.state() for name, stream in assembly.supply.streams.items()},
            lambda: self._site.trainer.version.incarnation,
            lambda: self._site.trainer.trainable(),
        )

    async def _restore(self) -> None:
        """Bring back the newest snapshot or checkpoint, and what the journal says of the time after it."""
        self._snapshot_store.clean()
        self._checkpoints.clean()
        found = newest_state(self._snapshot_store, self._checkpoints)
        if found is None:
            self._ledger.cut_after(-1, -1)  # version 0 is evaluated again, under the same ids
            self._samples.start_at(0)
            if self._journal is not None:
                self._journal.discard()
                self._journal.begin(1)
            return
        self._folder, state = found
        check_stages(state, [(stage.name, stage.steps) for stage in self._config.stages])
        accepted = await asyncio.to_thread(self._restore_data, state)  # refuses before anything is changed
        self._ledger.cut_after(state.event, state.step)
        found_groups = sum(self._ledger.counts().values())
        if found_groups != state.num_final:
            raise UserError(
                f"{self._directory.ledger} holds {found_groups} ended groups of the {state.num_final} that it had at step "
                f"{state.step}: it is gone, or an older copy; bring it back, or start a new run from the checkpoint's model"
            )
        self._state, self._incarnation = state, state.incarnation + 1
        self._samples.start_at(state.step)
        stage = self._config.stages[state.stage]
        if accepted or stage.steps < dict(state.stages)[stage.name]:
            # The journal's tail speaks of other prompts, or of steps that the stage does not have any more.
            state = replace(state, bus=None)
        self._snapshots.adopt(complete_states(self._snapshot_store))
        now = self._assembly.clock.time()
        self._recovered = recover(state, self._journal, self._log, self._controller, self._place, self._site.keeps, now)
        if self._site.evaluation is not None:
            self._site.evaluation.next_number = self._ledger.next_evaluation()
            self._evaluations.restore(self._ledger, [item.name for item in self._config.eval.sets])

    def _restore_data(self, state: RunState) -> list[str]:
        """The cursors of all data; returns what changed since, where the configuration accepts changes (B5)."""
        streams = self._assembly.supply.streams
        for name, stream in streams.items():
            if name in state.streams:
                stream.restore(state.streams[name])
        source = self._assembly.supply.source(self._config.stages[state.stage])
        source.restore(state.source)
        accepted = [*source.accepted, *(text for stream in streams.values() for text in stream.accepted)]
        for text in accepted:
            _report.warning("the data changed since the run was interrupted: %s", text)
        return accepted

    def _place(self, index: int) -> StagePlace:
        return self._assembly.place(index, self._state)

    # --- stages ---

    async def _stages(self) -> None:
        first = 0
        start = self._state.step if self._state else 0
        for index, node in enumerate(self._config.stages):
            end = first + node.steps
            if start < end:
                await self._stage(index, first, max(first, start), end)
            elif index == len(self._config.stages) - 1:
                await self._complete(index, first, end)
            first = end

    async def _complete(self, index: int, first: int, end: int) -> None:
        """Every step was trained before the run was interrupted: what follows the last one is done now."""
        self._progress.first, self._progress.end = first, end
        self._snapshots.cursor = StageCursor(index, self._place(index).source)
        await self._begin_stage(index, end)
        await self._settle_evaluation()
        await self._snapshots.checkpoint()

    async def _stage(self, index: int, first: int, start: int, end: int) -> None:
        """Run steps `start .. end - 1` of a stage that began, in this process or an earlier one, at step `first`."""
        node, setup = self._config.stages[index], self._assembly.stage(index, start, end)
        recovered = self._recovered if self._recovered is not None and self._recovered.name == node.name else None
        source = self._place(index).source if recovered is None else recovered.source
        self._recovered = None
        self._progress.first, self._progress.end = first, end
        self._snapshots.cursor = StageCursor(index, source)
        await self._begin_stage(index, start)
        self._projection.note(f"stage/{node.name}", {"first": first, "end": end, "samples": setup.plan.samples})
        began = time.monotonic()
        bus = None if recovered is None else recovered.index
        try:
            control = Control(self._controller, self._log, self._journal, continues=bus is not None)
            await run_stage(await self._site.crew(control, setup, fresh=start == first), setup, source, bus)
        finally:
            seconds = self._progress.seconds
            seconds[node.name] = seconds.get(node.name, 0.0) + time.monotonic() - began

    async def _begin_stage(self, index: int, start: int) -> None:
        """Optimizer and weights, and the first version of this process; then a step may begin."""
        await self._beginning.run(self._prepare_stage(index, start))
        self.has_begun = self._beginning.is_over = True

    async def _prepare_stage(self, index: int, start: int) -> None:
        state, trainer = self._state, self._site.trainer
        if state is not None:
            await trainer.load(state.stage, self._folder)
        if state is None or state.stage != index:
            await trainer.begin(index, initial=state is None and index == 0)
        self._state = None
        earlier = () if self._site.evaluation is None else await self._site.evaluation.available()
        await trainer.first(start, self._incarnation)
        for version in earlier:
            if version.number < start:
                await self._evaluate(version)
        await self._evaluate(trainer.version)
        self._evaluations.give_up(start)

    # --- after each step ---

    async def _evaluated(self, version: Version) -> None:
        self._projection.measure(version.number - 1, await self._site.gauge.measure())
        await self._evaluate(version)
        if self._is_between:
            await self._settle_evaluation()

    async def _after_step(self, version: Version) -> None:
        step = version.number
        asked: asyncio.Future[int] | None = None
        if self._is_between:
            asked, self._checkpoint = self._checkpoint, None
            await self._snapshots.checkpoint()
        if asked is not None and not asked.done():
            asked.set_result(step)
        await self._projection.flush()
        await self._timeline.stepped(step - 1)
        self._status.write(step)

    async def _evaluate(self, version: Version) -> None:
        """Request an evaluation when one is due and not done: at both ends of a stage and every `eval.every` steps."""
        step, progress, every = version.number, self._progress, self._config.eval.every
        is_due = step in (progress.first, progress.end) or (every > 0 and (step - progress.first) % every == 0)
        if self._site.evaluation is not None and is_due and not self._evaluations.knows(step):
            self._evaluations.ask(step)
            await self._site.evaluation.request(version, step)

    async def _settle_evaluation(self) -> None:
        if self._site.evaluation is not None:
            await self._site.evaluation.idle()

    async def _before_step(self, step: int) -> bool:
        """The snapshot's cut. A checkpoint is of the moment between two steps too: the next one waits where one is due."""
        config, is_last = self._config, step == self._progress.end
        await self._samples.flush(step - 1)
        every = config.training.snapshot_every
        if is_last or (every and step % every == 0):
            await self._snapshots.begin()
        self._is_between = is_last or self._checkpoint is not None or step % config.training.checkpoint.every == 0
        return not self._is_between
