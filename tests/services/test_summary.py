"""The summary of a run, read from its ledger, and what it writes."""

import json
from pathlib import Path

import pytest

from relax.config.tree import RunConfig
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger
from relax.services.outline import outline_of
from relax.services.summary import stopped_path, summarize, write_summary
from tests.services.story import STEPS, WARM_UP, heldout_at, reward_at, story_config, story_directory, write_story


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return story_config(tmp_path)


@pytest.fixture
def directory(config: RunConfig) -> RunDirectory:
    return story_directory(config)


@pytest.fixture
def ledger(directory: RunDirectory):
    ledger = Ledger(directory.ledger)
    yield ledger
    ledger.close()


def test_a_finished_run_is_summed_up(config: RunConfig, directory: RunDirectory, ledger: Ledger) -> None:
    write_story(ledger)
    summary = write_summary(config, directory, ledger, {"warm-up": 11.0, "rl": 90.0}, stopped=False)
    assert json.loads(directory.summary.read_text()) == summary
    assert (summary["run"], summary["version"], summary["steps"]) == ("story", "0.1.0", STEPS)
    assert summary["seconds"] == {"warm-up": 11.0, "rl": 90.0, "total": 101.0}
    assert summary["eval/initial"] == {"heldout": heldout_at(WARM_UP)}
    assert summary["eval/final"] == {"heldout": heldout_at(STEPS)}
    assert summary["staleness/max"] == 1
    assert summary["tokens_per_s"] == pytest.approx(sum(1000 + step for step in range(20, 60)) / 40)
    assert summary["idle"] == {"engine-0": pytest.approx(0.25), "trainer": pytest.approx(0.4)}
    assert summary["logprob_gap"]["mean"] == pytest.approx(1e-7)
    assert summary["logprob_gap"]["max"] == pytest.approx(2e-6 + 59e-8)
    assert summary["logprob_gap"]["by_age"] == {"0": pytest.approx(1e-7), "1": pytest.approx(3e-7)}
    assert summary["reward"]["first"] == pytest.approx(sum(map(reward_at, range(20, 30))) / 10)
    assert summary["reward"]["last"] == pytest.approx(sum(map(reward_at, range(50, 60))) / 10)
    assert summary["ledger"] == {
        "admitted": 124, "trained": 120, "filtered": 4, "failed": 0, "dropped": 0, "outstanding": 0,
        "reasons": {"filtered(zero_signal)": 4}, "balances": True,
    }  # fmt: skip
    assert directory.curve.read_bytes().startswith(b"\x89PNG")


def test_seconds_of_earlier_processes_count(config: RunConfig, ledger: Ledger) -> None:
    """The ledger knows 10 s and 80 s of steps; this process spent 30 s on the end of the second stage."""
    write_story(ledger)
    summary = summarize(outline_of(config), ["heldout"], ledger, {"rl": 30.0})
    assert summary["seconds"] == {"warm-up": 10.0, "rl": 80.0, "total": 90.0}


def test_a_stopped_run_is_summed_up_aside_and_may_go_on(
    config: RunConfig, directory: RunDirectory, ledger: Ledger
) -> None:
    write_story(ledger, 30)
    summary = write_summary(config, directory, ledger, {}, stopped=True)
    assert summary["steps"] == 30
    assert not directory.is_finished
    assert json.loads(stopped_path(directory).read_text()) == summary
    write_summary(config, directory, ledger, {}, stopped=False)
    assert directory.is_finished
    assert not stopped_path(directory).exists()


def test_a_run_without_steps_has_absent_values_not_zeros(config: RunConfig, ledger: Ledger) -> None:
    summary = summarize(outline_of(config), ["heldout"], ledger, {})
    assert summary["steps"] == 0
    assert summary["seconds"] == {"total": 0}
    for name in ("staleness/max", "tokens_per_s"):
        assert summary[name] is None
    for name in ("eval/initial", "eval/final", "reward", "idle", "logprob_gap"):
        assert summary[name] == {}
    assert summary["ledger"]["balances"]


def test_a_supervised_run_has_no_initial_evaluation_and_no_rates(config: RunConfig, ledger: Ledger) -> None:
    write_story(ledger, 10)
    summary = summarize(outline_of(config), ["heldout"], ledger, {})
    assert summary["eval/initial"] == {}
    assert summary["eval/final"] == {"heldout": heldout_at(10)}
    assert (summary["tokens_per_s"], summary["idle"], summary["reward"]) == (None, {}, {})


def test_values_that_are_not_numbers_are_left_out(config: RunConfig, ledger: Ledger) -> None:
    write_story(ledger)
    ledger.write([], {59: {"reward/mean": float("nan"), "policy/logprob_gap_max": float("inf")}}, {})
    summary = summarize(outline_of(config), ["heldout"], ledger, {})
    assert summary["reward"]["last"] == pytest.approx(sum(map(reward_at, range(49, 59))) / 10)
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize("what", ["account", "step", "rows"])
def test_rule_ac1_an_account_that_does_not_balance_is_seen(config: RunConfig, ledger: Ledger, what: str) -> None:
    write_story(ledger)
    account = dict(ledger.note("account"))
    reasons = account.pop("reasons")
    if what == "account":
        ledger.write([], {}, {"account": {**account, "admitted": 125, "reasons": reasons}})
    elif what == "step":
        ledger.write([], {33: {"ledger/trained": 1.0}}, {})
    else:
        ledger.write([], {}, {"account": {**account, "admitted": 125, "trained": 121, "reasons": reasons}})
    assert not summarize(outline_of(config), [], ledger, {})["ledger"]["balances"]


def test_the_numbers_are_safe_when_the_curve_cannot_be_written(
    config: RunConfig, directory: RunDirectory, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    write_story(ledger)
    directory.curve.mkdir()
    assert write_summary(config, directory, ledger, {}, stopped=False)["steps"] == STEPS
    assert directory.is_finished
    assert "cannot write" in caplog.text
