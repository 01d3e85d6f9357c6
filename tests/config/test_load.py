"""Reading, merging, overriding, refusing with everything at once, and writing what reads back the same."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.config.document import MAX_DEPTH, read_yaml, write_yaml
from relax.config.load import dump_config, load_config
from relax.config.tree import RunConfig
from relax.core.error import ConfigError

pytestmark = pytest.mark.usefixtures("tables")


def problems_of(paths: list[Path], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(paths, overrides)
    return caught.value.problems


def write(folder: Path, text: str, name: str = "extra.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# --- YAML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("4E3", 4e3),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("12", 12),
        ("010", 10),
        ("0x10", 16),
        ("1_000", 1000),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-5'", "1e-5"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("[a, 1]", ["a", 1]),
    ],
)
def test_scalar_is_read_as_yaml_1_2_does(text: str, value: Any) -> None:
    read = read_yaml(f"key: {text}", "x").values["key"]
    assert read == value
    assert type(read) is type(value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON, max_size=4))
def test_written_yaml_reads_back_the_same(values: dict[str, Any]) -> None:
    assert repr(read_yaml(write_yaml(values), "x").values) == repr(values)


@pytest.mark.parametrize(
    "text", ["1e-5", "1e5", "0o17", "no", "~", "null", "<<", "=", "12:30", "1_0", ".5", "", " a", "a: b", "#"]
)
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert read_yaml(write_yaml({"key": text, text: 1}), "x").values == {"key": text, text: 1}


def test_duplicate_keys_are_all_listed_with_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "run: {seed: 1}\nmodel:\n  path: a\n  path: b\nrun: {seed: 2}\n")
    assert problems_of([path]) == [
        f"{path}:4: duplicate key 'path', first given in line 3; remove one",
        f"{path}:5: duplicate key 'run', first given in line 1; remove one",
    ]


def test_anchors_and_merge_keys_are_not_duplicates() -> None:
    document = read_yaml("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}\nc: {<<: *x, q: 4}\n", "x")
    assert document.values == {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 3}, "c": {"p": 1, "q": 4}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1", ":1: not valid YAML"),
        ("- 1", ": the document is a list, but should be a mapping"),
        ("a: &q [*q]", ":1: an alias that contains itself"),
        ("a: !!python/object:os.x {}", ":1: the tag"),
        ("a: !thing 1", ":1: not valid YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 1", ":2: not valid YAML"),
        ("1: a", ":1: the key '1' should be a string; quote it"),
        ("? [a]\n: 1", "should be a string"),
        ("a: \x07", ": not valid YAML: unacceptable character"),
    ],
)
def test_unusable_document_is_refused_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    problems = problems_of([path])
    assert len(problems) == 1
    assert problems[0].startswith(str(path))
    assert problem in problems[0]


@pytest.mark.parametrize(
    "text",
    ["model: " + "[" * 2000 + "]" * 2000, "a: " * 2000, "model: " + "[" * 2000],
)
def test_deep_document_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    assert problems_of([path])[0].startswith(f"{path}:1: ")


def test_depth_has_a_bound_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, "model: " + "[" * 2000 + "]" * 2000)
    assert problems_of([path]) == [f"{path}:1: not valid YAML: it is nested more than {MAX_DEPTH} levels deep"]
    path = write(tmp_path, "model: {path: &a " + "[" * 40 + "]" * 40 + "}\ndata: " + "[" * 40 + "*a" + "]" * 40)
    assert problems_of([path])[0].endswith(f"it is nested more than {MAX_DEPTH} levels deep")
    assert "nested more than" in problems_of([write(tmp_path, "")], "model=" + "[" * 2000 + "]" * 2000)[0]
    assert "2001 keys in its path" in problems_of([write(tmp_path, "")], "model" + ".a" * 2000 + "=1")[0]


def test_aliases_that_stand_for_too_much_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "more than 100,000 values" in problems_of([write(tmp_path, "\n".join(lines))])[0]


def test_merge_keys_that_are_merged_again_and_again_stay_small() -> None:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], z{n}: {n}}}" for n in range(1, 60)]
    values = read_yaml("\n".join(lines), "x").values
    assert len(values["a59"]) == 61


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    absent = tmp_path / "absent.yaml"
    broken = write(tmp_path, "a: 1\na: 2")
    assert problems_of([absent, tmp_path, broken]) == [
        f"{absent}: there is no such configuration file; check the path",
        f"{tmp_path}: cannot be read as a configuration file: [Errno 21] Is a directory: '{tmp_path}'",
        f"{broken}:2: duplicate key 'a', first given in line 1; remove one",
    ]


def test_empty_file_changes_nothing(recipe: Path, tmp_path: Path) -> None:
    assert load_config([recipe, write(tmp_path, "")]) == load_config([recipe])


# --- merging ---------------------------------------------------------------------------------------------------------


def test_files_merge_left_to_right(recipe: Path, tmp_path: Path) -> None:
    second = write(tmp_path, "run: {name: second}\ntraining: {optimizer: {lr: 1e-3}, grad_clip: null}\n", "second.yaml")
    third = write(tmp_path, "run: {name: third}\n", "third.yaml")
    config = load_config([recipe, second, third])
    assert (config.run.name, config.run.seed) == ("third", 3)
    assert config.training.optimizer.model_dump() == {"type": "adamw", "lr": 1e-3, "betas": (0.9, 0.95)}
    assert config.training.grad_clip is None


def test_lists_are_replaced(recipe: Path, tmp_path: Path) -> None:
    second = write(tmp_path, "stages: [{name: only, steps: 1, groups_per_step: 2, algorithm: grpo}]\n")
    assert [stage.name for stage in load_config([recipe, second]).stages] == ["only"]


def test_mapping_merges_into_a_bare_component(recipe: Path, tmp_path: Path) -> None:
    first, second = (
        write(tmp_path, "training: {optimizer: sgd}", "first.yaml"),
        write(tmp_path, "training: {optimizer: {momentum: 0.5}}", "second.yaml"),
    )
    minimal = write(
        tmp_path, recipe.read_text().replace("training: {optimizer: {type: adamw, lr: 4e-4}}", ""), "minimal.yaml"
    )
    assert load_config([minimal, first, second]).training.optimizer.model_dump() == {
        "type": "sgd",
        "lr": 1e-2,
        "momentum": 0.5,
    }


# --- overrides -------------------------------------------------------------------------------------------------------


def test_override_reaches_every_kind_of_node(recipe: Path) -> None:
    config = load_config(
        [recipe],
        [
            "run.seed=9",
            "stages.1.steps=5",
            "stages.warm-up.steps=6",
            "training.optimizer.lr=1e-3",
            "tasks.addition.timeout_s=1.5",
            "tasks.addition.rewards.0.weight=2",
            "monitors=[console]",
            "eval.every=50",
            "stages.0.algorithm.group_size=1",
            "data.system_prompt='Answer: yes'",
        ],
    )
    assert config.run.seed == 9
    assert [stage.steps for stage in config.stages] == [6, 5]
    assert config.training.optimizer.model_dump()["lr"] == 1e-3
    assert config.tasks["addition"].timeout_s == 1.5
    assert config.tasks["addition"].rewards[0].model_dump()["weight"] == 2
    assert [monitor.type for monitor in config.monitors] == ["console"]
    assert config.eval.every == 50
    assert config.stages[0].algorithm.type == "supervised"
    assert config.data.system_prompt == "Answer: yes"


def test_override_replaces_a_node_and_the_last_one_wins(recipe: Path) -> None:
    config = load_config(
        [recipe], ["training.optimizer={type: sgd}", "training.optimizer.lr=0.5", "training.optimizer.lr=0.25"]
    )
    assert config.training.optimizer.model_dump() == {"type": "sgd", "lr": 0.25, "momentum": 0.0}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.seed", "override 'run.seed': should have the form key.path=value"),
        ("=3", "override '': should have the form"),
        ("run..seed=3", "override 'run..seed': should have the form"),
        (
            "stages.rll.steps=3",
            "override 'stages.rll.steps': stages has no item named 'rll'; did you mean 'rl'? known: warm-up, rl",
        ),
        ("stages.2.steps=3", "override 'stages.2.steps': stages has 2 items, so there is no stages.2"),
        ("run.seed.x=3", "override 'run.seed.x': run.seed is a int, which has no keys below it"),
        ("run.name=[a", "override 'run.name': not valid YAML"),
        ("run.name={a: 1, a: 2}", "override 'run.name': duplicate key 'a'"),
        ("run.sed=3", "override 'run.sed': run.sed: unknown key; did you mean 'seed'?"),
        (
            "algorithm.group_size=16",
            "algorithm: unknown key; it belongs to a stage: stages.warm-up.algorithm or stages.rl.algorithm",
        ),
    ],
)
def test_wrong_override_is_refused_by_name(recipe: Path, override: str, expected: str) -> None:
    problems = problems_of([recipe], override)
    assert len(problems) == 1
    assert expected in problems[0]


# --- everything at once ----------------------------------------------------------------------------------------------


def test_unknown_key_names_path_line_and_suggestion(recipe: Path, tmp_path: Path) -> None:
    extra = write(tmp_path, "rollout:\n  max_stalenes: 0\n")
    assert problems_of([recipe, extra]) == [
        f"{extra}:2: rollout.max_stalenes: unknown key; did you mean 'max_staleness'? known: max_staleness, over_age, "
        "max_requeues, oversample, on_load, replicas, autoscale, engine, sampling, max_context_tokens, max_trajectory_tokens"
    ]


def test_missing_key_names_its_meaning(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {}\n")
    problems = problems_of([path])
    meaning = RunConfig.model_fields["model"].annotation.model_fields["path"].description
    assert f"{path}:1: model.path: is required ({meaning}); add it" in problems
    assert {problem.split(": is required")[0] for problem in problems if "is required" in problem} == {
        f"{path}:1: model.path",
        "data",
        "tasks",
        "stages",
    }


def test_wrong_values_do_not_hide_rules_elsewhere(recipe: Path) -> None:
    problems = problems_of(
        [recipe],
        "stages.rl.steps=many",  # a wrong value in a stage ...
        "stages.rl.algorithm.clip_lo=0.1",  # ... and an unknown key of its component ...
        "stages.rl.sources=[nowhere]",  # ... do not hide the rule between that stage and the sources
        "stages.warm-up.optimizer=adam",
        "data.sources.0.task=nothing",
        "training.schedule={type: cosine, warmup_steps: 20}",  # a rule inside a component
        "run.deterministic=true",
    )
    paths = sorted(problem.removeprefix("override ").split(": ")[1] for problem in problems)
    assert paths == [
        "data.sources.0.task",
        "rollout.max_staleness",
        "stages.0.optimizer",
        "stages.1.algorithm.clip_lo",
        "stages.1.sources.0",
        "stages.1.steps",
        "training.schedule",
    ]


def test_rule_that_reads_a_wrong_value_is_not_reported(recipe: Path) -> None:
    problems = problems_of(
        [recipe],
        "run.deterministic=true",
        "rollout.max_staleness=soon",
        "rollout.sampling.max_tokens=x",
        "rollout.max_context_tokens=1",
    )
    assert sorted(problem.split(": ")[1] for problem in problems) == [
        "rollout.max_staleness",
        "rollout.sampling.max_tokens",
    ]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("stages.1=5", "stages.1"),
        ("stages=5", "stages"),
        ("tasks={'bad name': {}}", "tasks.bad name"),
        ("training.optimizer.betas=[0.9, x]", "training.optimizer.betas.1"),
        ("data.sources.0=[]", "data.sources.0"),
        ("run=3", "run"),
    ],
)
def test_value_of_the_wrong_kind_is_one_problem_and_the_rest_is_still_checked(
    recipe: Path, override: str, path: str
) -> None:
    problems = problems_of([recipe], override, "weights.keep=0")
    assert [problem.split(": ")[1] for problem in problems] == [path, "weights.keep"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.seed=true", "run.seed: is True, but should be an integer, not true or false"),
        ("run.grace_s=false", "run.grace_s: is False, but should be a number, not true or false"),
        ("training.grad_clip=true", "training.grad_clip: is True, but should be a number, not true or false"),
        (
            "stages.rl.max_staleness=false",
            "stages.1.max_staleness: is False, but should be an integer, not true or false",
        ),
        ("stages.rl.algorithm.group_size=true", "group_size: is True, but should be an integer, not true or false"),
        ("training.optimizer.betas=[true, 0.9]", "betas.0: is True, but should be a number, not true or false"),
        ("tasks.addition.rewards.0.weight=true", "weight: is True, but should be a number, not true or false"),
        ("bus.max_rows=true", "bus.max_rows: is True, but should be 'auto' or an integer, not true or false"),
        ("bus.max_bytes=true", "bus.max_bytes: could not parse value and unit from byte string"),
        ("schema=true", "schema: is 'True', but should be 1"),
        ("stages.warm-up.algorithm.group_size=true", "group_size: is 'True', but should be 1"),
        ("run.seed='12'", "run.seed: is '12', but should be an integer, written without quotes"),
        ("training.optimizer.lr='1e-5'", "lr: is '1e-5', but should be a number, written without quotes"),
        (f"run.seed={2**63}", f"but should be an integer of at most 63 bits ({2**63 - 1})"),
        (f"run.seed={10**400}", "but should be an integer of at most 63 bits"),
        ("stages.rl.steps=1e30", "stages.1.steps: is 1e+30, but should be an integer of at most 63 bits"),
        (f"training.optimizer.lr={10**400}", "but should be a number of at most 63 bits"),
        ("run.name=", "override 'run.name': run.name: is empty (null), but should be a valid string"),
    ],
)
def test_what_only_looks_like_the_value_is_refused(recipe: Path, override: str, expected: str) -> None:
    (problem,) = problems_of([recipe], override)
    assert expected in problem


def test_numbers_at_the_edge_are_accepted(recipe: Path) -> None:
    config = load_config(
        [recipe], [f"run.seed={2**63 - 1}", "stages.rl.steps=1e3", "run.grace_s=3", "bus.max_bytes='512'"]
    )
    assert (config.run.seed, config.stages[1].steps, config.run.grace_s, config.bus.max_bytes) == (
        2**63 - 1,
        1000,
        3.0,
        512,
    )


def test_wrong_value_is_shown_with_what_was_expected(recipe: Path) -> None:
    problems = problems_of([recipe], "stages.rl.steps=many", "run.deterministic=maybe", "tasks={}")
    assert sorted(problems) == [
        "override 'run.deterministic': run.deterministic: is 'maybe', but should be a valid boolean",
        "override 'stages.rl.steps': stages.1.steps: is 'many', but should be a valid integer",
        "override 'tasks': tasks: has 0 items, but should have at least 1",
    ]


# --- dumping ---------------------------------------------------------------------------------------------------------


def test_dump_reads_back_equal_with_explicit_nulls(recipe: Path, tmp_path: Path) -> None:
    config = load_config([recipe], ["training.grad_clip=null", "stages.rl.max_staleness=0"])
    text = dump_config(config)
    again = load_config([write(tmp_path, text)])
    assert again == config
    assert again.training.grad_clip is None
    assert again.stages[1].max_staleness == 0
    assert again.stages[0].max_staleness is None
    assert dump_config(again) == text
    assert "schema: 1\n" in text


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**63 - 1),
    lr=st.floats(min_value=1e-300, max_value=1e300),
    grace=st.floats(0, 1e9),
    prompt=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    template=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON, max_size=3),
    clip=st.none() | st.floats(1e-3, 1e3),
    staleness=st.none() | st.integers(0, 9),
    size=st.integers(1, 2**50),
)
def test_any_tree_survives_dump_and_load(tmp_path_factory: pytest.TempPathFactory, **value: Any) -> None:
    config = RunConfig.model_validate(
        {
            "run": {"seed": value["seed"], "grace_s": value["grace"]},
            "model": {"path": "m"},
            "data": {
                "sources": [{"name": "s", "type": "jsonl", "task": "t"}],
                "system_prompt": value["prompt"],
                "chat_template_args": value["template"],
            },
            "tasks": {"t": {}},
            "stages": [
                {
                    "name": "rl",
                    "steps": 1,
                    "groups_per_step": 1,
                    "algorithm": "grpo",
                    "max_staleness": value["staleness"],
                }
            ],
            "training": {"optimizer": {"type": "adamw", "lr": value["lr"]}, "grad_clip": value["clip"]},
            "bus": {"max_bytes": value["size"]},
        }
    )
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config([path]) == config


def test_secrets_are_references_and_survive_a_dump(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKER_TOKEN", "hunter2")
    config = load_config([recipe], ["monitors=[{type: tracker, token: env:TRACKER_TOKEN}]"])
    text = dump_config(config)
    assert "token: env:TRACKER_TOKEN" in text
    assert "hunter2" not in text + repr(config)
    again = load_config([write(tmp_path, text)])
    assert again == config
    assert again.monitors[0].token.reveal() == "hunter2"  # type: ignore[attr-defined]


def test_core_and_config_load_without_torch(recipe: Path) -> None:
    code = "import sys, relax.config.load, relax.config.reference; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "[]\n"
