"""Which consumers each role has on the bus: one table, read when a stage begins.

A role's columns in `plan.ROLES` say what it needs; here is how it takes them: row by row, or whole groups.
"""

from collections.abc import Mapping
from dataclasses import replace

from relax.bus.row import Subscription
from relax.core.id import Table
from relax.services.access import TRAINER
from relax.services.media_row import COLUMNS as MEDIA_COLUMNS
from relax.services.plan import Plan

ROLE_LEASE_S = 600.0
"""A reward, advantage or reference role that is silent for so long is taken for dead."""

TRAINER_LEASE_S = 7 * 86400.0
"""The trainer holds its groups for a whole step; on the local runtime it lives and dies with the bus."""

_SUBSCRIPTIONS: Mapping[str, tuple[Subscription, ...]] = {
    "demonstration": (Subscription("demonstration", Table.group, ("prompt",), lease_s=ROLE_LEASE_S),),
    "reward": (
        Subscription("reward", Table.trajectory, ("prompt", "turns", "failure"), lease_s=ROLE_LEASE_S),
        Subscription(
            "verdict",
            Table.trajectory,
            ("prompt", "reward", "reward_parts", "failure"),
            unit="group",
            lease_s=ROLE_LEASE_S,
        ),
    ),
    "verdict": (Subscription("verdict", Table.trajectory, ("prompt", "failure"), unit="group", lease_s=ROLE_LEASE_S),),
    "teacher": (Subscription("teacher", Table.sample, ("kept", "token_ids", "mask", "span"), lease_s=ROLE_LEASE_S),),
    "advantage": (
        Subscription(
            "advantage", Table.sample, ("kept", "reward", "turns", "mask", "span"), unit="group", lease_s=ROLE_LEASE_S
        ),
    ),
    "reference": (
        Subscription("reference", Table.sample, ("kept", "token_ids", "mask", "span"), lease_s=ROLE_LEASE_S),
    ),
}


def subscriptions(plan: Plan, rollout_lease_s: float, judges_groups: bool = False) -> list[Subscription]:
    """The consumers of every role of a plan. `rollout_lease_s` is how long one trajectory may take, all its attempts. With
    `judges_groups` the reward role takes the siblings of a prompt together, because some of its rewards compare them."""
    found = [
        _with_media(plan, _without_verdict(plan, one)) for role in plan.roles for one in _SUBSCRIPTIONS.get(role, ())
    ]
    if judges_groups:
        found = [replace(one, unit="group") if one.consumer == "reward" else one for one in found]
    if plan.samples:
        found.append(Subscription("rollout", Table.group, ("prompt",), lease_s=rollout_lease_s))
    found.append(Subscription(TRAINER, Table.sample, plan.trainer_columns, unit="group", lease_s=TRAINER_LEASE_S))
    return found


def _with_media(plan: Plan, subscription: Subscription) -> Subscription:
    """Who computes logprobs reads the media, too."""
    if not plan.reads_media or "token_ids" not in subscription.columns:
        return subscription
    return replace(subscription, columns=(*subscription.columns, *MEDIA_COLUMNS))


def _without_verdict(plan: Plan, subscription: Subscription) -> Subscription:
    """Demonstrated groups get no verdict, so nobody waits for one."""
    if plan.judges:
        return subscription
    return replace(subscription, columns=tuple(column for column in subscription.columns if column != "kept"))
