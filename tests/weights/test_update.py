"""`EngineUpdate` under every order of events: the invariants of WS2, WS4, WS5, WS7 and case C8."""

import copy
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relax.core.version import Version
from relax.weights.update import (
    Abort,
    EngineUpdate,
    Fetch,
    Instruction,
    Load,
    MarkFailed,
    MarkLive,
    Operation,
    Pause,
    Phase,
    Prove,
    Resume,
)


@dataclass
class World:
    """An engine and a router that do what they are told, and what they must never see."""

    update: EngineUpdate
    holds: Version | None = None
    paused: bool = False
    proved: set[Version] = field(default_factory=set)
    routed: Version | None = None
    given_up: bool = False
    operation: Operation | None = None
    published: int = -1

    def follow(self, instructions: list[Instruction]) -> None:
        operations = [instruction for instruction in instructions if isinstance(instruction, Operation)]
        assert len(operations) <= 1, "two operations at once"
        assert not operations or operations[0] is instructions[-1], "an operation must come last"
        for instruction in instructions:
            match instruction:
                case MarkLive(version=version):
                    assert not self.paused, "live while paused"
                    assert self.holds == version, "live with other weights"
                    assert version in self.proved, "live before it was proved"
                    self.routed, self.given_up = version, False
                case MarkFailed(final=final):
                    self.routed, self.given_up = None, final
                case Abort():
                    self.paused = True
                case Load():
                    assert self.paused, "load while decoding"
        if operations:
            self.operation = operations[0]

    def answer(self, outcome: str) -> None:
        """Finish the outstanding operation: `done`, `error` (nothing happened) or `torn` (done halfway, state unknown)."""
        operation, self.operation = self.operation, None
        assert operation is not None
        if outcome == "done":
            self._apply(operation)
            self.follow(self.update.done(operation.number))
            return
        if outcome == "torn" and isinstance(operation, Load):
            self.holds = None
            self.proved.clear()
        elif outcome == "torn" and isinstance(operation, Pause):
            self.paused = True
        self.follow(self.update.failed(operation.number, "injected", self.holds))

    def _apply(self, operation: Operation) -> None:
        match operation:
            case Pause():
                self.paused = True
            case Load(version=version):
                self.holds = version
                self.proved.discard(version)
            case Prove(version=version):
                assert self.holds == version
                self.proved.add(version)
            case Resume():
                assert self.holds in self.proved, "decoding resumed on weights that were not proved"
                self.paused = False

    def publish(self) -> None:
        self.published += 1
        self.follow(self.update.published(Version(0, self.published)))

    def restart(self) -> None:
        self.holds, self.paused, self.routed, self.operation = None, False, None, None
        self.proved.clear()
        self.follow(self.update.restarted())

    def interrupt(self) -> None:
        self.operation = None
        self.follow(self.update.interrupted(self.holds))

    def check(self) -> None:
        assert (self.operation is not None) == self.update.outstanding
        if self.update.live is not None and self.routed is not None:
            assert self.routed == self.update.live
        if self.update.outstanding:
            return
        if self.update.phase is Phase.failed:
            assert self.given_up, "at rest, failed, and nobody was told"
            assert self.routed is None
        elif self.published >= 0:
            assert self.update.live == Version(0, self.published), "at rest below the newest version"
            assert self.holds == self.update.live == self.routed
            assert not self.paused, "paused for ever"

    def key(self) -> tuple[object, ...]:
        update = self.update
        operation = type(self.operation).__name__
        state = (update.phase, update.live, update.target, update.version, update.failures, operation, self.holds)
        return (*state, self.paused, frozenset(self.proved), self.routed, self.given_up, self.published)


ANSWERS = ("done", "error", "torn")
OUTSIDE = ("publish", "restart", "interrupt")


def step(world: World, event: str) -> None:
    if event in ANSWERS:
        world.answer(event)
    else:
        getattr(world, event)()
    world.check()


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_rule_ws5_every_order_of_events_up_to_three_versions(budget: int) -> None:
    """All reachable states: never paused for ever, never two loads, never live unproved, never silent."""
    start = World(EngineUpdate("recompute", budget))
    seen, todo, phases = {start.key()}, deque([start]), set()
    while todo:
        world = todo.popleft()
        phases.add(world.update.phase)
        events = [event for event in OUTSIDE if event != "publish" or world.published < 2]
        events += ANSWERS if world.operation is not None else ()
        for event in events:
            following = copy.deepcopy(world)
            step(following, event)
            if following.key() not in seen:
                seen.add(following.key())
                todo.append(following)
    assert phases == set(Phase)
    assert len(seen) > 100


def test_case_c8_from_every_state_the_next_published_version_works() -> None:
    """After any prefix of events, a publish and nothing but success ends with that version live."""
    start = World(EngineUpdate("keep", 1))
    seen, todo = {start.key()}, deque([start])
    while todo:
        world = todo.popleft()
        healthy = copy.deepcopy(world)
        healthy.publish()
        for _ in range(20):
            if healthy.operation is not None:
                healthy.answer("done")
        healthy.check()
        assert healthy.routed == Version(0, healthy.published)
        events = [event for event in OUTSIDE if event != "publish" or world.published < 1]
        for event in [*events, *(ANSWERS if world.operation is not None else ())]:
            following = copy.deepcopy(world)
            step(following, event)
            if following.key() not in seen:
                seen.add(following.key())
                todo.append(following)


class UpdateMachine(RuleBasedStateMachine):
    """The same world with many versions, and answers that come late, from operations that were abandoned."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(EngineUpdate("recompute", 2))
        self.old: list[int] = []

    @rule()
    def publish(self) -> None:
        self.world.publish()

    @rule(event=st.sampled_from(("restart", "interrupt")))
    def disturb(self, event: str) -> None:
        self._remember()
        getattr(self.world, event)()

    @precondition(lambda self: self.world.operation is not None)
    @rule(outcome=st.sampled_from(ANSWERS))
    def answer(self, outcome: str) -> None:
        self._remember()
        self.world.answer(outcome)

    @precondition(lambda self: bool(self.old))
    @rule(data=st.data(), good=st.booleans())
    def late_answer(self, data: st.DataObject, good: bool) -> None:
        number, update = data.draw(st.sampled_from(self.old)), self.world.update
        before = self.world.key()
        assert (update.done(number) if good else update.failed(number, "late", update.live)) == []
        assert self.world.key() == before

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def _remember(self) -> None:
        if self.world.operation is not None:
            self.old.append(self.world.operation.number)


UpdateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_update_machine = UpdateMachine.TestCase


def run_to_rest(world: World, limit: int = 40) -> list[str]:
    names = []
    while world.operation is not None and len(names) < limit:
        names.append(type(world.operation).__name__)
        step(world, "done")
    return names


def test_a_load_is_fetch_pause_load_prove_resume() -> None:
    world = World(EngineUpdate())
    world.publish()
    assert run_to_rest(world) == ["Fetch", "Pause", "Load", "Prove", "Resume"]
    assert world.routed == Version(0, 0)


def test_rule_ws1_an_engine_skips_versions_published_while_it_loads() -> None:
    world = World(EngineUpdate())
    world.publish()
    step(world, "done")
    for _ in range(3):
        world.publish()
    run_to_rest(world)
    assert world.routed == Version(0, 3)
    assert world.proved == {Version(0, 0), Version(0, 3)}


def test_old_and_known_versions_are_ignored_and_a_new_incarnation_is_newer() -> None:
    update = EngineUpdate()
    assert update.published(Version(0, 9)) == [Fetch(1, Version(0, 9))]
    assert update.published(Version(0, 9)) == update.published(Version(0, 8)) == []
    assert update.published(Version(1, 4)) == []
    assert update.target == Version(1, 4)


def test_rule_ws6_the_mode_reaches_the_engine_once_it_serves() -> None:
    world = World(EngineUpdate("drain"))
    world.publish()
    step(world, "done")
    assert world.operation == Pause(2, "abort")  # nothing is served yet, so nothing is worth draining
    run_to_rest(world)
    world.publish()
    step(world, "done")
    assert isinstance(world.operation, Pause)
    assert world.operation.mode == "drain"


def test_rule_ws4_a_failed_proof_fails_the_engine_and_reloads_it_until_the_budget_is_used_up() -> None:
    world = World(EngineUpdate(budget=1))
    world.publish()
    run_to_rest(world)
    world.publish()
    for _ in range(3):
        step(world, "done")
    assert isinstance(world.operation, Prove)
    step(world, "error")
    assert world.routed is None
    assert not world.given_up
    assert isinstance(world.operation, Fetch)
    for _ in range(3):
        step(world, "done")
    step(world, "error")
    assert world.given_up
    assert world.update.phase is Phase.failed
    assert world.update.reason == "proving v1: injected"


def test_rule_ws5_a_failed_load_serves_the_old_version_again() -> None:
    world = World(EngineUpdate(budget=0))
    world.publish()
    run_to_rest(world)
    world.publish()
    for _ in range(2):
        step(world, "done")
    assert isinstance(world.operation, Load)
    step(world, "error")
    assert isinstance(world.operation, Resume)
    assert world.routed == Version(0, 0)


def test_rule_ws7_a_restarted_engine_is_not_live_before_it_has_loaded() -> None:
    world = World(EngineUpdate())
    world.publish()
    run_to_rest(world)
    world.restart()
    assert (world.routed, world.update.live) == (None, None)
    run_to_rest(world)
    assert world.routed == Version(0, 0)
