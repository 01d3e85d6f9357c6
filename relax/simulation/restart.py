"""What failures cost: one role restarted alone beside the whole job restarted, in simulation.

    python -m relax.simulation.restart [--steps N] [--failures SHARE] [--seed N]

An asynchronous pipeline on virtual time: engines, judge, advantages and trainer around the real `Gate`, restarted by the real
`Supervisor`. Stage times are assumed and scaled to one second of simulation per second of a run; `assumptions` are printed with the
table. It says how the two ways compare, not what a certain cluster would measure.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from statistics import fmean
from typing import TextIO

from relax.bus.log import MemoryLog
from relax.core.id import GroupId, group_id
from relax.core.protocol import Candidate
from relax.runtime.host import Exit
from relax.runtime.supervisor import GiveUp, Instruction, LivenessPolicy, RestartPolicy, Start, Supervisor
from relax.services.gate import Gate
from relax.simulation.timeline import Timeline, Timer
from relax.simulation.violation import PROGRESS, Violation

RESTARTS_S = (5.0, 30.0, 120.0, 300.0)
CHECKPOINT_EVERY = (1, 10)
"""Steps between checkpoints of the whole job: as often as the roles' snapshots here, and as people do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One simulated run. `failures` is the share of steps in which some role fails; `checkpoint_every` None: roles restart alone."""

    steps: int = 300
    failures: float = 0.1
    restart_s: float = 30.0
    checkpoint_every: int | None = None
    seed: int = 0
    groups_per_step: int = 8
    group_size: int = 8
    max_staleness: int = 2
    engines: int = 4
    slots: int = 8
    mean_s: float = 35.0
    sigma: float = 0.8
    train_s: float = 90.0
    detect_s: float = 0.1
    step_s: float = 90.0
    """A step without failures; their share is of such steps."""

    @property
    def hosts(self) -> dict[str, tuple[str, ...]]:
        names = ["controller", "trainer", "rollout", "reward", "advantage", *self.engine_names]
        return {name: (name.rpartition("-")[0] or name,) for name in names}

    @property
    def engine_names(self) -> list[str]:
        return [f"engine-{number}" for number in range(self.engines)]


@dataclass(slots=True)
class Work:
    """One group: siblings that are still to be sampled, and whether it is judged and can be trained."""

    left: set[int]
    judged: int = 0
    number: int = 0


@dataclass(slots=True)
class Outcome:
    """`lost_s` are seconds of sampling and training that were done again."""

    elapsed_s: float = 0.0
    failures: int = 0
    lost_s: float = 0.0


Request = tuple[GroupId, int]


@dataclass(slots=True)
class Job:
    """The pipeline. Work waits where the role that it needs is down, and goes on when the role is back."""

    plan: Plan
    timeline: Timeline = field(default_factory=Timeline)
    outcome: Outcome = field(default_factory=Outcome)
    alive: set[str] = field(default_factory=set)
    groups: dict[GroupId, Work] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    running: dict[str, dict[Request, tuple[Timer, float]]] = field(default_factory=dict)
    unwritten: list[Request] = field(default_factory=list)
    unjudged: list[Request] = field(default_factory=list)
    ready: dict[GroupId, int] = field(default_factory=dict)
    training: tuple[Timer, float] | None = None
    is_trained: bool = False
    checkpoint: int = 0
    admitted: int = 0
    random: Random = field(default_factory=Random)
    gate: Gate = field(init=False)
    supervisor: Supervisor = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.random = Random(f"failures {plan.seed}")
        self.gate = self._new_gate(0)
        # Nobody is silent here: who does not answer is gone. A start may take as long as the restart under study.
        liveness = LivenessPolicy(start_s=math.inf, silent_s=math.inf, progress_s=math.inf)
        self.supervisor = Supervisor(RestartPolicy(), liveness)
        self.running = {name: {} for name in plan.engine_names}
        for name in plan.hosts:
            self.alive.add(name)
        for instruction in self.supervisor.want(0.0, plan.hosts):
            assert isinstance(instruction, Start)
            self.supervisor.ready(0.0, instruction.host, instruction.incarnation)

    def _new_gate(self, step: int) -> Gate:
        log = MemoryLog(self.timeline, 1)
        return Gate(log, self.plan.groups_per_step, self.plan.max_staleness, step)

    def run(self) -> Outcome:
        """Until the last step is published."""
        self._plan_failure()
        self.pump()
        while self.gate.step < self.plan.steps:
            if not self.timeline.step():
                raise Violation(PROGRESS, f"nothing is left to happen at step {self.gate.step} of {self.plan.steps}")
        self.outcome.elapsed_s = self.timeline.now
        return self.outcome

    # --- the pipeline ------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Let everything go on that can. Rows and control need the controller; running requests and a running step do not."""
        if "controller" in self.alive:
            self._admit()
            self._write()
            self._judge()
            self._finish_step()
            self._take()
        self._send()

    def _admit(self) -> None:
        while "rollout" in self.alive and self.gate.may_admit(self.gate.step):
            group = group_id(self.admitted)
            self.admitted += 1
            self.gate.admit(group, self.gate.step)
            self.groups[group] = Work(set(range(self.plan.group_size)), number=self.admitted)
            self.waiting += [(group, sibling) for sibling in range(self.plan.group_size)]

    def _send(self) -> None:
        """The next requests to free slots; a group that ended meanwhile needs no sample."""
        if "rollout" not in self.alive:
            return
        for engine in [name for name in self.plan.engine_names if name in self.alive]:
            while self.waiting and len(self.running[engine]) < self.plan.slots:
                request = self.waiting.pop(0)
                timer = self.timeline.after(self._duration(request), partial(self._sampled, engine, request))
                self.running[engine][request] = timer, self.timeline.now

    def _duration(self, request: Request) -> float:
        """Of the request itself: it takes as long the second time."""
        plan = self.plan
        return Random(f"{plan.seed} {request}").lognormvariate(math.log(plan.mean_s) - plan.sigma**2 / 2, plan.sigma)

    def _sampled(self, engine: str, request: Request) -> None:
        del self.running[engine][request]
        self.unwritten.append(request)
        self.pump()

    def _write(self) -> None:
        """The rollout role writes trajectories; it keeps what it has sampled while the controller is down."""
        if "rollout" in self.alive:
            self.unjudged += self.unwritten
            self.unwritten.clear()

    def _judge(self) -> None:
        """Rows are on the bus: whoever judges them may come and go."""
        if "reward" not in self.alive or "advantage" not in self.alive:
            return
        for group, sibling in self.unjudged:
            work = self.groups[group]
            work.left.discard(sibling)
            work.judged += 1
            if not work.left:
                self.ready[group] = work.number
        self.unjudged.clear()

    def _take(self) -> None:
        if "trainer" not in self.alive or self.training is not None or self.is_trained:
            return
        candidates = [Candidate(group, number) for group, number in self.ready.items()]
        for group in self.gate.choose(candidates, self.plan.groups_per_step - self.gate.taken):
            del self.ready[GroupId(group)]
        if self.gate.is_full:
            self.training = self.timeline.after(self.plan.train_s, self._trained), self.timeline.now

    def _trained(self) -> None:
        self.training, self.is_trained = None, True
        self.pump()

    def _finish_step(self) -> None:
        """The step is told to the controller; its snapshot makes it final."""
        if not self.is_trained or "trainer" not in self.alive:
            return
        self.is_trained = False
        for group in self.gate.advance():
            del self.groups[group]
        every = self.plan.checkpoint_every
        if every is not None and self.gate.step % every == 0:
            self.checkpoint = self.gate.step
        self._admit()

    # --- failures ----------------------------------------------------------------------------------------------------

    def _plan_failure(self) -> None:
        if self.plan.failures:
            self.timeline.after(self.random.expovariate(self.plan.failures / self.plan.step_s), self._fail)

    def _fail(self) -> None:
        """Some role that is up fails, each as often as any other."""
        up = sorted(self.alive)
        if up:
            self.outcome.failures += 1
            self._lose_host(self.random.choice(up))
        self._plan_failure()

    def _lose_host(self, host: str) -> None:
        if self.plan.checkpoint_every is not None:
            self._lose_job()
            return
        self.alive.discard(host)
        if host in self.running:
            self._interrupt(host)
        elif host == "rollout":
            for engine in self.running:
                self._interrupt(engine)
            # What it had sampled and not written is gone with it.
            self.waiting, self.unwritten = [*self.unwritten, *self.waiting], []
        elif host == "trainer":
            self._lose_step()
        self.timeline.after(self.plan.detect_s, lambda: self._exited(host))
        self.pump()

    def _exited(self, host: str) -> None:
        supervisor = self.supervisor
        entry = supervisor.hosts[host]
        self._perform(supervisor.exited(self.timeline.now, host, entry.incarnation, Exit("killed by the simulation")))
        due_s = entry.due_s  # of its back-off; a sum of two times may be a hair less than the third
        self.timeline.after(
            due_s - self.timeline.now, lambda: self._perform(supervisor.tick(max(due_s, self.timeline.now)))
        )

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Start):
                back = partial(self._back, instruction.host, instruction.incarnation)
                self.timeline.after(self.plan.restart_s, back)
            elif isinstance(instruction, GiveUp):
                raise Violation("RR6", instruction.message)

    def _back(self, host: str, incarnation: int) -> None:
        self.supervisor.ready(self.timeline.now, host, incarnation)
        self.alive.add(host)
        self.pump()

    def _interrupt(self, engine: str) -> None:
        """Its requests run again, from their prompts."""
        lost, self.running[engine] = self.running[engine], {}
        for timer, since in lost.values():
            timer.cancel()
            self.outcome.lost_s += self.timeline.now - since
        self.waiting = [*lost, *self.waiting]

    def _lose_step(self) -> None:
        """The trainer goes on from the last step's snapshot: the groups that it had taken are on offer again."""
        if self.training is not None:
            timer, since = self.training
            timer.cancel()
            self.outcome.lost_s += self.timeline.now - since
        self.training, self.is_trained = None, False
        taken = self.gate.taken_groups()
        self.gate.put_back(taken)
        self.ready |= {group: self.groups[group].number for group in taken}

    def _lose_job(self) -> None:
        """Every role restarts; the queue and the steps since the last checkpoint are gone."""
        if not self.alive:
            return
        for engine in self.running:
            self._interrupt(engine)
        self._lose_step()
        self.outcome.lost_s += (self.gate.step - self.checkpoint) * self.plan.train_s
        self.alive.clear()
        self.gate = self._new_gate(self.checkpoint)
        for held in (self.groups, self.ready, self.waiting, self.unwritten, self.unjudged):
            held.clear()
        self.timeline.after(self.plan.detect_s + self.plan.restart_s, self._job_back)

    def _job_back(self) -> None:
        self.alive = set(self.plan.hosts)
        self.pump()


def assumptions(plan: Plan) -> str:
    return "\n".join(
        (
            "Simulation, not a measurement. Assumed:",
            f"  {plan.engines} engines of {plan.slots} slots, requests of {plan.mean_s:g} s on average (lognormal, sigma {plan.sigma:g});",
            f"  {plan.groups_per_step} groups of {plan.group_size} per step, a step trains {plan.train_s:g} s;",
            f"  max_staleness is {plan.max_staleness};",
            f"  failures come at random, in {plan.failures:.0%} of steps on average, and hit each of {len(plan.hosts)} processes alike;",
            f"  a death is seen after {plan.detect_s:g} s; a role takes as long to restart as the whole job, whose roles start at once;",
            "  role alone: a snapshot per step, rows stay on the bus, an engine's requests run again from their prompts;",
            "  whole job: queue and steps since the last checkpoint are lost.",
        )
    )


def productive_shares(plan: Plan, restarts_s: Sequence[float]) -> dict[tuple[float, int | None], float]:
    """The time of the same run without failures over its time with them, by restart time and `checkpoint_every`."""
    ideal_s = Job(replace(plan, failures=0.0)).run().elapsed_s
    plan = replace(plan, step_s=ideal_s / plan.steps)
    return {
        (restart_s, every): ideal_s / Job(replace(plan, restart_s=restart_s, checkpoint_every=every)).run().elapsed_s
        for restart_s in restarts_s
        for every in (None, *CHECKPOINT_EVERY)
    }


def table(plan: Plan, seeds: Sequence[int]) -> list[list[str]]:
    """Rows of text: restart time, and the productive share of each way, mean over seeds."""
    found = [productive_shares(replace(plan, seed=seed), RESTARTS_S) for seed in seeds]
    return [
        [
            f"{restart_s:g} s",
            *(f"{fmean(shares[restart_s, n] for shares in found):.1%}" for n in (None, *CHECKPOINT_EVERY)),
        ]
        for restart_s in RESTARTS_S
    ]


HEADER = ("restart", "role alone", *(f"whole job, checkpoint every {n}" for n in CHECKPOINT_EVERY))


def main(arguments: Sequence[str], out: TextIO = sys.stdout) -> int:
    parser = argparse.ArgumentParser(prog="python -m relax.simulation.restart", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--failures", type=float, default=0.1, help="share of steps in which some role fails")
    parser.add_argument("--seeds", type=int, default=3, help="runs that each figure is the mean of")
    options = parser.parse_args(arguments)
    plan = Plan(steps=options.steps, failures=options.failures)
    print(assumptions(plan), file=out)
    print("share of productive time:", file=out)
    for row in (HEADER, *table(plan, range(options.seeds))):
        print("  ".join(f"{cell:>29}" for cell in row), file=out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
