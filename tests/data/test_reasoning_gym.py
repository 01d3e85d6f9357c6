"""The `reasoning_gym` data set: problems, what their verifier needs, and which tasks cannot be used."""

import json

import pytest
import reasoning_gym
from pydantic import ValidationError

from relax.core.error import DataError
from relax.core.message import prompt_from_json, prompt_to_json
from relax.data import reasoning_gym as room
from relax.data.quarantine import Quarantine
from relax.data.reasoning_gym import ReasoningGymDataSet
from tests.data.toy import bpe_tokenizer, renderer_of, source_config, stream_of


def config_of(dataset="leg_counting", **values):
    return source_config(type="reasoning_gym", dataset=dataset, **{"size": 12, **values})


def prompts_of(config, count=4, **options):
    stream = stream_of(
        config, renderer=renderer_of(bpe_tokenizer(), stops=("<|im_end|>",)), max_prompt_tokens=5000, **options
    )
    return [next(stream) for _ in range(count)]


@pytest.mark.parametrize("dataset", ["leg_counting", "countdown", "basic_arithmetic"])
def test_a_prompt_carries_what_the_tasks_own_verifier_needs(dataset):
    for prompt in prompts_of(config_of(dataset)):
        prompt = prompt_from_json(json.loads(json.dumps(prompt_to_json(prompt))))
        assert set(prompt.metadata) == {"reasoning_gym"}
        task = prompt.metadata["reasoning_gym"]
        entry = task["entry"]
        assert (task["dataset"], set(task), set(entry)) == (
            dataset,
            {"dataset", "entry"},
            {"question", "answer", "metadata"},
        )
        assert prompt.messages[0].text == entry["question"]
        assert prompt.reference == entry["answer"]
        score = reasoning_gym.get_score_answer_fn(dataset)
        assert score(prompt.reference, entry) == 1.0
        assert score("nothing of the kind", entry) < 0.1


def test_a_task_whose_answer_only_the_verifier_knows_has_no_reference():
    [prompt] = prompts_of(config_of("graph_color"), count=1)
    assert prompt.reference is None
    assert prompt.metadata["reasoning_gym"]["entry"]["answer"] is None


def test_seed_settings_and_name_choose_the_problems():
    def questions(**values):
        seed = values.pop("run_seed", 0)
        return {prompt.messages[0].text for prompt in prompts_of(config_of(**values), count=12, seed=seed)}

    assert questions() == questions()
    assert len(questions()) == 12
    assert questions() != questions(config={"max_animals": 3, "min_animals": 3})
    for other in ({"run_seed": 1}, {"name": "other"}, {"seed": 0}):
        assert not questions() & questions(**other)
    assert questions(seed=5) == questions(seed=5, name="other", run_seed=1)


def test_seeds_side_by_side_share_no_problem():
    """In the package itself, problem i + 1 of a seed is problem i of the next."""
    first, second = ({p.messages[0].text for p in prompts_of(config_of(seed=seed), 12)} for seed in (0, 1))
    assert not first & second
    raw = [reasoning_gym.create_dataset("leg_counting", size=3, seed=seed) for seed in (0, 1)]
    assert raw[0][1]["question"] == raw[1][0]["question"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dataset": "leg_countin"}, "no task 'leg_countin' among its .*did you mean 'leg_counting'"),
        ({"dataset": "qqq"}, "no task 'qqq'"),
        ({"config": {"animals": 3}}, "no setting 'animals'; it has max_animals"),
        ({"config": {"seed": 3}}, "no setting 'seed'"),
        ({"config": {"min_animals": 0}}, "refuses its settings: AssertionError: min_animals must be positive"),
        ({"dataset": "codeio"}, "makes another problem each time"),
        ({"dataset": "composite"}, "a source of its own"),
    ],
)
def test_what_cannot_be_used_is_told_at_the_start(values, message):
    with pytest.raises(DataError, match=f"source 'toy': .*{message}"):
        prompts_of(config_of(**values))


def test_a_task_that_depends_on_the_hash_seed_needs_a_fixed_one(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(DataError, match="PYTHONHASHSEED"):
        len(ReasoningGymDataSet(config_of("word_ladder")))
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(DataError, match="PYTHONHASHSEED"):
        len(ReasoningGymDataSet(config_of("word_ladder")))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(ReasoningGymDataSet(config_of("word_ladder"))) == 12


def test_the_package_is_named_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(room.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'relax\[reasoning-gym\]'"):
        prompts_of(config_of())


def test_a_problem_that_cannot_be_made_is_quarantined(monkeypatch):
    task_class = reasoning_gym.factory.DATASETS["leg_counting"][0]
    made = task_class.__getitem__

    def failing(self, index):
        if index == 3:
            raise ZeroDivisionError("no animals")
        return made(self, index)

    monkeypatch.setattr(task_class, "__getitem__", failing)
    quarantine = Quarantine()
    prompts = prompts_of(config_of(), count=11, quarantine=quarantine)
    assert {prompt.key.record for prompt in prompts} == set(range(12)) - {3}
    prompts_of(config_of(), count=12, quarantine=quarantine)
    assert quarantine.reasons("toy") == {"cannot be made": 1}


@pytest.mark.parametrize("change", [{"size": 13}, {"config": {"max_animals": 5}}, {"seed": 9}])
def test_other_problems_are_another_data_set(change):
    state = stream_of(config_of()).state()
    stream_of(config_of()).restore(state)
    with pytest.raises(DataError, match="is not the data set of the saved state"):
        stream_of(config_of(**change)).restore(state)


@pytest.mark.parametrize("values", [{"size": 0}, {"dataset": ""}, {"seed": -1}, {"reference_key": "answer"}])
def test_configuration_is_checked(values):
    with pytest.raises(ValidationError):
        config_of(**values)
