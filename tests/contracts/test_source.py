"""The contract of `Source`: endless, and resumable from a JSON-ready state before and after iteration began."""

import json
from itertools import islice

import pytest

from relax.data.config import LearnabilityConfig
from relax.data.mixture import Mixture, build_streams
from relax.data.quarantine import Quarantine
from relax.data.stream import PromptRules
from tests.data.toy import (
    bpe_tokenizer,
    char_renderer,
    problems,
    renderer_of,
    source_config,
    stream_of,
    write_lines,
    write_parquet,
)


def generator_config(name="toy", **values):
    return source_config(name=name, type="generator", function="tests.data.toy:numbered", args={"count": 5}, **values)


def make_generator(_):
    return stream_of(generator_config(), seed=3)


def make_jsonl(folder):
    return stream_of(source_config(path=str(write_lines(folder / "a.jsonl", *problems(5), "{broken"))), seed=3)


def make_parquet(folder):
    records = [*problems(5), {"prompt": "", "reference": "1"}]
    return stream_of(source_config(type="parquet", path=str(write_parquet(folder / "a.parquet", records))), seed=3)


def make_datasets(folder):
    import datasets

    if not (folder / "saved").exists():
        datasets.Dataset.from_list(problems(5)).save_to_disk(folder / "saved")
    return stream_of(source_config(type="datasets", path=str(folder / "saved")), seed=3)


def make_reasoning_gym(_):
    config = source_config(type="reasoning_gym", dataset="leg_counting", size=5)
    renderer = renderer_of(bpe_tokenizer(), stops=("<|im_end|>",))
    return stream_of(config, seed=3, renderer=renderer, max_prompt_tokens=5000)


def make_mixture(_, curriculum=None):
    configs = [generator_config("a"), generator_config("b", shuffle=False)]
    streams = build_streams(configs, renderer=char_renderer(), rules=PromptRules(64), quarantine=Quarantine(), seed=3)
    return Mixture(streams, {"a": 2, "b": 1}, curriculum=curriculum)


def make_curriculum(folder):
    return make_mixture(folder, LearnabilityConfig(rate=0.5))


MAKERS = [
    make_generator,
    make_jsonl,
    make_parquet,
    make_datasets,
    make_reasoning_gym,
    make_mixture,
    make_curriculum,
]


def draw(source, count):
    """Prompts, each group's rewards told: 1 and 0 by the parity of its record."""
    found = []
    for prompt in islice(source, count):
        source.observe(prompt.key, [float(prompt.key.record % 2), 0.0])
        found.append(prompt)
    return found


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("used", [0, 1, 5, 12])
@pytest.mark.parametrize("early", [True, False])
def test_restore_goes_on_where_the_state_was_saved(make, used, early, tmp_path):
    source = make(tmp_path)
    draw(source, used)
    state = json.loads(json.dumps(source.state()))
    expected = draw(source, 20)
    resumed = make(tmp_path)
    iterator = iter(resumed)
    if not early:
        draw(resumed, 7)
    resumed.restore(state)
    assert resumed.state() == state
    assert iter(resumed) is iterator
    assert draw(resumed, 20) == expected
    assert resumed.state() == source.state()


@pytest.mark.parametrize("make", MAKERS)
def test_prompts_are_unique_and_equal_seeds_give_equal_prompts(make, tmp_path):
    prompts = draw(make(tmp_path), 40)
    assert len({prompt.key for prompt in prompts}) == 40
    assert prompts == draw(make(tmp_path), 40)


@pytest.mark.parametrize("make", MAKERS)
def test_observing_draws_nothing(make, tmp_path):
    source, other = make(tmp_path), make(tmp_path)
    [prompt] = islice(source, 1)
    before = source.state()
    source.observe(prompt.key, [])
    assert source.state() == before
    next(iter(other))
    assert list(islice(source, 5)) == list(islice(other, 5))
