"""Columns of step scope: what can be known only when the whole step is taken, under version k exactly (TQ10).

Called by the trainer between take and train. Runs the plan's step roles in order: the old logprobs, then the functions that
the algorithm brings, each on whole trajectories in the order of the groups. What they find is a property of a trajectory, so
neither the cut into samples nor the micro-batches can change it (LO1, LO3).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from relax.bus.row import Receipt
from relax.core.algorithm import Algorithm, StepFn, StepValues
from relax.core.batch import Measure, merge_measures
from relax.core.completion import frozen
from relax.core.error import InvariantError
from relax.core.protocol import Compute
from relax.services.plan import CRITIC, Plan
from relax.services.roles.critic_column import CriticColumn
from relax.services.roles.old_logprobs import COLUMN, OldLogprobs
from relax.services.train_group import TrainGroup


class StepColumns:
    def __init__(
        self,
        plan: Plan,
        algorithm: Algorithm,
        old_logprobs: OldLogprobs,
        compute: Compute,
        critic: CriticColumn | None = None,
    ) -> None:
        self._roles = plan.step_roles
        self._functions = {function.name: function for function in algorithm.step_functions}
        self._old_logprobs, self._compute, self._critic = old_logprobs, compute, critic

    async def add(
        self, groups: Sequence[TrainGroup], step: int = 0, receipts: Sequence[Receipt] = ()
    ) -> Mapping[str, Measure]:
        """Add every step-scope column to the groups and narrow their masks; returns what the functions measured.

        A critic needs to know the step, and the receipts that the groups are of.
        """
        measures: list[Mapping[str, Measure]] = []
        for role in self._roles:
            if role == COLUMN:
                await self._old_logprobs.add(groups)
            elif role == CRITIC:
                assert self._critic is not None, "the trainer was given no critic"
                await self._critic.add(step, groups, receipts)
            else:
                measures.append(await apply_function(self._functions[role], groups, self._compute))
        return merge_measures(measures)


async def apply_function(function: StepFn, groups: Sequence[TrainGroup], compute: Compute) -> Mapping[str, Measure]:
    """Give every trajectory of the groups the function's columns, and narrow their masks; returns what it measured."""
    owners = [(group, id) for group in groups for id in group.trajectories]
    views = [group.view(id, function.consumes) for group, id in owners]
    values: StepValues = await compute.run(function, views)
    _check(function, values, [len(view.mask) for view in views])
    for index, (group, id) in enumerate(owners):
        for name, found in values.columns.items():
            group.found.setdefault(id, {})[name] = frozen(np.asarray(found[index], dtype=np.float32))
        if values.keep is not None:
            group.narrow(id, np.asarray(values.keep[index], dtype=np.bool_))
    return values.measures


def _check(function: StepFn, values: StepValues, lengths: Sequence[int]) -> None:
    """A function gives what it declared, one array for each trajectory, aligned with its tokens."""
    if set(values.columns) != set(function.produces):
        raise InvariantError(
            "TQ10",
            f"step function {function.name!r} gave {sorted(values.columns)}, declared {sorted(function.produces)}",
        )
    given = {**values.columns, **({} if values.keep is None else {"keep": values.keep})}
    for name, arrays in given.items():
        if [len(array) for array in arrays] != list(lengths):
            raise InvariantError(
                "TQ1",
                f"{name} of step function {function.name!r} has lengths {[len(array) for array in arrays]}, "
                f"expected one array for each trajectory, of lengths {list(lengths)}",
            )
