"""Roles follow from columns: walks back from the loss to the prompt.

Called by the run's assembly, by the trainer role and by `relax config check`. There are no mode flags: KL in the loss brings
the reference role, because only that role produces its column. Roles of step scope come with the algorithm; nobody can
subscribe to what they produce, so the trainer calls them on what it took (TQ10).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from relax.core.algorithm import Algorithm
from relax.core.column import COLUMNS, Scope
from relax.core.error import UserError
from relax.services.media_row import COLUMNS as MEDIA_COLUMNS


@dataclass(frozen=True, slots=True)
class RoleColumns:
    """What a role reads and what it writes."""

    consumes: tuple[str, ...]
    produces: tuple[str, ...]


_TOKENS = ("token_ids", "mask", "turns", "failure", "span")

ROLES: Mapping[str, RoleColumns] = {
    "controller": RoleColumns((), ("prompt", "base")),
    "rollout": RoleColumns(("prompt",), (*_TOKENS, "behaviour_logprobs", "versions", "mixed")),
    "demonstration": RoleColumns(("prompt",), _TOKENS),
    "reward": RoleColumns(("prompt", "turns", "failure"), ("reward", "reward_parts", "kept")),
    "verdict": RoleColumns(("prompt", "failure"), ("kept",)),
    "advantage": RoleColumns(("kept", "reward", "turns", "mask", "span"), ("advantages",)),
    "reference": RoleColumns(("kept", "token_ids", "mask", "span"), ("reference_logprobs",)),
    "teacher": RoleColumns(
        ("kept", "token_ids", "mask", "span"), ("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs")
    ),
    "old_logprobs": RoleColumns(("token_ids", "mask", "span"), ("old_logprobs",)),
}
"""Every role but the trainer and those that an algorithm brings. A new role is one line here and one file in `roles/`."""

MEDIA_ROLES = ("rollout", "demonstration", "reference", "teacher", "old_logprobs")
"""In a run that reads media the first two write their columns too, the others read them."""

CRITIC = "critic"
"""The role that an algorithm with value functions brings; it may be in a process of its own, and is called by the trainer."""

DERIVED = ("trajectory_number",)
"""Columns that the trainer makes of a row's id: no role writes them, and the bus never holds them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`roles` in data-flow order; `trainer_columns` are what the trainer waits for on every sample.

    `step_roles` are those of `roles` that the trainer calls between take and train, in order.
    """

    roles: tuple[str, ...]
    trainer_columns: tuple[str, ...]
    step_roles: tuple[str, ...] = ()

    @property
    def reads_media(self) -> bool:
        return set(MEDIA_COLUMNS) <= set(self.trainer_columns)

    @property
    def samples(self) -> bool:
        """Whether a policy generates in this stage."""
        return "rollout" in self.roles

    @property
    def judges(self) -> bool:
        """Whether groups get a verdict: by their rewards, or by what failed where nothing is rewarded."""
        return "reward" in self.roles or "verdict" in self.roles


def make_plan(algorithm: Algorithm, roles: Mapping[str, RoleColumns] = ROLES, reads_media: bool = False) -> Plan:
    """The roles that produce every column the algorithm needs. Raises UserError naming a column that nothing produces."""
    known = _with_own(_judged(_with_media(roles) if reads_media else roles, algorithm), algorithm)
    columns = ["token_ids", "mask", "span", "turns", *algorithm.loss.columns]
    if reads_media:
        columns += MEDIA_COLUMNS
    if algorithm.tokens_from == "rollout":
        columns += ["behaviour_logprobs", "versions"]
    if algorithm.advantages is not None:
        # `kept` makes the trainer wait for the verdict even on a group that has no sample at all.
        columns += ["advantages", "reward", "kept"]
    elif algorithm.tokens_from == "rollout":
        columns += ["reward", "kept"] if algorithm.observes_rewards else ["kept"]
    chosen: dict[str, int] = {}
    for function in algorithm.step_functions:  # first, so that they run in the algorithm's own order
        _require_role(function.name, algorithm, known, chosen, ())
    for column in columns:
        _require(column, algorithm, known, chosen, ())
    order = sorted(chosen, key=lambda role: (_is_of_step(known[role]), chosen[role]))
    step_roles = tuple(role for role in order if _is_of_step(known[role]))
    columns += [column for role in step_roles for column in known[role].consumes]
    waited = tuple(column for column in dict.fromkeys(columns) if column not in DERIVED and not _is_step(column))
    return Plan((*order, "trainer"), waited, step_roles)


def _with_media(roles: Mapping[str, RoleColumns]) -> dict[str, RoleColumns]:
    found = dict(roles)
    for name in MEDIA_ROLES:
        role = roles[name]
        writes = "token_ids" in role.produces
        found[name] = RoleColumns(
            role.consumes + (() if writes else MEDIA_COLUMNS), role.produces + (MEDIA_COLUMNS if writes else ())
        )
    return found


def _judged(roles: Mapping[str, RoleColumns], algorithm: Algorithm) -> dict[str, RoleColumns]:
    """Without advantages there is no reward: sampled groups then get a verdict on failures alone, and demonstrated ones none."""
    if algorithm.tokens_from == "rollout":
        unused = "verdict" if algorithm.advantages is not None or algorithm.observes_rewards else "reward"
        return {name: role for name, role in roles.items() if name != unused}
    return {
        name: RoleColumns(tuple(column for column in role.consumes if column != "kept"), role.produces)
        for name, role in roles.items()
    }


def _with_own(roles: dict[str, RoleColumns], algorithm: Algorithm) -> dict[str, RoleColumns]:
    """The roles and those that the algorithm brings. Raises UserError for one that cannot be of step scope."""
    for function in algorithm.step_functions:
        if function.name in roles:
            raise UserError(
                f"algorithm {algorithm.name!r} brings a step function named {function.name!r}, which is a role; rename it"
            )
        for column in function.produces:
            if column not in COLUMNS or not _is_step(column):
                raise UserError(
                    f"step function {function.name!r} produces {column!r}, which is not a column of step scope; "
                    "declare it in relax.core.column.COLUMNS with Scope.step"
                )
        roles[function.name] = RoleColumns(function.consumes, function.produces)
    if algorithm.critic is not None:
        estimate = algorithm.critic.estimate
        needed = tuple(column for column in estimate.consumes if column != "values")
        roles[CRITIC] = RoleColumns(("token_ids", "mask", "span", *needed), ("values", *estimate.produces))
    return roles


def _is_step(column: str) -> bool:
    return COLUMNS[column].scope is Scope.step


def _is_of_step(role: RoleColumns) -> bool:
    """A function that only narrows masks produces no column at all."""
    return all(_is_step(column) for column in role.produces)


def _require(
    column: str, algorithm: Algorithm, roles: Mapping[str, RoleColumns], chosen: dict[str, int], path: tuple[str, ...]
) -> None:
    if column not in DERIVED:
        _require_role(_producer(column, algorithm, roles), algorithm, roles, chosen, path)


def _require_role(
    role: str, algorithm: Algorithm, roles: Mapping[str, RoleColumns], chosen: dict[str, int], path: tuple[str, ...]
) -> None:
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
