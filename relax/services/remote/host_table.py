"""How every host of a run stands, as the launcher said last; asked by `control` before and while it changes the run.

What it says may be a second old.
"""

from collections.abc import Collection, Mapping, Sequence

from relax.core.error import RelaxError, UserError
from relax.core.message import Json
from relax.services.remote.order import replica_number

ENDED = ("stopped", "finished", "given up")
OVER = (*ENDED, "stopping")
"""Phases of a host that is not there any more, or soon will not be."""


class HostTable:
    def __init__(self) -> None:
        self.views: Sequence[Mapping[str, Json]] = ()

    def find(self, host: str) -> Mapping[str, Json] | None:
        return next((view for view in self.views if view["host"] == host), None)

    def view(self, host: str) -> Mapping[str, Json]:
        """Raises RelaxError."""
        found = self.find(host)
        if found is None:
            raise RelaxError(f"{host} is not part of the run any more")
        return found

    def incarnation(self, host: str) -> int:
        """0 for a host that is not there."""
        found = self.find(host)
        return 0 if found is None else int(found["incarnation"])

    def phase(self, host: str) -> str:
        """Empty for a host that is not there."""
        found = self.find(host)
        return "" if found is None else str(found["phase"])

    def given_up(self) -> set[str]:
        return {str(view["host"]) for view in self.views if view["phase"] == "given up"}

    def carrying(self, role: str, beside: Collection[str]) -> tuple[str, ...]:
        """The hosts that carry a role and are to stay, by number, without those of `beside`."""
        names = [
            view["host"]
            for view in self.views
            if role in view["roles"] and view["phase"] not in OVER and view["host"] not in beside
        ]
        return tuple(sorted(names, key=replica_number))

    def host_of(self, role: str) -> str:
        """The host that a name from the table of roles means; of a role with replicas, its only one. Raises UserError."""
        if self.find(role) is not None:
            return role
        carriers = [str(view["host"]) for view in self.views if role in view["roles"]]
        if len(carriers) == 1:
            return carriers[0]
        known = ", ".join(str(view["host"]) for view in self.views)
        raise UserError(f"there is no role {role!r}; roles: {known}")
