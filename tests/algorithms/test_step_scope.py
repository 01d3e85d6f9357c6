"""Step scope and several updates in the trainer role (TQ10, LO2, LO6, B7): what is computed when, and from which weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.algorithm import Algorithm, StepTrajectory, StepValues
from relax.core.batch import ForwardBackward, StepReport
from relax.core.column import COLUMNS, Scope
from relax.core.error import InvariantError, UserError
from relax.core.protocol import LossFn, LossInput, LossOutput
from relax.services.plan import make_plan
from relax.services.roles.update import TrainerSettings, cut_updates
from relax.training.config import LinearConfig, SgdConfig
from tests.algorithms.step import STEP, Stand, build, plain_backend, take, train_step
from tests.training.setting import make_backend

TWO: dict[str, Any] = {"group_size": 2}


class Diary:
    """A backend that writes down what it was asked, and passes it on."""

    def __init__(self, backend: Any, bad_update: int | None = None) -> None:
        self._backend, self._bad_update = backend, bad_update
        self.calls: list[str] = []
        self.normalizers: list[float] = []
        self.rows: list[list[str]] = [[]]
        self.inputs: list[LossInput] = []

    num_replicas = 1

    def logprobs(self, shards: Any) -> Any:
        self.calls.append("logprobs")
        return self._backend.logprobs(shards)

    def forward_backward(self, shards: Any, loss: LossFn) -> ForwardBackward:
        self.calls.append("forward_backward")
        self.rows[-1] += [row.id for batch in shards[0] for row in batch]
        result: ForwardBackward = self._backend.forward_backward(shards, _Seen(loss, self.inputs))
        return replace(result, finite=result.finite and len(self.normalizers) != self._bad_update)

    def optim_step(self, normalizer: float) -> StepReport:
        self.calls.append("optim_step")
        self.normalizers.append(normalizer)
        self.rows.append([])
        report: StepReport = self._backend.optim_step(normalizer)
        return report

    def export(self) -> Any:
        return self._backend.export()


@dataclass
class _Seen:
    loss: LossFn
    inputs: list[LossInput]

    @property
    def columns(self) -> tuple[str, ...]:
        return self.loss.columns

    @property
    def needs_entropy(self) -> bool:
        return self.loss.needs_entropy

    def __call__(self, batch: LossInput) -> LossOutput:
        self.inputs.append(batch)
        return self.loss(batch)


async def diary_of(
    algorithm: Algorithm,
    numbers: Sequence[int] = range(4),
    settings: TrainerSettings | None = None,
    bad_update: int | None = None,
    **stand: Any,
) -> tuple[Diary, Stand]:
    diary = Diary(plain_backend(), bad_update)
    standing = Stand([take(algorithm, number) for number in numbers], **stand)
    await train_step(algorithm, standing, diary, settings)
    return diary, standing


# --- when --------------------------------------------------------------------------------------------------------------


async def test_rule_tq10_old_logprobs_are_those_of_the_weights_that_the_step_began_with() -> None:
    algorithm = build("decoupled_ppo", **TWO, updates=2)
    diary, _ = await diary_of(algorithm)
    assert diary.calls == ["logprobs", "forward_backward", "optim_step", "forward_backward", "optim_step"]
    first, second = diary.inputs
    for batch, same in ((first, True), (second, False)):
        old, now = batch.columns["old_logprobs"][batch.mask_BT], batch.logprobs_BT.detach()[batch.mask_BT]
        assert torch.allclose(old, now, atol=1e-5) is same  # the second update already trains moved weights
    fresh = Diary(plain_backend())
    await train_step(
        build("decoupled_ppo", **TWO, updates=1), Stand([take(algorithm, number) for number in range(4)]), fresh
    )
    (whole,) = fresh.inputs
    recorded = torch.cat([batch.columns["old_logprobs"][batch.mask_BT] for batch in diary.inputs])
    assert torch.allclose(recorded.sort().values, whole.logprobs_BT.detach()[whole.mask_BT].sort().values, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "fields", "streams"),
    [
        ("grpo", TWO, True),
        ("rloo", TWO, True),
        ("gspo", {**TWO, "updates": 1}, True),
        ("grpo", {**TWO, "updates": 2}, False),
        ("decoupled_ppo", TWO, False),
        ("reinforce_pp", {}, False),
        ("grpo", {**TWO, "old_logprobs": "current", "correction": {"type": "masked"}}, False),
    ],
)
async def test_rule_lo2_only_algorithms_without_step_scope_train_before_the_step_is_whole(
    name: str, fields: dict[str, Any], streams: bool
) -> None:
    diary: Diary | None = None
    trained_before_the_end: list[bool] = []

    def look(number: int) -> None:
        assert diary is not None
        trained_before_the_end.append("forward_backward" in diary.calls)

    algorithm = build(name, **fields)
    diary = Diary(plain_backend())
    stand = Stand([take(algorithm, number) for number in range(4)], on_take=look)
    await train_step(algorithm, stand, diary, TrainerSettings(1, 0))
    assert trained_before_the_end[-1] is streams


def test_rule_tq10_no_step_scope_column_is_waited_for() -> None:
    for name in ("decoupled_ppo", "reinforce_pp", "dpo"):
        plan = make_plan(build(name))
        assert not any(COLUMNS[column].scope is Scope.step for column in plan.trainer_columns)
        assert plan.step_roles
        assert plan.roles[-1] == "trainer"
    assert make_plan(build("dpo")).step_roles == ("old_logprobs", "preference")
    assert "kept" not in make_plan(build("dpo")).trainer_columns
    assert make_plan(build("gspo")).trainer_columns == make_plan(build("grpo")).trainer_columns


def test_corrections_narrow_before_advantages_are_whitened() -> None:
    plan = make_plan(build("reinforce_pp", correction={"type": "sequence_rejected"}))
    assert plan.step_roles == ("old_logprobs", "correction", "whitening")


# --- updates -----------------------------------------------------------------------------------------------------------


async def test_each_update_has_its_groups_in_the_order_taken_and_its_own_denominator() -> None:
    algorithm = build("grpo", **TWO, updates=3)
    diary, stand = await diary_of(algorithm, (5, 1, 4, 0, 2))
    groups = [list(dict.fromkeys(int(id[1:7]) for id in rows)) for rows in diary.rows[:-1]]
    assert [set(found) for found in groups] == [{5}, {1, 4}, {0, 2}]
    tokens = {number: sum(int(take(algorithm, number).cells[f"g{number:06d}/{s}"]["mask"].sum()) for s in (0, 1))
              for number in (5, 1, 4, 0, 2)}  # fmt: skip
    assert diary.normalizers == [tokens[5], tokens[1] + tokens[4], tokens[0] + tokens[2]]
    (outcome,) = stand.outcomes
    assert outcome.applied
    assert outcome.metrics["train/updates"] == 3
    assert outcome.metrics["train/groups"] == 5
    assert stand.published == [(STEP + 1, True)]


async def test_rule_de2_in_order_the_updates_are_cut_by_id() -> None:
    algorithm = build("grpo", **TWO, updates=2)
    diary, _ = await diary_of(algorithm, (5, 1, 4, 0), TrainerSettings(10_000, 0, in_order=True))
    assert [sorted({int(id[1:7]) for id in rows}) for rows in diary.rows[:-1]] == [[0, 1], [4, 5]]


async def test_a_short_step_has_no_empty_update_and_an_empty_one_is_one_no_op() -> None:
    algorithm = build("grpo", **TWO, updates=3)
    diary, _ = await diary_of(algorithm, (0, 1))
    assert [normalizer > 0 for normalizer in diary.normalizers] == [True, True]
    diary, stand = await diary_of(algorithm, ())
    assert diary.normalizers == [0.0]
    assert (stand.outcomes[0].applied, stand.outcomes[0].reason) == (False, "nothing to train")


@pytest.mark.parametrize(("count", "sizes"), [(1, [5]), (2, [2, 3]), (3, [1, 2, 2]), (5, [1] * 5), (9, [1] * 5)])
def test_updates_differ_by_one_group_at_most(count: int, sizes: list[int]) -> None:
    groups: list[Any] = list(range(5))
    cut = cut_updates(groups, count)
    assert [len(part) for part in cut] == sizes
    assert [group for part in cut for group in part] == groups


async def test_rule_lo6_what_follows_a_nonfinite_update_is_left_out() -> None:
    algorithm = build("grpo", **TWO, updates=4)
    diary, stand = await diary_of(algorithm, bad_update=1)
    assert [normalizer > 0 for normalizer in diary.normalizers] == [True, False]
    (outcome,) = stand.outcomes
    assert (outcome.applied, outcome.reason) == (True, "nonfinite")  # the first update stays: the version is no alias
    assert "train/loss" not in outcome.metrics
    ((step, rows),) = stand.dumped
    assert step == STEP
    assert {row.id[:7] for row in rows} == {"g000001"}


async def test_case_b7_schedules_count_updates() -> None:
    algorithm = build("grpo", **TWO, updates=2)
    backend = make_backend(optimizer=SgdConfig(lr=1.0), schedule=LinearConfig(), total_steps=8)
    rates = []
    for _ in range(2):
        stand = Stand([take(algorithm, number) for number in range(4)])
        await train_step(algorithm, stand, backend)
        rates.append(stand.outcomes[0].metrics["train/learning_rate"])
    assert backend.counters.applied == 4
    assert rates == pytest.approx([7 / 8, 5 / 8])


# --- masks -------------------------------------------------------------------------------------------------------------


async def test_what_a_correction_takes_out_leaves_the_denominator_too() -> None:
    fields: dict[str, Any] = {
        **TWO,
        "old_logprobs": "current",
        "correction": {"type": "masked", "low": 0.9, "high": 1.1},
    }
    diary, stand = await diary_of(build("grpo", **fields))
    kept = sum(int(batch.mask_BT.sum()) for batch in diary.inputs)
    metrics = stand.outcomes[0].metrics
    assert metrics["train/tokens"] == diary.normalizers[0]
    assert kept <= metrics["train/tokens"]  # rows of zero advantage are not run, but count
    assert 0 < metrics["policy/importance_rejected"] < 1
    everything, _ = await diary_of(build("grpo", **TWO))
    assert diary.normalizers[0] == pytest.approx(
        everything.normalizers[0] * (1 - metrics["policy/importance_rejected"])
    )


async def test_rule_st5_tokens_over_the_bound_are_masked_by_option_and_an_error_without() -> None:
    algorithm = build("grpo", **TWO)
    fetched = [take(algorithm, 0), take(algorithm, 1, version=STEP - 2)]
    stand = Stand(list(fetched))
    with pytest.raises(InvariantError, match=r"\[ST1\] group g000001 holds a token of version 5 at step 7, bound 1"):
        await train_step(algorithm, stand, settings=TrainerSettings(10_000, 1))
    stand = Stand(list(fetched))
    await train_step(algorithm, stand, settings=TrainerSettings(10_000, 1, masks_over_age=True))
    fresh = sum(int(fetched[0].cells[f"g000000/{sibling}"]["mask"].sum()) for sibling in (0, 1))
    assert stand.outcomes[0].metrics["train/tokens"] == fresh
    assert stand.outcomes[0].metrics["staleness/max"] == 0
    assert stand.outcomes[0].over_age == ("g000001",)
    old = sum(int(fetched[1].cells[f"g000001/{sibling}"]["mask"].sum()) for sibling in (0, 1))
    assert stand.outcomes[0].metrics["staleness/masked_tokens"] == old


# --- functions that an algorithm brings -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own:
    """A step function of a user's own."""

    produces: tuple[str, ...] = ("whitened_advantages",)
    name: str = "own"
    consumes: tuple[str, ...] = ("advantages",)
    shift: int = 0

    def __call__(self, trajectories: Sequence[StepTrajectory]) -> StepValues:
        return StepValues({"whitened_advantages": [np.zeros(len(one.mask) + self.shift) for one in trajectories]})


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        (Own(name="reward"), UserError, "named 'reward', which is a role; rename it"),
        (Own(produces=("advantages",)), UserError, "not a column of step scope"),
        (Own(produces=("fresh",)), UserError, "not a column of step scope"),
        (Own(shift=1), InvariantError, r"\[TQ1\] whitened_advantages of step function 'own' has lengths"),
        (Own(produces=("old_logprobs",), name="x"), InvariantError, r"\[TQ10\] step function 'x' gave"),
    ],
)
async def test_a_step_function_that_breaks_its_word_is_named(own: Own, error: type[Exception], message: str) -> None:
    algorithm = replace(build("grpo", **TWO), step_functions=(own,))
    with pytest.raises(error, match=message):
        await train_step(algorithm, Stand([take(algorithm, 0)]))
