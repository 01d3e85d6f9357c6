"""What is said of roles in hosts: their names under leases, and their rows in `relax status`."""

import pytest

from relax.runtime.liveness import Beat, RoleBeat, RoleState
from relax.services.plan import ROLES
from relax.services.remote.host import HOLDERS
from relax.services.remote.role import role_rows
from relax.services.subscription import _SUBSCRIPTIONS

WITHOUT_LEASES = {"controller", "old_logprobs"}


def test_rule_tq2_every_role_that_takes_rows_is_known_by_the_name_that_holds_them() -> None:
    """A host that dies gives back what its names hold: a role without one would keep its rows until they expire."""
    consumers = {role for role, found in _SUBSCRIPTIONS.items() if found} | (set(ROLES) - WITHOUT_LEASES)
    assert consumers - {"critic"} <= HOLDERS.keys()
    assert HOLDERS["reward"]("reward-1") == ("reward-1",)


@pytest.mark.parametrize(
    ("phase", "beat", "expected"),
    [
        ("ready", RoleBeat(RoleState.waiting, "a stage"), ("waiting", "a stage")),
        ("ready", RoleBeat(RoleState.busy, "with stage rl", "v7"), ("busy", "")),
        ("pending", RoleBeat(RoleState.busy), ("starting", "")),
        ("killing", RoleBeat(RoleState.waiting, "a stage"), ("failed", "")),
    ],
)
def test_a_row_says_what_the_role_said_unless_its_process_is_not_well(
    phase: str, beat: RoleBeat, expected: tuple[str, str]
) -> None:
    view = {
        "host": "engine-0", "roles": ["engine"], "phase": phase, "incarnation": 3, "pid": 17,
        "beat": Beat({"engine": beat}).to_json(), "error": "", "node": "", "failures": 2,
    }  # fmt: skip
    (row,) = role_rows(view)
    assert (row.state, row.waits_for) == expected
    assert (row.name, row.restarts, row.place) == ("engine-0", 2, "process 17")
    assert row.version == (7 if beat.version else None)
    assert row.host == ""


def test_roles_that_share_a_process_go_by_their_own_names_and_name_it() -> None:
    roles = {"advantage": RoleBeat(RoleState.waiting, "judged groups"), "demonstration": RoleBeat(RoleState.busy)}
    view = {
        "host": "light", "roles": list(roles), "phase": "ready", "incarnation": 1, "pid": 17, "beat": Beat(roles).to_json(),
        "error": "", "node": "", "failures": 0,
    }  # fmt: skip
    assert [(row.name, row.host, row.state) for row in role_rows(view)] == [
        ("advantage", "light", "waiting"), ("demonstration", "light", "busy"),
    ]  # fmt: skip
