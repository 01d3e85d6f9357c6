"""What `relax show group` knows of a group."""

from pathlib import Path

import pytest

from relax.core.error import UserError
from relax.services.ledger import Ledger, TrajectoryRow
from relax.services.show import EvaluationView, GroupView, read_group
from tests.services.story import STEPS, write_story


@pytest.fixture
def ledger(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    write_story(ledger)
    yield ledger
    ledger.close()


def group(ledger: Ledger, id: str) -> GroupView:
    view = read_group(ledger, id)
    assert isinstance(view, GroupView)
    return view


def test_a_trained_group_says_why_it_got_its_advantages_and_which_versions_made_it(ledger: Ledger) -> None:
    view = group(ledger, "g000050")
    assert (view.stage, view.source, view.record, view.task) == ("rl", "add", 50, "addition")
    assert (view.base, view.deadline, view.state, view.step) == (23, 24, "trained", 24)
    assert (view.prompt, view.reference) == ("user: 07+45=", "250")
    assert view.reward_mean == 0.5
    assert view.reward_std == pytest.approx(0.7071, abs=1e-4)
    right, wrong = view.trajectories
    assert (right.reward, right.text, right.versions, right.staleness) == (1.0, "250", ((23, 4),), 1)
    assert (wrong.reward, wrong.text, wrong.versions, wrong.staleness) == (0.0, "[251]", ((23, 3), (24, 1)), 1)
    assert right.parts[0]["name"] == "exact"
    assert [sample.advantage for t in view.trajectories for sample in t.samples] == [0.7, -0.7]


@pytest.mark.parametrize("id", ["g000050", "g000050/1", "g000050/1/0", " g000050 "])
def test_any_id_inside_a_group_names_it(ledger: Ledger, id: str) -> None:
    assert group(ledger, id).id == "g000050"


@pytest.mark.parametrize("id", ["g000050/99", "g000050/1/7", "g000050/", "g000050/x", "e000000/99"])
def test_an_id_that_no_part_of_a_group_has_is_refused_with_those_there_are(ledger: Ledger, id: str) -> None:
    group_id = id[:7]
    with pytest.raises(UserError, match=f"group {group_id} holds nothing with the id '{id}'; it holds {group_id}/0"):
        read_group(ledger, id)


def test_a_filtered_group_has_a_reason_and_no_step(ledger: Ledger) -> None:
    view = group(ledger, "g000042")
    assert (view.state, view.reason, view.step, view.reward_std) == ("filtered", "zero_signal", None, 0.0)
    assert [t.staleness for t in view.trajectories] == [None, None]


def test_a_supervised_group_has_no_rewards_and_no_versions(ledger: Ledger) -> None:
    view = group(ledger, "g000000")
    assert (view.reward_mean, view.reward_std) == (None, None)
    assert (view.trajectories[0].reward, view.trajectories[0].versions) == (None, ())


def test_siblings_past_the_ninth_stay_in_order_and_apart(ledger: Ledger) -> None:
    rows = [TrajectoryRow(f"g000050/{n}", 1, float(n), "[]", None, "done", 1, "", "") for n in range(2, 12)]
    ledger.write(rows, {}, {})
    assert [t.id for t in group(ledger, "g000050").trajectories] == [f"g000050/{n}" for n in range(12)]


def test_an_evaluation_group_is_shown_too(ledger: Ledger) -> None:
    view = read_group(ledger, "e000002")
    assert isinstance(view, EvaluationView)
    assert (view.set_name, view.samples[0]["failure"]) == ("heldout", "timeout")


@pytest.mark.parametrize("id", ["g000999", "g7", "nonsense", "", "e999999", "g00x"])
def test_an_unknown_id_is_refused_with_ids_that_exist(ledger: Ledger, id: str) -> None:
    with pytest.raises(UserError) as refusal:
        read_group(ledger, id)
    examples = str(refusal.value).split("try one of ")[1].split(", ")
    assert {"g000000", "g000042"} <= {*examples}
    for example in examples:
        assert read_group(ledger, example).id == example


def test_a_group_under_way_is_told_from_one_that_never_was(ledger: Ledger) -> None:
    account = dict(ledger.note("account"))
    ledger.write([], {}, {"account": {**account, "admitted": 130, "outstanding": 6}})
    with pytest.raises(UserError, match="g000127 was admitted and has not ended yet"):
        read_group(ledger, "g000127")


def test_an_empty_ledger_says_so(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "empty.sqlite")
    with pytest.raises(UserError, match="no group that has ended yet"):
        read_group(ledger, f"g{STEPS:06d}")
    ledger.close()
