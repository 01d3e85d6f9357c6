"""The contract of `Source`: endless, and resumable from a JSON-ready state before and after iteration began."""

import json
from itertools import islice

import pytest

from relax.data.mixture import Mixture, build_streams
from relax.data.quarantine import Quarantine
from relax.data.stream import PromptRules
from tests.data.toy import char_renderer, source_config, stream_of


def generator_config(name="toy", **values):
    return source_config(name=name, type="generator", function="tests.data.toy:numbered", args={"count": 5}, **values)


def make_stream():
    return stream_of(generator_config(), seed=3)


def make_mixture():
    configs = [generator_config("a"), generator_config("b", shuffle=False)]
    streams = build_streams(configs, renderer=char_renderer(), rules=PromptRules(64), quarantine=Quarantine(), seed=3)
    return Mixture(streams, {"a": 2, "b": 1})


@pytest.mark.parametrize("make", [make_stream, make_mixture])
@pytest.mark.parametrize("used", [0, 1, 5, 12])
@pytest.mark.parametrize("early", [True, False])
def test_restore_goes_on_where_the_state_was_saved(make, used, early):
    source = make()
    list(islice(source, used))
    state = json.loads(json.dumps(source.state()))
    expected = list(islice(source, 20))
    resumed = make()
    iterator = iter(resumed)
    if not early:
        list(islice(iterator, 7))
    resumed.restore(state)
    assert list(islice(iterator, 20)) == expected
    assert resumed.state() == source.state()


@pytest.mark.parametrize("make", [make_stream, make_mixture])
def test_prompts_are_unique_and_equal_seeds_give_equal_prompts(make):
    prompts = list(islice(make(), 40))
    assert len({prompt.key for prompt in prompts}) == 40
    assert prompts == list(islice(make(), 40))
