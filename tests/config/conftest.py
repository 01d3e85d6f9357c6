"""Component tables made for these tests, in place of the rooms' own, so that the tree is tested without any room."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, NonNegativeInt, PositiveFloat, SecretStr, model_validator

from relax.config.base import ComponentConfig, Config
from relax.config.secret import Secret
from relax.config.table import ComponentTable, Entry


class SourceConfig(ComponentConfig):
    """A source."""

    name: str
    """Name of the source."""
    task: str
    """Task that judges it."""
    weight: PositiveFloat = 1.0
    """Share of the mixture."""
    path: str | None = None
    """A file."""


class GrpoConfig(ComponentConfig):
    """An algorithm with two of the usual options."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Siblings in a group."""
    clip_low: PositiveFloat = 0.2
    """Lower clip."""
    clip_high: PositiveFloat = 0.28
    """Upper clip."""


class SupervisedConfig(ComponentConfig):
    """An algorithm without siblings."""

    group_size: Literal[1] = 1
    """Always 1."""


class AdamWConfig(ComponentConfig):
    """An optimizer."""

    lr: PositiveFloat = 1e-5
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the moments."""


class SgdConfig(ComponentConfig):
    """Another optimizer."""

    lr: PositiveFloat = 1e-2
    """Learning rate."""
    momentum: float = 0.0
    """Momentum."""


class CosineConfig(ComponentConfig):
    """A schedule with an option and a rule of its own, written as a pydantic validator."""

    warmup_steps: NonNegativeInt = 0
    """Steps of warm-up."""
    total_steps: NonNegativeInt = 10
    """Steps in all."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> "CosineConfig":
        if self.warmup_steps > self.total_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, more than total_steps ({self.total_steps}); lower it"
            )
        return self


class PlainConfig(ComponentConfig):
    """A component without options."""


class RewardConfig(ComponentConfig):
    """A reward."""

    weight: float = 1.0
    """Its weight."""


class LoginConfig(Config):
    """A section inside a component."""

    password: SecretStr | None = None
    """A secret in pydantic's own type."""


class TrackerConfig(ComponentConfig):
    """A monitor with secrets."""

    token: Secret | None = None
    """A reference to a secret."""
    login: LoginConfig | None = None
    """How to log in."""


def fake_tables() -> dict[str, dict[str, ComponentTable]]:
    """module -> variable -> table, under the names that the tree refers to."""

    def table(kind: str, **classes: type[ComponentConfig]) -> ComponentTable:
        entries = {
            name: Entry(f"fake_components:{item.__name__}", f"fake_components:{item.__name__}", f"the {name} {kind}")
            for name, item in classes.items()
        }
        return ComponentTable(kind, entries)

    return {
        "relax.data.table": {
            "SOURCES": table("source", jsonl=SourceConfig),
            "CURRICULA": table("curriculum", learnability=PlainConfig),
        },
        "relax.tasks.table": {
            "ENVIRONMENTS": table("environment", single_turn=PlainConfig),
            "REWARDS": table("reward", exact=RewardConfig, numeric=RewardConfig),
        },
        "relax.algorithms.table": {"ALGORITHMS": table("algorithm", grpo=GrpoConfig, supervised=SupervisedConfig)},
        "relax.training.table": {
            "BACKENDS": table("training backend", torch=PlainConfig),
            "OPTIMIZERS": table("optimizer", adamw=AdamWConfig, sgd=SgdConfig),
            "SCHEDULES": table("schedule", constant=PlainConfig, cosine=CosineConfig),
        },
        "relax.engines.table": {"ENGINES": table("engine", torch=PlainConfig)},
        "relax.runtime.table": {"RUNTIMES": table("runtime", local=PlainConfig)},
        "relax.services.monitors.table": {
            "MONITORS": table("monitor", console=PlainConfig, jsonl=PlainConfig, tracker=TrackerConfig)
        },
    }


@pytest.fixture(scope="module")
def tables() -> Iterator[None]:
    """Puts the fake tables where the tree looks for them."""
    classes = [item for item in globals().values() if isinstance(item, type) and issubclass(item, Config)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            sys.modules, "fake_components", _module("fake_components", {item.__name__: item for item in classes})
        )
        for name, variables in fake_tables().items():
            patch.setitem(sys.modules, name, _module(name, variables))
        yield


def _module(name: str, variables: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(variables)
    return module


RECIPE = """\
schema: 1
run: {name: try, seed: 3}
model: {path: some/model}
data:
  sources:
    - {name: add, type: jsonl, path: add.jsonl, task: addition}
  max_prompt_tokens: 64
tasks:
  addition:
    rewards: [{type: exact, weight: 1}]
stages:
  - {name: warm-up, steps: 250, groups_per_step: 128, algorithm: supervised}
  - name: rl
    steps: 500
    groups_per_step: 64
    algorithm: {type: grpo, group_size: 8}
rollout: {sampling: {max_tokens: 8}}
training: {optimizer: {type: adamw, lr: 4e-4}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A small valid recipe."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path
