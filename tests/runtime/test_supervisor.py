"""The supervisor's decisions one by one, and ten thousand seeded schedules against an oracle that counts for itself."""

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from relax.runtime.host import Exit, Placed
from relax.runtime.liveness import Beat, RoleBeat, RoleState
from relax.runtime.supervisor import (
    MAX_KILLS,
    GiveUp,
    Instruction,
    Kill,
    LivenessPolicy,
    Phase,
    Probe,
    Report,
    RestartPolicy,
    Start,
    Stop,
    Supervisor,
)

RESTART = RestartPolicy(budget=3, window_s=100.0, backoff_s=0.5, max_backoff_s=4.0)
LIVENESS = LivenessPolicy(start_s=50.0, silent_s=10.0, probe_s=2.0, progress_s=40.0, stop_s=5.0, kill_s=3.0)
ENGINE = {"engine-0": ("engine",)}


def beat(progress: int = 0, state: RoleState = RoleState.busy, reason: str = "") -> Beat:
    return Beat({"engine": RoleBeat(state, reason, "", progress)})


def serving(now: float = 0.0) -> Supervisor:
    """One engine, ready at `now`."""
    state = Supervisor(RESTART, LIVENESS)
    assert state.want(now, ENGINE) == [Start("engine-0", 1)]
    state.launched("engine-0", 1, "logs/engine-0.1.log")
    state.started("engine-0", 1, Placed(7))
    assert state.ready(now, "engine-0", 1) == []
    return state


def kinds(told: list[Instruction]) -> list[str]:
    return [one.kind if isinstance(one, Report) else type(one).__name__ for one in told]


def test_a_failure_is_reported_and_restarted_after_a_wait_that_doubles() -> None:
    state, now, waits = serving(), 0.0, []
    for number in range(1, 4):
        told = state.exited(now, "engine-0", number, Exit("boom"))
        assert kinds(told) == ["restart"]
        assert f"boom); restart {number} of 3" in told[0].text  # type: ignore[union-attr]
        waits.append(state.due_s - now)
        assert state.tick(state.due_s - 0.01) == []
        now = state.due_s
        assert state.tick(now) == [Start("engine-0", number + 1)]
    assert waits == [0.5, 1.0, 2.0]


def test_rule_rr6_a_host_that_crashes_on_each_start_is_given_up_with_one_message() -> None:
    state, now, given_up = Supervisor(RESTART, LIVENESS), 0.0, []
    told = state.want(now, ENGINE)
    while told and not given_up:
        assert isinstance(told[-1], Start)
        state.launched("engine-0", told[-1].incarnation, f"logs/engine-0.{told[-1].incarnation}.log")
        given_up = [
            one
            for one in state.exited(now, "engine-0", told[-1].incarnation, Exit("no wheels"))
            if isinstance(one, GiveUp)
        ]
        now = state.due_s
        told = state.tick(now) if now < math.inf else []
    assert state.hosts["engine-0"].incarnation == RESTART.budget + 1
    assert state.hosts["engine-0"].phase is Phase.given_up
    for part in ("role engine ", "host engine-0", "failed 4 times", "no wheels", "log: logs/engine-0.4.log", "resume"):
        assert part in given_up[0].message


def test_rule_rr6_time_spent_down_does_not_make_failures_old() -> None:
    state, now = serving(), 0.0
    for number in range(1, 4):
        state.exited(now, "engine-0", number, Exit("boom"))
        now += 10 * RESTART.window_s  # a very slow start
        assert state.tick(now) == [Start("engine-0", number + 1)]
    assert kinds(state.exited(now, "engine-0", 4, Exit("boom"))) == ["GiveUp"]


def test_failures_grow_old_while_the_host_serves() -> None:
    state, now = serving(), 0.0
    for number in range(1, 20):
        now += 60.0
        assert kinds(state.exited(now, "engine-0", number, Exit("boom"))) == ["restart"]
        now = state.due_s
        assert state.tick(now) == [Start("engine-0", number + 1)]
        assert kinds(state.ready(now, "engine-0", number + 1)) == ["recovered"]


def test_what_cannot_be_helped_by_a_restart_is_given_up_at_once() -> None:
    state = serving()
    told = state.exited(1.0, "engine-0", 1, Exit("UserError: model.path names nothing", final=True))
    assert kinds(told) == ["GiveUp"]
    assert state.due_s == math.inf


def test_recovery_is_reported_with_the_pause() -> None:
    state = serving()
    state.exited(10.0, "engine-0", 1, Exit("boom"))
    state.tick(10.5)
    told = state.ready(13.25, "engine-0", 2)
    assert [one.text for one in told] == ["engine-0 is ready again, 3.2 s after it failed"]  # type: ignore[union-attr]


def test_rule_rr5_a_silent_host_is_probed_then_reported_as_it_looks_killed_and_restarted() -> None:
    state = serving()
    state.beat(5.0, "engine-0", 1, beat(1))
    assert state.tick(14.9) == []
    assert state.tick(15.0) == [Probe("engine-0", 1, 2.0)]
    told = state.unanswered(17.0, "engine-0", 1, "process 7 is stopped (T)")
    assert kinds(told) == ["hung", "Kill"]
    assert "gave no sign of life for 10 s and answers no probe" in told[0].text  # type: ignore[union-attr]
    assert "stopped (T)" in told[0].text  # type: ignore[union-attr]
    told = state.exited(17.1, "engine-0", 1, Exit("killed by signal 9"))
    assert kinds(told) == ["restart"]
    assert "stopped (T)" in state.hosts["engine-0"].last_error
    assert state.tick(state.due_s) == [Start("engine-0", 2)]


def test_a_beat_during_a_probe_is_an_answer() -> None:
    state = serving()
    state.tick(10.0)
    state.beat(11.0, "engine-0", 1, beat(1))
    assert state.unanswered(12.0, "engine-0", 1, "") == []
    assert state.hosts["engine-0"].phase is Phase.ready


def test_a_probe_without_any_result_ends_in_a_kill_too() -> None:
    state = serving()
    state.tick(10.0)
    assert kinds(state.tick(14.0)) == ["hung", "Kill"]


def test_rule_rr5_a_busy_host_without_progress_is_reported_once_and_left_alone() -> None:
    state = serving()
    told = [
        one for second in range(1, 100) for one in state.beat(float(second), "engine-0", 1, beat(0, reason="decoding"))
    ]
    assert told == [Probe("engine-0", 1, 2.0)]
    told = state.answered(100.0, "engine-0", 1, "in sleep()")
    assert kinds(told) == ["stall"]
    assert "made no progress for 40 s: it is busy decoding; in sleep()" in told[0].text  # type: ignore[union-attr]
    assert state.beat(101.0, "engine-0", 1, beat(0)) == []
    state.beat(102.0, "engine-0", 1, beat(1))
    assert state.beat(141.0, "engine-0", 1, beat(1)) == []
    assert state.beat(142.0, "engine-0", 1, beat(1)) == [Probe("engine-0", 1, 2.0)]


def test_rule_rr5_a_stall_is_told_in_one_sentence_that_says_where_the_stacks_are() -> None:
    seen = "process 7 is running (R); its stacks:\nThread 0x7f (most recent call first):\n  File x.py, line 3 in step"
    state = Supervisor(RESTART, LIVENESS)
    state.want(0.0, {"light": ("reward", "advantage")})
    state.launched("light", 1, "runs/tiny/logs/light.1.log")
    state.ready(0.0, "light", 1)
    state.beat(40.0, "light", 1, Beat({"reward": RoleBeat(RoleState.busy, "with stage rl"), "advantage": RoleBeat()}))
    assert state.answered(41.0, "light", 1, seen) == [
        Report(
            "light",
            "stall",
            "light (reward, advantage) answers but has made no progress for 40 s: it is reward busy with stage rl; advantage"
            " starting; process 7 is running (R); its stacks are in runs/tiny/logs/light.1.log",
            seen,
        )
    ]
    told = state.tick(51.0) + state.unanswered(53.0, "light", 1, seen)
    assert kinds(told) == ["Probe", "hung", "Kill"]
    assert "Thread" not in told[1].text  # type: ignore[union-attr]
    assert told[1].detail == seen  # type: ignore[union-attr]


def test_a_host_that_waits_for_a_written_reason_may_wait_for_ever() -> None:
    state = serving()
    for second in range(1, 1000):
        assert state.beat(float(second), "engine-0", 1, beat(0, RoleState.waiting, "weights")) == []


@pytest.mark.parametrize("answers", [True, False])
def test_a_start_that_takes_too_long_is_killed_with_what_was_seen(answers: bool) -> None:
    state = Supervisor(RESTART, LIVENESS)
    state.want(0.0, ENGINE)
    assert state.tick(50.0) == [Probe("engine-0", 1, 2.0)]
    event = state.answered if answers else state.unanswered
    told = event(51.0, "engine-0", 1, "not placed: it asks for 4 GPUs")
    assert kinds(told) == ["hung", "Kill"]
    assert "was not ready after 50 s" in told[0].text  # type: ignore[union-attr]
    assert "4 GPUs" in told[0].text  # type: ignore[union-attr]


def test_a_process_that_cannot_be_killed_is_given_up_and_its_name_not_used_again() -> None:
    state = serving()
    state.tick(10.0)
    told = state.unanswered(12.0, "engine-0", 1, "process 7 is waiting for a device or a disk (D)")
    for _ in range(MAX_KILLS - 1):
        assert kinds(told)[-1] == "Kill"
        told = state.tick(state.due_s)
    assert kinds(told) == ["Kill"]
    assert kinds(state.tick(state.due_s)) == ["GiveUp"]
    state.want(100.0, {})
    assert state.want(101.0, ENGINE) == []


def test_scale_in_stops_a_host_and_scale_out_brings_a_new_one() -> None:
    state = serving()
    assert state.want(1.0, {**ENGINE, "engine-1": ("engine",)}) == [Start("engine-1", 1)]
    state.ready(1.5, "engine-1", 1)
    assert state.want(2.0, ENGINE) == [Stop("engine-1", 1)]
    assert state.exited(3.0, "engine-1", 1, Exit("asked to stop")) == []
    assert list(state.hosts) == ["engine-0"]
    assert state.want(4.0, {**ENGINE, "engine-1": ("engine",)}) == [Start("engine-1", 2)]


@pytest.mark.parametrize("probes", [False, True])
def test_a_host_that_still_starts_is_ended_at_once_and_nobody_hears_of_a_fault(probes: bool) -> None:
    """It imports and would not hear a stop: after `stop_s` it would be told of as one that hangs."""
    state = serving()
    state.want(1.0, {**ENGINE, "engine-1": ("engine",)})
    state.beat(50.0, "engine-0", 1, beat(1))
    if probes:
        assert state.tick(51.0) == [Probe("engine-1", 1, 2.0)]
    told = state.want(51.0, ENGINE)
    assert kinds(told) == ["Kill"]
    assert state.unanswered(51.1, "engine-1", 1, "process 9 is running (R)") == []
    assert state.ready(51.2, "engine-1", 1) == [], "it does not count any more"
    assert state.exited(51.3, "engine-1", 1, Exit("killed by signal 9")) == []
    assert list(state.hosts) == ["engine-0"]


def test_a_host_that_still_starts_and_is_to_be_started_anew_has_not_failed() -> None:
    state = Supervisor(RESTART, LIVENESS)
    state.want(0.0, ENGINE)
    assert kinds(state.dismiss(1.0, "engine-0", "a restart was asked for")) == ["restart", "Kill"]
    assert state.exited(1.1, "engine-0", 1, Exit("killed by signal 9")) == []
    assert kinds(state.tick(1.1)) == ["Start"]
    assert state.hosts["engine-0"].num_failures == 0


def test_a_host_wanted_again_while_it_stops_starts_after_its_end_and_that_is_no_failure() -> None:
    state = serving()
    state.want(1.0, {})
    assert state.want(2.0, ENGINE) == []
    assert state.tick(3.0) == []
    assert state.exited(4.0, "engine-0", 1, Exit("asked to stop")) == []
    assert state.tick(4.0) == [Start("engine-0", 2)]
    assert state.hosts["engine-0"].num_failures == 0


def test_who_does_not_stop_is_killed() -> None:
    state = serving()
    assert state.stop(1.0) == [Stop("engine-0", 1)]
    assert kinds(state.tick(6.0)) == ["hung", "Kill"]
    assert state.exited(6.1, "engine-0", 1, Exit("killed")) == []
    assert state.hosts["engine-0"].phase is Phase.stopped
    assert state.want(7.0, ENGINE) == []


def test_a_host_whose_work_is_done_is_not_started_again() -> None:
    state = serving()
    assert state.exited(1.0, "engine-0", 1, Exit("done", finished=True)) == []
    assert state.hosts["engine-0"].phase is Phase.finished
    assert state.due_s == math.inf


def test_a_host_that_is_to_be_started_anew_has_not_failed() -> None:
    state = serving()
    assert kinds(state.dismiss(1.0, "engine-0", "a restart was asked for")) == ["restart", "Stop"]
    assert state.dismiss(1.0, "engine-0", "again") == []
    assert state.exited(1.1, "engine-0", 1, Exit("it was asked to stop")) == []
    assert kinds(state.tick(1.1)) == ["Start"]
    assert (state.hosts["engine-0"].incarnation, state.hosts["engine-0"].num_failures) == (2, 0)


def test_events_of_the_past_change_nothing() -> None:
    state = serving()
    state.exited(1.0, "engine-0", 1, Exit("boom"))
    state.tick(1.5)
    before = repr(state.hosts)
    for told in (
        state.exited(2.0, "engine-0", 1, Exit("boom")),
        state.ready(2.0, "engine-0", 1),
        state.beat(2.0, "engine-0", 1, beat(9)),
        state.answered(2.0, "engine-0", 1, ""),
        state.unanswered(2.0, "engine-0", 1, ""),
        state.exited(2.0, "unknown", 1, Exit("boom")),
    ):
        assert told == []
    assert repr(state.hosts) == before


# --- seeded schedules ---


@dataclass(slots=True)
class Process:
    """What really runs, as the oracle knows it."""

    ready_s: float | None = None
    hung: bool = False
    undead: bool = False
    stopped: bool = False
    probed: bool = False


@dataclass
class World:
    """Performs instructions on imaginary processes and checks each against what it knows."""

    rng: random.Random
    now: float = 0.0
    state: Supervisor = field(default_factory=lambda: Supervisor(RESTART, LIVENESS))
    living: dict[tuple[str, int], Process] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)
    last: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    served: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    failures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    owed: dict[str, float] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    starts: int = 0

    def perform(self, told: list[Instruction]) -> None:
        for one in told:
            if isinstance(one, Start):
                assert one.host in self.wanted, "a host is started that is not wanted"
                assert not any(host == one.host for host, _ in self.living), "two incarnations at once"
                assert one.incarnation > self.last[one.host], "an incarnation number is used twice"
                assert self.now >= self.owed.pop(one.host, 0.0), "the back-off was not kept"
                assert one.host not in self.over, "a host is started that was given up"
                self.last[one.host] = one.incarnation
                self.living[one.host, one.incarnation] = Process(undead=self.rng.random() < 0.02)
                self.starts += 1
            elif isinstance(one, GiveUp):
                self.over.add(one.host)
                self.owed.pop(one.host, None)
            elif isinstance(one, Report):
                assert one.host in self.last
            else:
                process = self.living[
                    one.host, one.incarnation
                ]  # KeyError: an instruction for a process that is no more
                if isinstance(one, Kill):
                    process.stopped = not process.undead
                elif isinstance(one, Stop):
                    process.stopped = not process.hung
                else:
                    process.probed = True

    def want(self, hosts: set[str]) -> None:
        for host in self.wanted - hosts:
            self.owed.pop(host, None)
            if not any(name == host for name, _ in self.living):  # its history goes with it
                self.forget(host)
        self.wanted = hosts
        self.perform(self.state.want(self.now, {host: (host.partition("-")[0],) for host in sorted(hosts)}))

    def forget(self, host: str) -> None:
        self.failures.pop(host, None)
        self.served.pop(host, None)
        self.over.discard(host)

    def end(self, key: tuple[str, int], how: Exit) -> None:
        """The process is gone; the oracle says what must follow."""
        process, host, incarnation = self.living.pop(key), *key
        entry = self.state.hosts[host]
        asked, leaving = entry.why_killed, entry.leaving
        lost = entry.phase is Phase.given_up
        if process.ready_s is not None:
            self.served[host] += self.now - process.ready_s
        told = self.state.exited(self.now, host, incarnation, how)
        if lost or self.state.is_stopping:
            assert told == []
        elif host not in self.wanted:
            assert told == []
            self.forget(host)
        elif leaving:
            assert told == []
            self.owed[host] = self.now
        elif how.finished and not asked:
            assert self.state.hosts[host].phase is Phase.finished
        else:
            self.judge_failure(host, how, told)
        self.perform(told)

    def judge_failure(self, host: str, how: Exit, told: list[Instruction]) -> None:
        self.failures[host].append(self.served[host])
        recent = sum(when >= self.served[host] - RESTART.window_s for when in self.failures[host])
        if how.final or recent > RESTART.budget:
            assert kinds(told) == ["GiveUp"], "a failure over the budget"
        else:
            assert kinds(told) == ["restart"], "a failure within the budget"
            self.owed[host] = self.now + min(RESTART.max_backoff_s, RESTART.backoff_s * 2 ** (recent - 1))

    def step(self) -> None:
        rng = self.rng
        self.now += rng.choice((0.0, 0.1, 1.0, 7.0))
        if self.state.due_s <= self.now or (rng.random() < 0.3 and self.state.due_s < math.inf):
            self.now = max(self.now, self.state.due_s)
            self.perform(self.state.tick(self.now))
        if rng.random() < 0.1:
            self.want({f"engine-{index}" for index in range(rng.randint(0, 3))} | {"trainer"})
        for key in sorted(self.living):
            if rng.random() < 0.7:
                self.live(key)
        if rng.random() < 0.1 and self.last:  # an echo of a past life
            host = rng.choice(sorted(self.last))
            assert self.state.exited(self.now, host, self.last[host] - 1, Exit("late")) == []

    def live(self, key: tuple[str, int]) -> None:
        rng, process, now, state = self.rng, self.living[key], self.now, self.state
        if process.stopped:
            return self.end(key, Exit("it was asked to stop"))
        if process.probed:
            process.probed = False
            event = state.unanswered if process.hung or process.undead else state.answered
            return self.perform(event(now, *key, "seen"))
        if process.hung or process.undead:
            return None
        action = rng.random()
        if action < 0.15:
            return self.end(key, Exit("boom", finished=rng.random() < 0.1, final=rng.random() < 0.05))
        if action < 0.25:
            process.hung = True
        elif process.ready_s is None and action < 0.8:
            if state.hosts[key[0]].phase in (Phase.starting, Phase.probing):
                process.ready_s = now
            return self.perform(state.ready(now, *key))
        else:
            progress = rng.choice((0, 1, 2))
            return self.perform(state.beat(now, *key, Beat({"x": RoleBeat(RoleState.busy, "", "", progress)})))
        return None

    def drain(self) -> None:
        """Stop: whatever the processes do, none is left and none is started after bounded time."""
        self.perform(self.state.stop(self.now))
        starts, end_s = self.starts, self.now + LIVENESS.stop_s + LIVENESS.kill_s * (MAX_KILLS + 1)
        while self.state.living:
            self.now = min(self.state.due_s, self.now + 1.0)
            assert self.now <= end_s, "stopping takes for ever"
            self.perform(self.state.tick(self.now))
            for key in [key for key, process in self.living.items() if process.stopped]:
                self.end(key, Exit("it was asked to stop"))
        assert self.starts == starts
        assert all(process.undead for process in self.living.values())
        assert self.state.due_s == math.inf


def run_schedule(seed: int, steps: int = 25) -> World:
    world = World(random.Random(seed))
    world.want({"trainer", "engine-0"})
    for _ in range(steps):
        world.step()
    # Every failure has ended in a restart that is due, or in a give-up.
    for host, when in world.owed.items():
        assert world.state.hosts[host].phase is Phase.pending
        assert world.state.hosts[host].due_s == pytest.approx(when)
    world.drain()
    return world


def test_ten_thousand_schedules_hold_against_the_oracle() -> None:
    worlds = [run_schedule(seed) for seed in range(10_000)]
    assert sum(world.starts for world in worlds) > 50_000
    assert sum(bool(world.over) for world in worlds) > 500
