"""GSPO by hand: the ratio of a trajectory, its clip, and the forward pass that its rows share."""

import math
from dataclasses import replace

import pytest
import torch

from relax.services.roles.update import TrainerSettings
from relax.training.packing import pack
from tests.algorithms.hand import batch_of, evaluate, measured
from tests.algorithms.step import Stand, build, moved, take, train_step
from tests.training.setting import make_row

GSPO = build("gspo")


def test_defaults_are_those_of_the_paper() -> None:
    assert (GSPO.updates, GSPO.keeps_trajectories_whole) == (4, True)
    clip = GSPO.loss.objective.clip  # type: ignore[attr-defined]
    assert (clip.low, clip.high) == (3e-4, 4e-4)


def test_loss_and_gradient_by_hand() -> None:
    """Trajectory 5 has log-ratios 3e-4 and -1e-4: its ratio is exp(1e-4). Trajectory 6 has one token, clipped below."""
    batch = batch_of(
        [[-1.0, -2.0], [-3.0, 0.0]],
        weights=[[0.5, 0.5], [1.0, 0.0]],  # aggregate: trajectory
        mask=[[True, True], [True, False]],
        advantages=[[2.0, 2.0], [-1.0, 0.0]],
        behaviour_logprobs=[[-1.0 - 3e-4, -2.0 + 1e-4], [-3.0 + 5e-4, 0.0]],
        trajectory_number=[[5, 5], [6, 0]],
    )
    output, gradient = evaluate(GSPO.loss, batch)
    ratio = math.exp(1e-4)
    assert output.loss.item() == pytest.approx(-ratio * 2.0 + (1 - 3e-4), abs=1e-12)
    # d/dlogprob of ratio * A is ratio * A / 2 for each of two tokens (equation 10).
    assert gradient[0] == pytest.approx([-ratio, -ratio], abs=1e-12)
    assert gradient[1] == [0.0, 0.0]
    assert measured(output, "policy/clip_fraction_low") == pytest.approx(0.5)
    assert measured(output, "policy/ratio_max") == pytest.approx(ratio)


def test_it_is_the_gradient_of_the_sequence_objective_itself() -> None:
    """Equation 5 written with a ratio that carries all gradients: autograd finds the same."""
    logprobs, behaviour = [[-1.0, -2.0, -0.5]], [[-1.001, -2.0005, -0.4995]]
    batch = batch_of(
        logprobs,
        weights=[[1 / 3] * 3],
        advantages=[[-1.5] * 3],
        behaviour_logprobs=behaviour,
        trajectory_number=[[0, 0, 0]],
    )
    _, gradient = evaluate(GSPO.loss, batch)
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    ratio = (leaf - torch.tensor(behaviour, dtype=torch.float64)).mean().exp()
    objective = torch.minimum(ratio * -1.5, ratio.clamp(1 - 3e-4, 1 + 4e-4) * -1.5)
    (-objective).backward()
    assert leaf.grad is not None
    assert gradient == [pytest.approx(leaf.grad[0].tolist(), abs=1e-12)]


def test_rows_of_one_trajectory_share_its_ratio() -> None:
    columns = {"advantages": [[1.0], [1.0]], "behaviour_logprobs": [[-1.0 - 2e-4], [-1.0]]}
    together, _ = evaluate(GSPO.loss, batch_of([[-1.0], [-1.0]], trajectory_number=[[3], [3]], **columns))
    apart, _ = evaluate(GSPO.loss, batch_of([[-1.0], [-1.0]], trajectory_number=[[3], [4]], **columns))
    assert together.loss.item() == pytest.approx(-2 * math.exp(1e-4), abs=1e-12)
    assert apart.loss.item() == pytest.approx(-math.exp(2e-4) - 1, abs=1e-12)


def test_packing_keeps_the_rows_of_a_trajectory_together() -> None:
    rows = [make_row(index, 3, 4 + index % 5) for index in range(6)]
    ids = ["g000000/0/0", "g000000/1/0", "g000000/0/1", "g000001/0/0", "g000000/1/1", "g000000/0/10"]
    rows = [replace(row, id=id) for row, id in zip(rows, ids, strict=True)]  # type: ignore[type-var]
    for budget in (1, 20, 1000):
        for in_order in (False, True):
            batches = pack(rows, budget, in_order, whole_trajectories=True)
            assert sorted(row.id for batch in batches for row in batch) == sorted(ids)
            places = {row.id: index for index, batch in enumerate(batches) for row in batch}
            assert len({places[id] for id in ids if id.startswith("g000000/0/")}) == 1
            assert len({places[id] for id in ids if id.startswith("g000000/1/")}) == 1
    alone = pack(rows, 1, in_order=True, whole_trajectories=True)
    assert [row.id for row in alone[0]] == ["g000000/0/0", "g000000/0/1", "g000000/0/10"]


async def test_without_whole_trajectories_a_cut_would_change_the_gradient() -> None:
    """What LO3 would lose: this is why the packing honours the flag."""
    whole = build("gspo", group_size=2, updates=1)
    torn = replace(whole, keeps_trajectories_whole=False)
    found = []
    for algorithm in (whole, torn):
        stand = Stand([take(algorithm, number, cut=True) for number in range(4)])
        found.append(moved(await train_step(algorithm, stand, settings=TrainerSettings(1, 0))))
    assert float((found[0] - found[1]).abs().max()) > 1e-3 * float(found[0].abs().max())
