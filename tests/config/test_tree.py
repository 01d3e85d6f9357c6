"""The tree: components resolved through tables, defaults, values of a stage against shared ones, rules between fields."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relax.config.base import ComponentConfig, Config
from relax.config.load import load_config
from relax.config.tree import RunConfig, warnings_of
from relax.core.error import ConfigError

pytestmark = pytest.mark.usefixtures("tables")


def problems_of(recipe: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config([recipe], overrides)
    return caught.value.problems


def only_problem(recipe: Path, *overrides: str) -> str:
    problems = problems_of(recipe, *overrides)
    assert len(problems) == 1, problems
    return problems[0]


def test_component_has_the_class_of_its_type(recipe: Path) -> None:
    config = load_config([recipe])
    assert type(config.training.optimizer).__name__ == "AdamWConfig"
    assert config.training.optimizer.model_dump() == {"type": "adamw", "lr": 4e-4, "betas": (0.9, 0.95)}
    assert type(config.rollout.engine).__name__ == "PlainConfig"
    assert config.rollout.engine.type == "torch"


def test_bare_string_is_a_component_with_defaults(recipe: Path) -> None:
    bare = load_config([recipe], ["training.optimizer=sgd"])
    full = load_config([recipe], ["training.optimizer={type: sgd}"])
    assert bare.training.optimizer == full.training.optimizer
    assert bare.training.optimizer.type == "sgd"


def test_built_component_is_accepted_as_it_is(recipe: Path) -> None:
    config = load_config([recipe])
    built = config.training.optimizer
    again = RunConfig.model_validate(config.model_dump() | {"training": {"optimizer": built}})
    assert again.training.optimizer is built


def test_built_component_of_the_wrong_table_is_refused(recipe: Path) -> None:
    config = load_config([recipe])
    wrong = config.model_dump() | {"training": {"optimizer": config.stages[1].algorithm}}
    with pytest.raises(ValidationError, match="unknown optimizer 'grpo'"):
        RunConfig.model_validate(wrong)


def test_component_by_import_path_uses_its_own_config(recipe: Path) -> None:
    path = "fake_components:Thing"
    import fake_components  # type: ignore[import-not-found]

    class ThingConfig(ComponentConfig):
        knob: int = 3

    class Thing:
        Config = ThingConfig

    fake_components.Thing = Thing
    config = load_config([recipe], [f"training.optimizer={{type: '{path}', knob: 7}}"])
    assert config.training.optimizer == ThingConfig(type=path, knob=7)


def test_algorithm_without_the_common_field_is_refused(recipe: Path) -> None:
    import fake_components

    class Sizeless:
        class Config(ComponentConfig):
            pass

    fake_components.Sizeless = Sizeless
    assert "needs the fields group_size" in only_problem(recipe, "stages.rl.algorithm=fake_components:Sizeless")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("grop", "unknown algorithm 'grop'; did you mean 'grpo'? known: grpo, supervised"),
        ("{group_size: 4}", "needs a `type` that names the algorithm; known: grpo, supervised"),
        ("{type: 3}", "`type` is 3, but should name"),
        ("7", "should be a mapping with a `type`"),
        ("no_such_module:Thing", "cannot import 'no_such_module'"),
    ],
)
def test_unusable_component_is_refused_with_the_choices(recipe: Path, value: str, expected: str) -> None:
    problem = only_problem(recipe, f"stages.rl.algorithm={value}")
    assert "stages.1.algorithm: " in problem
    assert expected in problem


def test_tree_is_frozen(recipe: Path) -> None:
    config = load_config([recipe])
    with pytest.raises(ValidationError, match="frozen"):
        config.run.seed = 4  # type: ignore[misc]
    assert isinstance(config.stages, tuple)


def test_sources_of_a_stage(recipe: Path) -> None:
    sources = "data.sources=[{name: a, type: jsonl, task: addition}, {name: b, type: jsonl, task: addition}]"
    config = load_config([recipe], [sources, "stages.rl.sources=[b]"])
    assert [source.model_dump()["name"] for source in config.sources_of(config.stages[0])] == ["a", "b"]
    assert [source.model_dump()["name"] for source in config.sources_of(config.stages[1])] == ["b"]


def test_size_of_the_bus_is_bytes(recipe: Path) -> None:
    assert load_config([recipe]).bus.max_bytes == 2 << 30
    assert load_config([recipe], ["bus.max_bytes=512MiB"]).bus.max_bytes == 512 << 20
    assert load_config([recipe], ["bus.max_bytes=1000"]).bus.max_bytes == 1000
    assert "bus.max_bytes" in only_problem(recipe, "bus.max_bytes=2 gigs")
    assert "greater than 0" in only_problem(recipe, "bus.max_bytes=0")


RULES: list[tuple[list[str], str]] = [
    (
        ["data.sources.add.task=additon"],
        "data.sources.0.task: names the task 'additon', which is not in `tasks`; did you mean",
    ),
    (
        ["stages.rl.sources=[ad]"],
        "stages.1.sources.0: names the source 'ad', which is not in `data.sources`; did you mean 'add'?",
    ),
    (["stages.1.name=warm-up"], "stages.1.name: 'warm-up' is also the name of item 0 of this list; rename one"),
    (
        ["data.sources=[{name: a, type: jsonl, task: addition}, {name: a, type: jsonl, task: addition}]"],
        "data.sources.1.name: 'a' is also the name of item 0",
    ),
    (
        ["eval.sets=[{name: e, source: &s {name: x, type: jsonl, task: addition}}, {name: e, source: *s}]"],
        "eval.sets.1.name: 'e' is also the name of item 0",
    ),
    (
        ["eval.sets=[{name: e, source: {name: x, type: jsonl, task: nowhere}}]"],
        "eval.sets.0.source.task: names the task 'nowhere'",
    ),
    (
        ["tasks.addition.min_survivors=9"],
        "tasks.addition.min_survivors: is 9, more than the 8 siblings of a group in stage 'rl'",
    ),
    (["run.deterministic=true"], "rollout.max_staleness: is 1, but run.deterministic needs 0 (DE2)"),
    (
        ["run.deterministic=true", "rollout.max_staleness=0", "stages.rl.max_staleness=2"],
        "stages.1.max_staleness: is 2, but run.deterministic needs 0",
    ),
    (
        ["rollout.max_context_tokens=71"],
        "rollout.max_context_tokens: is 71, less than data.max_prompt_tokens (64) + rollout",
    ),
    (
        [
            "rollout.max_context_tokens=72",
            "eval.sets=[{name: e, max_tokens: 9, source: {name: x, type: jsonl, task: addition}}]",
        ],
        "eval.sets.0.max_tokens: is 9; with data.max_prompt_tokens (64)",
    ),
    (["rollout.sampling.temperature=0"], "rollout.sampling.temperature: is 0, but should be greater than 0"),
    (["rollout.over_age=evict"], "rollout.over_age: is 'evict', but should be 'wait', 'mask' or 'requeue'"),
    (
        ["rollout.over_age=requeue", "rollout.max_staleness=0"],
        "rollout.over_age: is 'requeue', but at max_staleness 0 no group can be late (ST5)",
    ),
    (["stages.rl.filter.max_per_step=0"], "stages.1.filter.max_per_step: is 0, but should be greater than 0"),
    (["rollout.max_staleness=-1"], "rollout.max_staleness: is -1, but should be greater than or equal to 0"),
    (["training.checkpoint.keep_last=0"], "training.checkpoint.keep_last: is 0, but should be greater than 0"),
    (["weights.keep=0"], "weights.keep: is 0, but should be greater than 0"),
    (["training.optimizer.lr=.nan"], "training.optimizer.lr: is nan, but should be"),
    (["schema=2"], "schema: is 2, but should be 1"),
    (["stages=[]"], "stages: "),
    (["run.name=a/b"], "run.name: "),
    (["bus.max_rows=most"], "bus.max_rows: is 'most', but should be 'auto' or a valid integer"),
]


@pytest.mark.parametrize(("overrides", "expected"), RULES, ids=[rule[1].split(":")[0] for rule in RULES])
def test_violated_rule_says_where_and_what(recipe: Path, overrides: list[str], expected: str) -> None:
    assert expected in only_problem(recipe, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["run.deterministic=true", "rollout.max_staleness=0"],
        ["run.deterministic=true", "stages.warm-up.max_staleness=0", "stages.rl.max_staleness=0"],
        ["rollout.max_context_tokens=72"],
        ["tasks.addition.min_survivors=8"],
        ["tasks.addition.min_survivors=9", "tasks.addition.on_failure=drop"],
        ["rollout.on_load=abort"],
        ["rollout.over_age=mask", "rollout.max_staleness=0", "stages.rl.max_staleness=1"],
    ],
)
def test_setting_at_the_edge_of_a_rule_is_accepted(recipe: Path, overrides: list[str]) -> None:
    assert isinstance(load_config([recipe], overrides), RunConfig)


WARNINGS: list[tuple[str, str]] = [
    ("rollout.sampling.top_p=0.9", "rollout.sampling.top_p: is 0.9"),
    ("rollout.sampling.top_k=5", "rollout.sampling.top_k: is 5"),
    ("rollout.oversample=2", "rollout.oversample: is 2: steps take the groups that finish first and drop the slowest"),
    ("rollout.over_age=requeue", "rollout.over_age: is 'requeue': late groups are dropped and sampled again"),
    ("training.microbatch_tokens=71", "training.microbatch_tokens: is 71, but a sample may have 72"),
    (
        "eval.sets=[{name: e, samples: 2, source: {name: x, type: jsonl, task: addition}}]",
        "eval.sets.0.samples: is 2 at temperature 0",
    ),
    ("tasks.spare={rewards: [exact]}", "tasks.spare: no data source names this task"),
]


def test_recipe_as_meant_has_no_warnings(recipe: Path) -> None:
    assert warnings_of(load_config([recipe])) == []


@pytest.mark.parametrize(("override", "expected"), WARNINGS, ids=[item[1].split(":")[0] for item in WARNINGS])
def test_doubtful_setting_warns(recipe: Path, override: str, expected: str) -> None:
    warnings = warnings_of(load_config([recipe], [override]))
    assert len(warnings) == 1
    assert warnings[0].startswith(expected)


def test_source_that_no_stage_uses_warns(recipe: Path) -> None:
    sources = "data.sources=[{name: a, type: jsonl, task: addition}, {name: b, type: jsonl, task: addition}]"
    stages = ["stages.rl.sources=[b]", "stages.warm-up.sources=[b]"]
    assert warnings_of(load_config([recipe], [sources, *stages])) == ["data.sources.0: no stage uses the source 'a'"]


def test_tree_built_in_python_obeys_the_rules() -> None:
    values: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"sources": [{"name": "s", "type": "jsonl", "task": "t"}]},
        "tasks": {"t": {}},
        "stages": [{"name": "rl", "steps": 1, "groups_per_step": 1, "algorithm": "grpo"}],
    }
    assert RunConfig(**values).stages[0].algorithm.type == "grpo"
    with pytest.raises(ValidationError, match="names the task 't'"):
        RunConfig(**(values | {"tasks": {"u": {}}}))


def test_config_is_closed_to_unknown_fields() -> None:
    class Node(Config):
        known: int = 1

    with pytest.raises(ValidationError, match="Extra inputs"):
        Node.model_validate({"unknown": 1})
