"""Trainer and engines on the same emulated devices in turns, or on their own: the real services on virtual time.

Used by `modes`. One assumed profile, calibrated to published totals, and its sweep: of a colocated step rollout takes 65 % (lognormal),
reward 3, reference 7, old logprobs 7, training 18; switching the devices adds 10 s to 200. Work is divided over devices: with a part of
them a stage takes longer by as much, an engine runs as many requests as it has devices times slots.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any, TypeVar

from benchmarks.bound import Ready, Recurrence, StageTimes, Window
from benchmarks.emulation import CostCompute, EmulatedRun, Profile, emulate
from relax.core.completion import Completion
from relax.runtime.device import DeviceTurns
from relax.runtime.turn_compute import Turn, TurnCompute
from relax.simulation.torn_disk import Disk

T = TypeVar("T")

DEVICES, SLOTS = 16, 2
"""Two waves of requests fill a step's rollout."""
ROLLOUT, REWARD, REFERENCE, OLD_LOGPROBS, TRAINING = 65.0, 3.0, 7.0, 7.0, 18.0
SWITCH = 5.0
"""Seconds of switching per colocated step of 100: the engines go, the trainer comes, and back."""
MOVES = 4
AIR = 0.75
"""Largest share of a step that the reference is to be busy."""
WARM = 4
"""Steps that fill the pipeline, left out at both ends."""


@dataclass(frozen=True)
class Assumed:
    """What the sweep varies; seconds of a colocated step of 100."""

    name: str
    sigma: float = 1.0
    training: float = TRAINING

    @property
    def scale(self) -> float:
        """Of every other stage, which share what training leaves."""
        return (100.0 - self.training) / (100.0 - TRAINING)


ASSUMED = Assumed("assumed profile")
SWEEP = (
    Assumed("sigma 0.5", sigma=0.5),
    Assumed("sigma 1.3", sigma=1.3),
    Assumed("training 40 %", training=40.0),
    Assumed("training 70 %", training=70.0),
)


@dataclass(frozen=True)
class Split:
    """Devices of rollout, of the reference, and of the trainer with its old logprobs."""

    rollout: int
    reference: int
    trainer: int


@dataclass(frozen=True)
class Emulated:
    """Seconds per step of one mode: measured on virtual time, and by the recurrence from the run's own draws."""

    assumed: Assumed
    mode: str
    split: Split | None
    measured: float
    bound: float

    @property
    def ratio(self) -> float:
        return self.measured / self.bound


# --- the profile -----------------------------------------------------------------------------------------------------------


def mean_seconds(assumed: Assumed, steps: int = 400) -> float:
    """The mean running time with which a step's requests, all sent at once to all devices, take the rollout's share."""
    profile, random = Profile(steps=steps), Random("calibration")
    sigma, size = assumed.sigma, profile.group_size
    count = profile.trajectories_per_step * steps
    durations = [random.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(count)]
    times = StageTimes(DEVICES * SLOTS, 0.0, 0.0, 0.0)
    window = Window(profile.groups_per_step, 0, steps, streaming=True)
    whole = Recurrence(lambda number: (durations[number * size : (number + 1) * size], False), times, window).run()[-1]
    return ROLLOUT * assumed.scale * steps / whole


def colocated_profile(assumed: Assumed, steps: int, mean_s: float) -> Profile:
    """Every stage has all devices, one after the other."""
    profile, scale = Profile(steps=steps), assumed.scale
    count = profile.trajectories_per_step
    return replace(
        profile,
        max_staleness=0,
        streaming=False,
        engines=1,
        slots=DEVICES * SLOTS,
        sigma=assumed.sigma,
        mean_s=mean_s,
        reward_s=REWARD * scale / count,
        reference_s=REFERENCE * scale / count,
        train_s=(assumed.training + OLD_LOGPROBS * scale) / count,
    )


def separate_profile(colocated: Profile, split: Split, max_staleness: int, streaming: bool) -> Profile:
    return replace(
        colocated,
        max_staleness=max_staleness,
        streaming=streaming,
        slots=split.rollout * SLOTS,
        reference_s=colocated.reference_s * DEVICES / split.reference,
        train_s=colocated.train_s * DEVICES / split.trainer,
    )


def best_split(profile: Profile) -> Split:
    """The split whose busiest stage has least to do in a step, by mean running times. The reference is to have some air: what it
    delays it delays for everybody, and the recurrence knows of no queue before it."""
    count = profile.trajectories_per_step

    def busiest(split: Split) -> float:
        own = separate_profile(profile, split, 1, streaming=True)
        return count * max(profile.mean_s / own.slots, own.reference_s / AIR, own.train_s)

    splits = [
        Split(rollout, reference, DEVICES - rollout - reference)
        for rollout in range(1, DEVICES - 1)
        for reference in range(1, DEVICES - rollout)
    ]
    return min(splits, key=busiest)


# --- the colocated run -----------------------------------------------------------------------------------------------------


class Model:
    """What is moved; it is nothing, and moving it takes its time all the same."""

    def onload(self) -> None: ...

    def offload(self) -> None: ...


class SwitchCompute(CostCompute):
    """The thread on which a model is moved."""

    def __init__(self) -> None:
        super().__init__({})

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        await asyncio.sleep(SWITCH / MOVES)
        return function(*args)


class DeviceCompute(CostCompute):
    """A thread of the training side: what costs device time waits for its turn, anything else does not."""

    def __init__(self, row_seconds: dict[str, float], turn: Turn) -> None:
        super().__init__(row_seconds)
        self._costly = row_seconds
        self._in_turn = TurnCompute(CostCompute(row_seconds), turn)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        if getattr(function, "__name__", "") in self._costly:
            return await self._in_turn.run(function, *args)
        return await super().run(function, *args)


class ColocatedRun(EmulatedRun):
    """Trainer and reference hold the devices together, the engines have them in between. Turns are the product's own."""

    def __init__(self, profile: Profile, disk: Disk) -> None:
        super().__init__(profile, disk)
        turn = self._join("engine")
        for engine in self.fleet.engines.values():
            engine.generate = _taking_turns(engine.generate, turn)  # type: ignore[method-assign]

    @cached_property
    def turns(self) -> DeviceTurns:
        # The engines keep their turn until everything is generated: no other work of the step could be finished before.
        return DeviceTurns(self.clock, min_turn_s=1e6)

    @cached_property
    def training_turn(self) -> Turn:
        return self._join("training")

    def _join(self, holder: str) -> Turn:
        turn = Turn(holder, self.turns)
        turn.add(SwitchCompute(), Model())
        self.turns.join(holder, "all", turn)
        return turn

    def _compute(self) -> Any:
        profile = self.profile
        costs = {"forward_backward": profile.train_s, "logprobs": profile.reference_s}
        return DeviceCompute(costs, self.training_turn)


def _taking_turns(generate: Callable[..., Awaitable[Completion]], turn: Turn) -> Callable[..., Awaitable[Completion]]:
    async def generate_in_turn(*args: Any) -> Completion:
        async with turn:
            return await generate(*args)

    return generate_in_turn


# --- bounds ----------------------------------------------------------------------------------------------------------------


class SwitchedRecurrence(Recurrence):
    """Nothing overlaps: a step is its rollout, then the reference and the trainer on all devices, then the switch."""

    def _close(self, chosen: Sequence[Ready]) -> None:
        super()._close(chosen)
        end = self.published[-1] + SWITCH
        self.published[-1] = end
        self._places = [end] * len(self._places)


def bound_of(run: EmulatedRun, is_colocated: bool) -> list[float]:
    """When each step would be published at best, from the running times that the run has drawn."""
    profile = run.profile
    window = Window(profile.groups_per_step, profile.max_staleness, profile.steps - WARM, profile.streaming)

    def requests(number: int) -> tuple[list[float], bool]:
        return [run.durations.get((number, sibling), profile.mean_s) for sibling in range(profile.group_size)], False

    slots = profile.engines * profile.slots
    if is_colocated:
        times = StageTimes(slots, profile.reward_s, 0.0, profile.train_s + profile.reference_s)
        return SwitchedRecurrence(requests, times, window).run()
    times = StageTimes(slots, profile.reward_s, profile.reference_s, profile.train_s)
    return Recurrence(requests, times, window).run()


def step_seconds(published: Sequence[float]) -> float:
    """Mean over the steps of a steady pipeline."""
    return (published[-1] - published[WARM - 1]) / (len(published) - WARM)


MODES = ("colocated", "separate, whole steps", "separate, streaming", "asynchronous")


def emulate_modes(assumed: Assumed, steps: int) -> Iterator[Emulated]:
    """One result for each of `MODES`, all on 16 devices with the same work."""
    shared = colocated_profile(assumed, steps + 2 * WARM, mean_seconds(assumed))
    split = best_split(shared)
    profiles = {
        "colocated": shared,
        "separate, whole steps": separate_profile(shared, split, 0, streaming=False),
        "separate, streaming": separate_profile(shared, split, 0, streaming=True),
        "asynchronous": separate_profile(shared, split, 1, streaming=True),
    }
    for mode, profile in profiles.items():
        is_colocated = mode == "colocated"
        make = ColocatedRun if is_colocated else EmulatedRun

        def compare(run: EmulatedRun, is_colocated: bool = is_colocated) -> tuple[float, float]:
            return step_seconds(run.published[:-WARM]), step_seconds(bound_of(run, is_colocated))

        measured, bound = emulate(profile, compare, make)
        yield Emulated(assumed, mode, None if is_colocated else split, measured, bound)
