"""Optimizers and schedules against their formulae, and their configuration nodes."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from relax.core.error import UserError
from relax.training.config import AdamWConfig, ConstantConfig, CosineConfig, LinearConfig, SgdConfig
from relax.training.optimizer import build_adamw, build_sgd
from relax.training.schedule import build_constant, build_cosine, build_linear
from relax.training.table import BACKENDS, OPTIMIZERS, SCHEDULES


def test_adamw_follows_its_formula_and_decays_matrices_only() -> None:
    matrix, vector = nn.Parameter(torch.full((2, 2), 3.0)), nn.Parameter(torch.full((2,), 3.0))
    config = AdamWConfig(lr=0.1, betas=(0.8, 0.9), weight_decay=0.5, eps=1e-6)
    optimizer = build_adamw(config, [vector, matrix])
    mean = square = 0.0
    expected = {"matrix": 3.0, "vector": 3.0}
    for step, gradient in enumerate([2.0, -1.0, 0.5], start=1):
        matrix.grad, vector.grad = torch.full((2, 2), gradient), torch.full((2,), gradient)
        optimizer.step()
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.9 * square + 0.1 * gradient**2
        move = 0.1 * (mean / (1 - 0.8**step)) / (math.sqrt(square / (1 - 0.9**step)) + 1e-6)
        expected = {"matrix": expected["matrix"] * (1 - 0.1 * 0.5) - move, "vector": expected["vector"] - move}
    assert matrix.detach().flatten().tolist() == pytest.approx([expected["matrix"]] * 4, rel=1e-5)
    assert vector.detach().tolist() == pytest.approx([expected["vector"]] * 2, rel=1e-5)


def test_sgd_follows_its_formula() -> None:
    parameter = nn.Parameter(torch.tensor([1.0]))
    optimizer = build_sgd(SgdConfig(lr=0.1, momentum=0.5), [parameter])
    for gradient in (1.0, 2.0):
        parameter.grad = torch.tensor([gradient])
        optimizer.step()
    assert parameter.item() == pytest.approx(1.0 - 0.1 * 1.0 - 0.1 * (0.5 * 1.0 + 2.0))


def test_warm_up_rises_from_its_first_step_to_the_full_rate() -> None:
    factor = build_constant(ConstantConfig(warmup_steps=4), 10)
    assert [factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert build_constant(ConstantConfig(), 10)(0) == 1.0


def test_linear_falls_to_its_floor_and_stays() -> None:
    factor = build_linear(LinearConfig(warmup_steps=2, min_ratio=0.2), 6)
    assert [factor(step) for step in range(8)] == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_falls_to_its_floor_and_stays() -> None:
    factor = build_cosine(CosineConfig(min_ratio=0.1), 4)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2 for share in (0, 0.25, 0.5, 0.75, 1, 1)]
    assert [factor(step) for step in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize("build", [(build_linear, LinearConfig), (build_cosine, CosineConfig)])
def test_a_warm_up_as_long_as_the_stage_is_refused(build: tuple) -> None:
    make, config = build
    with pytest.raises(UserError, match="warmup_steps is 5, but the stage has 5 steps"):
        make(config(warmup_steps=5), 5)


@pytest.mark.parametrize(
    ("table", "name", "extra"),
    [
        (OPTIMIZERS, "sgd", {"betas": [0.9, 0.95]}),
        (OPTIMIZERS, "adamw", {"momentum": 0.9}),
        (SCHEDULES, "constant", {"min_ratio": 0.1}),
        (BACKENDS, "torch", {"size": 3}),
    ],
)
def test_a_component_accepts_its_own_keys_only(table, name: str, extra: dict) -> None:  # type: ignore[no-untyped-def]
    config_class = table.config_class(name)
    assert config_class(type=name).type == name
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        config_class(type=name, **extra)


def test_every_entry_of_the_tables_can_be_loaded() -> None:
    for table in (BACKENDS, OPTIMIZERS, SCHEDULES):
        for name in table.entries:
            assert table.config_class(name)().type == name
            assert callable(table.component(name))


@pytest.mark.parametrize("values", [{"lr": 0.0}, {"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}])
def test_senseless_numbers_are_refused(values: dict) -> None:
    with pytest.raises(ValidationError):
        AdamWConfig(**values)
