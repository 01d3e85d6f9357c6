"""What may change when a run goes on, and what is said about it (B5, B8, ST8)."""

from pathlib import Path

import pytest

from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.services.change import RULES, STAGE_RULES, Changes, Progress, differences, judge
from tests.services.story import write_recipe

IN_RL = Progress(30, 1)


def judged(folder: Path, *overrides: str, progress: Progress = IN_RL) -> Changes:
    recipe = write_recipe(folder)
    return judge(load_config([recipe]), load_config([recipe], overrides), progress)


def changed(folder: Path, old: str, new: str, progress: Progress = IN_RL) -> Changes:
    """The recipe with a part of its text replaced."""
    recipe = write_recipe(folder)
    before, text = load_config([recipe]), recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new))
    return judge(before, load_config([recipe]), progress)


def test_nothing_changed(tmp_path: Path) -> None:
    assert judged(tmp_path) == Changes((), ())


@pytest.mark.parametrize(
    "override",
    [
        "monitors=[]", "eval.every=3", "eval.sets=[]", "training.checkpoint.every=7", "training.checkpoint.keep_best={metric: train/loss}",
        "rollout.replicas=3", "rollout.engine.slots=9", "run.grace_s=1", "run.samples.every=1", "run.timeline.every=0",
        "weights.keep=5", "bus.max_bytes=3GiB", "training.microbatch_tokens=512", "stages.rl.filter.max_per_step=3",
        "runtime.threads_per_role=2", "tasks.addition.timeout_s=5",
    ],
)  # fmt: skip
def test_these_change_without_another_word(override: str, tmp_path: Path) -> None:
    changes = judged(tmp_path, override)
    assert changes.refused == ()
    assert changes.allowed
    assert not any("(" in line.split(" -> ")[1] for line in changes.allowed if "[" not in line)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("stages.rl.steps=50", "stages.rl.steps: 40 -> 50 (a schedule that falls now ends with the new last step)"),
        ("stages.rl.groups_per_step=4", "stages.rl.groups_per_step: 2 -> 4 (groups in flight that no longer fit are made again)"),
        ("rollout.max_staleness=0", "rollout.max_staleness: 1 -> 0 (groups in flight that no longer fit are made again)"),
        (
            "training.optimizer.lr=1e-3",
            "training.optimizer.lr: 1e-05 -> 0.001 (it takes effect with the next step; the optimizer's state goes on)",
        ),
        ("stages.rl.algorithm.clip_high=0.3", "stages.rl.algorithm.clip_high: 0.28 -> 0.3 (the loss is another one from here on)"),
    ],
)  # fmt: skip
def test_these_change_and_what_follows_is_said(override: str, line: str, tmp_path: Path) -> None:
    assert judged(tmp_path, override) == Changes((line,), ())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.seed=1", "run.seed: 0 -> 1 (every random choice"),
        ("run.name=other", "run.name: story -> other (the run is in this folder"),
        ("model.path=elsewhere", "(checkpoints hold this model"),
        ("data.max_prompt_tokens=64", "data.max_prompt_tokens: 32 -> 64 (the place in the data"),
        ("data.sources.add.args={digits: 3}", "data.sources.add.args"),
        ("data.sources.add.weight=2", "data.sources.add.weight: 1.0 -> 2.0 (the place in the data"),
        ("rollout.sampling.temperature=0.7", "rollout.sampling.temperature: 1.0 -> 0.7 (tokens in flight"),
        ("stages.rl.algorithm.group_size=4", "stages.rl.algorithm.group_size: 2 -> 4 (the groups in flight"),
        ("stages.rl.algorithm={type: dapo, group_size: 2}", "stages.rl.algorithm.type: grpo -> dapo"),
        ("stages.rl.algorithm.kl_weight=0.1", "the policy that the stage began with was not kept"),
        ("stages.rl.sources=[add]", "stages.rl.sources"),
        ("stages.rl.steps=5", "it would end at step 25, but step 30 is reached"),
        ("stages.warm-up.steps=30", "stages.warm-up.steps: 20 -> 30 (the stage has ended)"),
        ("stages.rl.optimizer={type: sgd}", "stage rl: optimizer adamw -> sgd"),
        ("training.optimizer={type: sgd}", "stage rl: optimizer adamw -> sgd"),
    ],
)  # fmt: skip
def test_these_are_refused_and_why(override: str, words: str, tmp_path: Path) -> None:
    assert words in "\n".join(judged(tmp_path, override).refused)


def test_too_few_steps_are_refused_once_and_not_called_allowed(tmp_path: Path) -> None:
    assert judged(tmp_path, "stages.rl.steps=5").allowed == ()


def test_a_stage_does_not_end_at_the_step_that_is_reached_while_groups_are_in_flight(tmp_path: Path) -> None:
    in_flight = judged(tmp_path, "stages.rl.steps=10", progress=Progress(30, 1, num_outstanding=4))
    assert in_flight.refused == (
        "stage rl: it would end at step 30, the step that is reached, with 4 groups in flight",
    )
    assert judged(tmp_path, "stages.rl.steps=10", progress=Progress(30, 1)).refused == ()
    assert judged(tmp_path, "stages.rl.steps=11", progress=Progress(30, 1, num_outstanding=4)).refused == ()


def test_what_no_rule_knows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import relax.services.change as module

    monkeypatch.setattr(module, "RULES", tuple(rule for rule in RULES if rule.path != "eval"))
    assert "nothing is known of what would follow" in judged(tmp_path, "eval.every=3").refused[0]


def test_a_stage_that_has_not_begun_changes_freely(tmp_path: Path) -> None:
    changes = judged(
        tmp_path, "stages.rl.algorithm={type: dapo, group_size: 8}", "stages.rl.steps=5", progress=Progress(10, 0)
    )
    assert changes.refused == ()
    assert any("stages.rl.algorithm.group_size: 2 -> 8" in line for line in changes.allowed)


RL = "  - {name: rl, steps: 40, groups_per_step: 2, algorithm: {type: grpo, group_size: 2}}\n"
MORE = RL.replace("rl", "more")


def test_stages_come_and_go_behind_those_that_have_begun(tmp_path: Path) -> None:
    added = changed(tmp_path, RL, RL + MORE)
    assert (len(added.allowed), added.refused) == (1, ())
    assert added.allowed[0].startswith("stages.more: absent -> {'name': 'more'")
    assert "stages.more" in changed(tmp_path, RL, MORE + RL).refused[0]
    assert "stages.rl" in "".join(changed(tmp_path, RL, MORE).refused)
    assert changed(tmp_path, RL, MORE, Progress(10, 0)).refused == ()
    warm = "  - {name: warm-up, steps: 20, groups_per_step: 2, algorithm: {type: supervised}}\n"
    assert "stages.order" in changed(tmp_path, warm + RL, RL + warm).refused[0]


def test_a_source_that_went_came_or_moved_is_refused(tmp_path: Path) -> None:
    source = '{name: add, type: generator, function: "relax.data.arithmetic:addition", task: addition}'
    other = source.replace("name: add", "name: other")
    for new in (f"{source}, {other}", other):
        refused = changed(tmp_path, f"sources: [{source}]", f"sources: [{new}]").refused
        assert any(line.startswith("data.sources.other: absent -> ") for line in refused)


def test_case_b5_other_data_is_gone_on_with_only_when_that_is_asked_for(tmp_path: Path) -> None:
    changes = judged(tmp_path, "data.sources.add.weight=2", "data.accept_changes=true")
    assert changes.refused == ()
    assert changes.allowed == (
        "data.sources.add.weight: 1.0 -> 2.0 (data.accept_changes is on: the run goes on with the data that there are now)",
        "data.accept_changes: False -> True",
    )


def test_items_of_lists_go_by_their_names(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    before = load_config([recipe])
    recipe.write_text(recipe.read_text().replace(RL, RL + MORE))
    both = load_config([recipe])
    recipe.write_text(recipe.read_text().replace(RL + MORE, MORE + RL))
    assert [str(d) for d in differences(both, load_config([recipe]))] == [
        "stages.order: ['warm-up', 'rl', 'more'] -> ['warm-up', 'more', 'rl']"
    ]
    assert [d.path for d in differences(before, both)] == [("stages", "more")]


def test_without_anything_saved_all_may_change_but_the_place(tmp_path: Path) -> None:
    changes = judged(tmp_path, "run.seed=1", "model.path=x", "stages.rl.steps=1", "run.name=b", progress=Progress(None))
    assert len(changes.allowed) == 3
    assert changes.refused == ("run.name: story -> b (the run is in this folder; to rename it move the folder)",)


def test_every_rule_of_a_section_names_one_that_there_is() -> None:
    for rule in RULES:
        assert rule.path.split(".")[0] in {field.alias or name for name, field in RunConfig.model_fields.items()}
        assert rule.verdict == "free" or rule.why
    assert all(rule.verdict == "free" or rule.why for rule in STAGE_RULES)


def test_every_section_has_a_rule() -> None:
    known = {rule.path for rule in RULES} | {"stages"}
    assert {field.alias or name for name, field in RunConfig.model_fields.items()} <= known
