"""What a simulation reports: a broken rule, and everything needed to see it again.

Raised by the checks of both tiers; printed by `python -m relax.simulation`. A failure is plain data, so that it crosses
the processes of `--jobs`.
"""

import traceback
from collections.abc import Iterable
from dataclasses import dataclass

from relax.core.error import InvariantError
from relax.core.event import Event

EVENTS_SHOWN = 30


class Violation(Exception):
    """A rule of the contract does not hold in this schedule."""

    def __init__(self, rule: str, message: str) -> None:
        self.rule = rule
        super().__init__(f"[{rule}] {message}")


PROGRESS = "progress"
"""The rule that an unfinished run never stands still (RR7)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """`tier` is `schedule` or `services`; `setting` is what the seed drew; `events` are the last ones, as text."""

    tier: str
    seed: int
    rule: str
    message: str
    setting: str
    events: tuple[str, ...]

    def text(self) -> str:
        """For people, with the command that shows it again."""
        again = "--seeds 1 --services 0" if self.tier == "schedule" else "--seeds 0 --services 1"
        lines = [
            f"{self.tier} seed {self.seed} breaks {self.rule}: {self.message}",
            f"  drawn: {self.setting}",
            f"  again: python -m relax.simulation {again} --first {self.seed}",
            "  last events:",
            *(f"    {event}" for event in self.events),
        ]
        return "\n".join(lines)


def failure_of(tier: str, seed: int, setting: object, error: Exception, events: Iterable[Event]) -> Failure:
    """A violation, a rule that the code itself found broken, or a crash (rule `crash`, with its traceback)."""
    if isinstance(error, Violation | InvariantError):
        rule, message = error.rule, str(error)
    else:
        rule, message = "crash", "".join(traceback.format_exception(error))
    last = tuple(map(describe, list(events)[-EVENTS_SHOWN:]))
    return Failure(tier, seed, rule, message, str(setting), last)


def describe(event: Event) -> str:
    """One line."""
    data = " ".join(f"{name}={_short(value)}" for name, value in event.data.items())
    return f"{event.number:6d} {event.time_s:10.3f} {event.kind:18s} {data}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
