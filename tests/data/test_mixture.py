"""Mixtures and curricula: proportions, exact resume, what changed since a state was saved, and what rewards do."""

import json
import math
import random
from collections import Counter

import pytest
from pydantic import ValidationError

from relax.config.base import check_rules
from relax.core.error import DataError
from relax.core.message import PromptKey
from relax.data.config import LearnabilityConfig
from relax.data.curriculum import Learnability
from relax.data.mixture import Mixture, build_streams
from relax.data.quarantine import Quarantine
from relax.data.stream import PromptRules
from tests.data.toy import char_renderer, problems, source_config, write_lines

RULES = PromptRules(max_prompt_tokens=64)
HALF, NONE, ALL = [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]


def mixture(weights, seed=0, counts=None, accept=False, curriculum=None, quarantine=None):
    """A mixture of generators of 7 problems, or as many as `counts` says, by name."""
    configs = [
        source_config(
            name=name, type="generator", function="tests.data.toy:numbered", args={"count": (counts or {}).get(name, 7)}
        )
        for name in weights
    ]
    streams = build_streams(
        configs,
        renderer=char_renderer(),
        rules=RULES,
        quarantine=quarantine or Quarantine(),
        seed=seed,
        accept_changes=accept,
    )
    return Mixture(streams, weights, curriculum=curriculum, accept_changes=accept)


def take(source, count):
    return [next(source) for _ in range(count)]


def names(prompts):
    return [prompt.key.source for prompt in prompts]


def saved(source):
    return json.loads(json.dumps(source.state()))


# --- proportions -----------------------------------------------------------------------------------------------------


def test_weights_hold_in_every_window():
    found = names(take(mixture({"a": 3, "b": 1, "c": 1}), 50))
    for start in range(46):
        window = found[start : start + 5]
        assert (window.count("a"), window.count("b"), window.count("c")) == (3, 1, 1)
    assert found[:5] == ["a", "b", "a", "c", "a"]


@pytest.mark.parametrize("weights", [{"a": 1e-9, "b": 1e9}, {"a": 0.1, "b": 0.2, "c": 0.7}, {"a": 5e-324, "b": 1}])
def test_shares_are_right_within_one_prompt_for_any_weights(weights):
    total = sum(weights.values())
    source, counts = mixture(weights), Counter()
    for drawn in range(1, 301):
        counts[next(source).key.source] += 1
        assert all(abs(counts[name] - drawn * weight / total) < 1 for name, weight in weights.items())


def test_sources_have_unique_names_and_positive_weights():
    config = source_config(path="a.jsonl")
    with pytest.raises(DataError, match="toy names more than one source"):
        build_streams([config, config], renderer=char_renderer(), rules=RULES, quarantine=Quarantine(), seed=0)
    for weight in (0, -1, math.inf, math.nan):
        with pytest.raises(DataError, match="positive weights"):
            Mixture({"a": mixture({"a": 1})}, {"a": weight})


def test_a_source_without_usable_records_stops_the_run_with_its_reasons(tmp_path):
    config = source_config(name="bad", path=str(write_lines(tmp_path / "a.jsonl", "{", "{")))
    good = source_config(name="good", path=str(write_lines(tmp_path / "b.jsonl", *problems(2))))
    streams = build_streams([config, good], renderer=char_renderer(), rules=RULES, quarantine=Quarantine(), seed=0)
    with pytest.raises(DataError, match=r"source 'bad': none of its 2 records can be used: 2 x broken JSON"):
        take(Mixture(streams, {"bad": 1, "good": 9}), 10)


# --- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curriculum", [None, LearnabilityConfig(rate=0.3)])
def test_a_mixture_resumes_exactly_at_every_point(curriculum):
    weights, counts = {"a": 0.7, "b": 0.2, "c": 0.1}, {"b": 2, "c": 1}

    def make():
        return mixture(weights, counts=counts, curriculum=curriculum)

    def draw(source, count, choose):
        found = []
        for _ in range(count):
            found.append(next(source))
            source.observe(found[-1].key, [float(choose.random() < 0.5) for _ in range(4)])
        return found

    whole = make()
    choose = random.Random(1)
    states = []
    expected = []
    for _ in range(60):
        states.append((saved(whole), choose.getstate()))
        expected += draw(whole, 1, choose)
    for cut in range(40):
        resumed, choose = make(), random.Random()
        resumed.restore(states[cut][0])
        choose.setstate(states[cut][1])
        assert draw(resumed, 20, choose) == expected[cut : cut + 20]


def test_the_size_of_a_state_does_not_grow():
    source = mixture({"a": 1, "b": 2}, curriculum=LearnabilityConfig())
    sizes = []
    for _ in range(300):
        source.observe(next(source).key, HALF)
        sizes.append(len(json.dumps(source.state())))
    assert max(sizes[100:]) <= max(sizes[:100]) + 40


def test_restored_twice_or_after_use_is_the_same():
    source = mixture({"a": 1, "b": 2})
    take(source, 5)
    state = saved(source)
    expected = take(source, 9)
    again = mixture({"a": 1, "b": 2})
    for used in (0, 4):
        take(again, used)
        again.restore(state)
    assert take(again, 9) == expected


@pytest.mark.parametrize("key", ["sources", "credits", "weights", "curriculum"])
def test_a_state_that_lacks_a_part_is_refused(key):
    state = saved(mixture({"a": 1}))
    del state[key]
    with pytest.raises(DataError, match=f"the saved state of the data lacks {key}"):
        mixture({"a": 1}).restore(state)


@pytest.mark.parametrize(
    ("weights", "curriculum", "message"),
    [
        ({"a": 1}, None, r"there were the sources \['a', 'b'\], now \['a'\]"),
        ({"a": 1, "b": 2, "c": 1}, None, r"now \['a', 'b', 'c'\]"),
        ({"a": 1, "b": 3}, None, r"the weight of source 'b' was 2\.0, now 3\.0"),
        ({"a": 1, "b": 2}, LearnabilityConfig(), "the curriculum was None, now {.*learnability"),
    ],
)
def test_another_mixture_is_refused_with_what_changed(weights, curriculum, message):
    state = saved(mixture({"a": 1, "b": 2}))
    with pytest.raises(DataError, match=message) as raised:
        mixture(weights, curriculum=curriculum).restore(state)
    assert "data.accept_changes=true" in str(raised.value)


def test_accepted_weights_hold_from_the_resume_on():
    source = mixture({"a": 1, "b": 2})
    seen = {prompt.key for prompt in take(source, 10)}
    resumed = mixture({"a": 9, "b": 1}, accept=True)
    resumed.restore(saved(source))
    assert resumed.accepted == (
        "the weight of source 'a' was 1.0, now 9.0",
        "the weight of source 'b' was 2.0, now 1.0",
    )
    prompts = take(resumed, 30)
    assert Counter(names(prompts)) == {"a": 27, "b": 3}
    assert not seen & {prompt.key for prompt in prompts}


def test_an_accepted_source_begins_and_one_that_is_gone_is_kept_for_its_return():
    first = mixture({"a": 1, "b": 1})
    drawn = [prompt.key for prompt in take(first, 10)]
    second = mixture({"a": 1, "c": 1}, accept=True)
    second.restore(saved(first))
    drawn += [prompt.key for prompt in take(second, 6)]
    third = mixture({"a": 1, "b": 1, "c": 1}, accept=True)
    third.restore(saved(second))
    drawn += [prompt.key for prompt in take(third, 30)]
    assert len(set(drawn)) == len(drawn), "no prompt comes twice"
    for name in "abc":
        passes = Counter(key.pass_number for key in drawn if key.source == name)
        assert all(passes[number] == 7 for number in range(max(passes))), "and none is left out"


def test_changed_data_that_are_accepted_begin_their_next_pass():
    source = mixture({"a": 1, "b": 1})
    take(source, 10)
    changed = mixture({"a": 1, "b": 1}, counts={"b": 9}, accept=True)
    changed.restore(saved(source))
    assert changed.accepted == ()
    keys = [prompt.key for prompt in take(changed, 18)]
    assert [key.pass_number for key in keys if key.source == "a"] == [0] * 2 + [1] * 7
    assert {key.pass_number for key in keys if key.source == "b"} == {1}
    assert sorted(key.record for key in keys if key.source == "b") == list(range(9))
    [change, _] = changed._sources["b"].accepted
    assert change.startswith("source 'b': the number of records (records) was 7, now 9")


# --- curriculum ------------------------------------------------------------------------------------------------------


def observed(curriculum, name, *groups):
    for rewards in groups:
        curriculum.observe(name, rewards)
    return curriculum


def test_learnability_is_highest_where_half_succeed():
    curriculum = Learnability(LearnabilityConfig(rate=0.5, floor=0.1), ["never", "half", "always", "quarter", "unseen"])
    for name, rewards in {"never": NONE, "half": HALF, "always": ALL, "quarter": [1.0, 0, 0, 0]}.items():
        observed(curriculum, name, *[rewards] * 30)
    factors = {name: curriculum.factor(name) for name in ("never", "half", "always", "quarter", "unseen")}
    assert factors == pytest.approx({"never": 0.1, "half": 1, "always": 0.1, "quarter": 0.75, "unseen": 1})


def test_it_is_the_mean_over_groups_not_of_the_pooled_rewards():
    """A source half solved and half hopeless teaches nothing, though half of its rewards are 1."""
    curriculum = Learnability(LearnabilityConfig(rate=0.5, floor=0.1), ["mixed"])
    assert observed(curriculum, "mixed", *[NONE, ALL] * 30).factor("mixed") == 0.1


def test_the_running_mean_by_hand():
    curriculum = Learnability(LearnabilityConfig(rate=0.25, low=-1, high=1), ["a"])
    observed(curriculum, "a", [-1.0, 1.0, 1.0, 1.0])  # p = 3/4: 4p(1-p) = 3/4
    assert curriculum.factor("a") == 1 + 0.25 * (0.75 - 1)
    observed(curriculum, "a", [0.0, 9.0, -9.0])  # p = 1/2, clipped
    assert curriculum.factor("a") == pytest.approx(0.9375 + 0.25 * (1 - 0.9375))


@pytest.mark.parametrize(("name", "rewards"), [("a", []), ("a", [math.nan, math.inf]), ("gone", [0.0])])
def test_what_says_nothing_changes_nothing(name, rewards):
    curriculum = Learnability(LearnabilityConfig(), ["a"])
    before = curriculum.state()
    curriculum.observe(name, rewards)
    assert curriculum.state() == before


def test_a_mixture_draws_what_is_learnable_and_comes_back_to_the_rest():
    source = mixture({"easy": 1, "hard": 1, "right": 1}, curriculum=LearnabilityConfig(rate=0.3, floor=0.1))
    rewards = {"easy": ALL, "hard": NONE, "right": HALF}
    for _ in range(200):
        key = next(source).key
        source.observe(key, rewards[key.source])
    assert Counter(names(take(source, 120))) == {"easy": 10, "hard": 10, "right": 100}
    rewards["hard"] = HALF
    for _ in range(200):
        key = next(source).key
        source.observe(key, rewards[key.source])
    assert Counter(names(take(source, 105))) == {"easy": 5, "hard": 50, "right": 50}


def test_without_a_curriculum_rewards_change_nothing():
    quiet, told = mixture({"a": 1, "b": 2}), mixture({"a": 1, "b": 2})
    for _ in range(20):
        key = next(quiet).key
        assert next(told).key == key
        told.observe(key, [0.0])
        told.observe(PromptKey("gone", 0, 0), [1.0])
    assert quiet.state() == told.state()


def test_an_accepted_curriculum_begins_anew():
    source = mixture({"a": 1, "b": 1}, curriculum=LearnabilityConfig(rate=0.5))
    for _ in range(20):
        source.observe(PromptKey("a", 0, 0), NONE)
    assert source.weights()["a"] == 0.1
    for curriculum, expected in (
        (LearnabilityConfig(rate=0.25), 1.0),
        (None, 1.0),
        (LearnabilityConfig(rate=0.5), 0.1),
    ):
        resumed = mixture({"a": 1, "b": 1}, curriculum=curriculum, accept=True)
        resumed.restore(saved(source))
        assert resumed.weights()["a"] == expected


@pytest.mark.parametrize("values", [{"rate": 0}, {"rate": 1.5}, {"floor": 0}, {"low": 1.0}, {"high": math.inf}])
def test_configuration_is_checked(values):
    with pytest.raises(ValidationError):
        check_rules(LearnabilityConfig(**values))
