"""Which roles a stage needs, walked back from the columns of its loss to the prompt (ARCHITECTURE section 4).

Called by the run's assembly and by `relax config check`. There are no mode flags: KL in the loss brings the reference role,
because only that role produces its column.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from relax.core.algorithm import Algorithm
from relax.core.column import COLUMNS
from relax.core.error import UserError


@dataclass(frozen=True, slots=True)
class RoleColumns:
    """What a role reads from the bus and what it writes."""

    consumes: tuple[str, ...]
    produces: tuple[str, ...]


_TOKENS = ("token_ids", "mask", "turns", "failure", "span")

ROLES: Mapping[str, RoleColumns] = {
    "controller": RoleColumns((), ("prompt", "base")),
    "rollout": RoleColumns(("prompt",), (*_TOKENS, "behaviour_logprobs", "versions", "mixed")),
    "demonstration": RoleColumns(("prompt",), _TOKENS),
    "reward": RoleColumns(("prompt", "turns", "failure"), ("reward", "reward_parts", "kept")),
    "advantage": RoleColumns(("kept", "reward", "turns", "mask", "span"), ("advantages",)),
    "reference": RoleColumns(("kept", "token_ids", "mask", "span"), ("reference_logprobs",)),
}
"""Every role but the trainer. A new role is one line here and one file in `roles/`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`roles` in data-flow order; `trainer_columns` are what the trainer waits for on every sample."""

    roles: tuple[str, ...]
    trainer_columns: tuple[str, ...]

    @property
    def samples(self) -> bool:
        """Whether a policy generates in this stage."""
        return "rollout" in self.roles


def make_plan(algorithm: Algorithm, roles: Mapping[str, RoleColumns] = ROLES) -> Plan:
    """The roles that produce every column the algorithm needs. Raises UserError naming a column that nothing produces."""
    columns = ["token_ids", "mask", "span", "turns", *algorithm.loss.columns]
    if algorithm.tokens_from == "rollout":
        columns += ["behaviour_logprobs", "versions"]
    if algorithm.advantages is not None:
        # `kept` makes the trainer wait for the verdict even on a group that has no sample at all.
        columns += ["advantages", "reward", "kept"]
    chosen: dict[str, int] = {}
    for column in columns:
        _require(column, algorithm, roles, chosen, ())
    order = tuple(sorted(chosen, key=lambda role: chosen[role]))
    return Plan((*order, "trainer"), tuple(dict.fromkeys(columns)))


def _require(
    column: str, algorithm: Algorithm, roles: Mapping[str, RoleColumns], chosen: dict[str, int], path: tuple[str, ...]
) -> None:
    role = _producer(column, algorithm, roles)
    if role in path:
        raise UserError(f"roles wait for each other: {' -> '.join((*path, role))}")
    if role in chosen:
        return
    for needed in roles[role].consumes:
        _require(needed, algorithm, roles, chosen, (*path, role))
    chosen[role] = len(chosen)


def _producer(column: str, algorithm: Algorithm, roles: Mapping[str, RoleColumns]) -> str:
    if column not in COLUMNS:
        raise UserError(
            f"algorithm {algorithm.name!r} needs column {column!r}, which is not in relax.core.column.COLUMNS"
        )
    producers = [name for name, columns in roles.items() if column in columns.produces]
    if algorithm.tokens_from in producers:
        return algorithm.tokens_from
    others = [name for name in producers if name not in ("rollout", "demonstration")]
    if not others:
        made_by = ", ".join(producers) or "no role"
        raise UserError(
            f"algorithm {algorithm.name!r} needs column {column!r}, which {made_by} produces, "
            f"but its tokens come from {algorithm.tokens_from!r}; choose an algorithm or options that do not need it"
        )
    return others[0]
