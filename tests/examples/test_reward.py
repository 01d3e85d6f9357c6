"""The example of an own reward works alone, and through a recipe in the process pool."""

from collections.abc import Callable
from itertools import islice

import pytest

from examples.reward.claim import claims
from examples.reward.digit_share import digit_share
from relax.config.tree import RunConfig
from relax.core.message import Prompt, PromptKey, text_message
from relax.core.trajectory import Trajectory, Turn
from relax.runtime.pool import ProcessPool
from relax.tasks.score import score
from relax.tasks.table import REWARDS


@pytest.mark.parametrize(
    ("response", "reference", "expected"),
    [("250", "250", 1.0), ("259", "250", 2 / 3), ("", "250", 0.0), ("2500", "250", 0.75), ("", "", 0.0)],
)
def test_digits_in_place_count(response: str, reference: str, expected: float) -> None:
    assert digit_share(response, reference) == pytest.approx(expected)


async def test_a_recipe_names_it_by_path(overlay: Callable[[str], RunConfig], pool: ProcessPool) -> None:
    nodes = overlay("reward/digit_share.yaml").tasks["addition"].rewards
    rewards = [(node.name or node.type, node.weight, REWARDS.component(node.type)(node, pool=pool)) for node in nodes]  # type: ignore[attr-defined]
    prompt = Prompt(PromptKey("addition", 0, 0), "addition", (text_message("user", "07+45="),), "250")
    trajectory = Trajectory((), (Turn(0, 6, 10, "stop", "259"),), (), "done")
    total, parts = await score(prompt, trajectory, rewards)
    assert [(part["name"], part["value"]) for part in parts] == [("exact", 0.0), ("digit_share", pytest.approx(2 / 3))]
    assert total == pytest.approx(0.2 * 2 / 3)


def test_claims_of_a_judge_are_right_half_of_the_time_and_said_to_be() -> None:
    found = list(islice(claims(0), 2000))
    right = 0
    for record in found:
        problem, claim = record["prompt"].rstrip("#").split("=")
        total, verdict = record["reference"].split()
        first, second = map(int, problem.split("+"))
        assert int(total[::-1]) == first + second
        assert verdict == ("y" if claim == total else "n")
        right += claim == total
    assert 0.45 < right / len(found) < 0.56


def test_claims_that_are_held_out_are_of_other_sums() -> None:
    held, train = ({one["prompt"].split("=")[0] for one in claims(0, split=split)} for split in ("heldout", "train"))  # type: ignore[arg-type]
    assert held
    assert not held & train
