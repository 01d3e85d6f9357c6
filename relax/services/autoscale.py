"""How many rollout engines a run should have: a policy without I/O, in which time is an argument.

Asked by `control.autoscaling` every `every_s`; what it wants is carried out as a `scale` operation like a person's. Off unless
`rollout.autoscale` is set. Invariant: the number changes at most once in `cool_down_s`, and what it changes to does not call
for the opposite change under the same load.
"""

import math
from dataclasses import dataclass
from typing import Literal

from relax.config.autoscale import AutoscaleSection

MAX_GROWTH = 2.0
"""Engines are at most doubled, or halved, at once: a measure of an overloaded fleet says little about a much larger one."""


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """One look. `replicas` are wanted now, `ready` of them take requests; None is a value that was not measured yet.

    `queue_s`: mean seconds that requests waited for an engine since the last look; `load`: mean share of the engines' places in
    use; `trainer_idle`: share of the time in which the trainer waited for samples.
    """

    now_s: float
    replicas: int
    ready: int
    queue_s: float | None
    load: float | None
    trainer_idle: float | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many engines there should be, and why, in a sentence for the log and for `relax status`."""

    replicas: int
    reason: str


class Autoscaler:
    def __init__(self, config: AutoscaleSection) -> None:
        self._config = config
        self._replicas: int | None = None
        self._changed_s: float | None = None
        self._need: Literal["more", "fewer"] | None = None
        self._since_s = 0.0

    def decide(self, look: FleetLoad) -> Wanted:
        """What is wanted after this look; equal to `look.replicas` when nothing should change."""
        if self._replicas is not None and look.replicas != self._replicas:
            self._changed_s, self._need = look.now_s, None  # by us or by a person: what was measured before says little
        self._replicas = look.replicas
        need, why = self._judge(look)
        if need != self._need:
            self._need, self._since_s = need, look.now_s
        if need is None:
            return Wanted(look.replicas, why)
        held_s = look.now_s - self._since_s
        if held_s < self._config.hold_s:
            return Wanted(look.replicas, f"{why}, for {held_s:.0f} of {self._config.hold_s:g} s")
        if self._changed_s is not None and look.now_s - self._changed_s < self._config.cool_down_s:
            left_s = self._config.cool_down_s - (look.now_s - self._changed_s)
            return Wanted(look.replicas, f"{why}; the number changed lately, {left_s:.0f} s of cool-down are left")
        return self._answer(look, need, why)

    def _judge(self, look: FleetLoad) -> tuple[Literal["more", "fewer"] | None, str]:
        """What this look alone calls for."""
        config = self._config
        if look.replicas > config.max:
            return "fewer", f"{look.replicas} engines are more than autoscale.max ({config.max})"
        if look.replicas < config.min:
            return "more", f"{look.replicas} engines are fewer than autoscale.min ({config.min})"
        if look.ready < look.replicas:
            return (
                None,
                f"{look.ready} of {look.replicas} engines take requests; what they can do together is not known yet",
            )
        if look.queue_s is None or look.load is None or look.trainer_idle is None:
            return None, "there is no measure yet"
        is_full = look.load >= config.high_load or look.queue_s > config.max_queue_s
        is_hungry = look.trainer_idle >= config.trainer_idle
        said = f"load {100 * look.load:.0f} %, requests wait {look.queue_s:.1f} s, trainer idle {100 * look.trainer_idle:.0f} %"
        if is_full and is_hungry:
            return "more", f"the trainer waits for full engines ({said})"
        if look.load <= config.low_load and look.queue_s <= config.max_queue_s:
            if is_hungry:
                return None, f"engines and trainer both idle ({said}): something between them is slow, engines are not"
            return "fewer", f"engines idle ({said})"
        return None, f"as it should be ({said})"

    def _answer(self, look: FleetLoad, need: Literal["more", "fewer"], why: str) -> Wanted:
        wanted = self._grown(look) if need == "more" else self._shrunk(look)
        wanted = min(max(wanted, self._config.min), self._config.max)
        if wanted == look.replicas:
            bound = "max" if need == "more" else "min"
            at_bound = wanted == getattr(self._config, bound)
            return Wanted(
                wanted,
                f"{why}, but autoscale.{bound} is {wanted}" if at_bound else f"{why}, but one fewer would be too few",
            )
        return Wanted(wanted, f"{why}: {look.replicas} -> {wanted} engines")

    def _grown(self, look: FleetLoad) -> int:
        """So many more that the trainer would not have waited, if sampling is all it waited for; at most twice as many."""
        busy = 1 - min(look.trainer_idle or 0.0, 1 - 1 / MAX_GROWTH)
        return max(look.replicas + 1, math.ceil(look.replicas / busy))

    def _shrunk(self, look: FleetLoad) -> int:
        """So few that the same work loads them half-way between idle and full; at least half as many."""
        middle = (self._config.low_load + self._config.high_load) / 2
        needed = math.ceil(look.replicas * (look.load or 0.0) / middle)
        return max(needed, math.ceil(look.replicas / MAX_GROWTH))
