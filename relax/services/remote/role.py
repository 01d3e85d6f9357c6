"""Which roles a run needs, and how they are shown.

The roles of all stages together have processes for the whole run: one that a stage does not need waits.
"""

from collections.abc import Iterator, Mapping

from relax.algorithms.table import ALGORITHMS
from relax.config.tree import RunConfig
from relax.core.message import Json
from relax.runtime.liveness import Beat, RoleBeat
from relax.services.plan import make_plan
from relax.services.role_status import RoleState, RoleStatus

_STATES: Mapping[str, RoleState] = {
    "pending": "starting",
    "starting": "starting",
    "finished": "stopped",
    "stopping": "stopped",
    "stopped": "stopped",
    "killing": "failed",
    "given up": "failed",
}
"""Phases of a host that say more than what its roles said last."""


def roles_of(config: RunConfig) -> frozenset[str]:
    """Every role that needs a process, but the controller. Raises UserError for a stage that cannot be planned."""
    roles: set[str] = set()
    for stage in config.stages:
        algorithm = ALGORITHMS.component(stage.algorithm.type)(stage.algorithm)
        plan = make_plan(algorithm, reads_media=config.data.media is not None)
        roles |= set(plan.roles) - set(plan.step_roles) - {"controller"}
        if plan.samples:
            roles.add("engine")
        if algorithm.critic is not None:
            roles.add("critic")
    judges = {getattr(reward, "judge", None) for task in config.tasks.values() for reward in task.rewards}
    if judges & set(config.judges):
        roles.add("judge")
    if config.eval.sets:
        roles.add("evaluation")
    return frozenset(roles)


def role_rows(view: Mapping[str, Json]) -> Iterator[RoleStatus]:
    """The rows of a host, of which the launcher has sent this view."""
    beat, is_shared = Beat.from_json(view["beat"]), len(view["roles"]) > 1
    for role in view["roles"]:
        said = beat.roles.get(role, RoleBeat())
        state = _STATES.get(view["phase"], str(said.state))
        yield RoleStatus(
            name=role if is_shared else view["host"],
            state=state,  # type: ignore[arg-type]
            waits_for=said.reason if state == "waiting" else "",
            version=_number(said.version),
            rate=said.counters.get("rollout/tokens_per_second"),
            unit="tokens" if "rollout/tokens_per_second" in said.counters else "",
            restarts=max(0, view["incarnation"] - 1),
            beat_age_s=view.get("age_s"),
            error=view["error"],
            place=f"process {view['pid']}" if view["pid"] else "",
            host=view["host"] if is_shared else "",
        )


def _number(version: str) -> int | None:
    """Of `v12` or `v12.i1`."""
    text = version.removeprefix("v").partition(".")[0]
    return int(text) if text.isdigit() else None
