"""Roles follow from columns: the plan of each algorithm, and the errors for what nothing produces."""

from dataclasses import replace

import pytest

from relax.algorithms.table import ALGORITHMS
from relax.core.algorithm import Algorithm
from relax.core.error import UserError
from relax.services.plan import ROLES, RoleColumns, make_plan


def algorithm(name: str, **fields: object) -> Algorithm:
    built: Algorithm = ALGORITHMS.component(name)(ALGORITHMS.config_class(name)(type=name, **fields))
    return built


def test_grpo_without_kl_needs_no_reference() -> None:
    assert set(make_plan(algorithm("grpo")).roles) == {"controller", "rollout", "reward", "advantage", "trainer"}


def test_kl_in_the_loss_brings_the_reference_role() -> None:
    plan = make_plan(algorithm("grpo", kl_weight=0.1))
    assert "reference" in plan.roles
    assert "reference_logprobs" in plan.trainer_columns


def test_supervised_needs_demonstrations_only() -> None:
    plan = make_plan(algorithm("supervised", group_size=1))
    assert plan.roles == ("controller", "demonstration", "trainer")
    assert not plan.samples


def test_roles_come_in_the_order_of_the_data() -> None:
    roles = make_plan(algorithm("grpo", kl_weight=0.1)).roles
    assert roles.index("rollout") < roles.index("reward") < roles.index("advantage")
    assert roles.index("reward") < roles.index("reference")
    assert roles[-1] == "trainer"


def test_a_column_that_only_the_other_kind_of_tokens_has_is_named() -> None:
    demonstrated = replace(algorithm("grpo"), tokens_from="demonstration")
    with pytest.raises(UserError, match="behaviour_logprobs"):
        make_plan(demonstrated)


def test_roles_that_wait_for_each_other_are_refused() -> None:
    roles = dict(ROLES)
    roles["reward"] = RoleColumns(("advantages",), ("reward", "reward_parts", "kept"))
    with pytest.raises(UserError, match="wait for each other"):
        make_plan(algorithm("grpo"), roles)
