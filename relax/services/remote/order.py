"""What the controller asks of the launcher, which alone starts and ends processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relax.core.message import Json

REPLICATED: Mapping[str, str] = {"rollout": "engine", "reward": "reward"}
"""What can be scaled, and the role whose hosts are its replicas."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What the launcher is to do: which hosts of replicated roles there are to be (None: as they are), which to start anew.

    `restarts` are (number, host), each to be done once. `attached` are engines that somebody else runs: by name, what
    `RoleSpec.server` holds. The launcher remembers `paused` and `attached` (None: as they are) for a controller that is started
    anew.
    """

    number: int = 0
    replicas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    restarts: tuple[tuple[int, str], ...] = ()
    paused: bool | None = None
    attached: Mapping[str, Mapping[str, Json]] | None = None


def replica_change(role: str, now: Sequence[str], wanted: int) -> tuple[list[str], list[str]]:
    """Names to add and names to end: the lowest free numbers come, the highest go."""
    added: list[str] = []
    number = 0
    while len(now) + len(added) < wanted:
        if f"{role}-{number}" not in now:
            added.append(f"{role}-{number}")
        number += 1
    return added, list(now[wanted:])


def replica_number(host: str) -> int:
    text = host.rpartition("-")[2]
    return int(text) if text.isdigit() else 0
