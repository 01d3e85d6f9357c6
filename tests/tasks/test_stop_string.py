"""Stop strings in an episode: the text is cut, the tokens are not, and it is no truncation."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import toy

from relax.core.completion import Completion, Sampling
from relax.core.error import EngineError
from relax.core.trajectory import Trajectory
from relax.tasks.config import SingleTurnConfig
from relax.tasks.environments.single_turn import SingleTurn
from relax.tasks.episode import run_episode


def stopped(text: str) -> Completion:
    """Ended by a stop string: the last token is an ordinary one."""
    return replace(toy.reply(text, "length"), stop_reason="stop")


async def run(environment: Any, engine: toy.Scripted, stop: tuple[str, ...], max_turns: int = 1) -> Trajectory:
    return await run_episode(
        toy.prompt(),
        environment,
        toy.ToyRenderer(),
        engine,
        Sampling(max_tokens=50, stop=stop),
        toy.sessions(),
        max_context_tokens=500,
        max_turns=max_turns,
    )


async def test_case_e10_the_text_ends_before_the_string_and_every_token_is_trained() -> None:
    engine = toy.Scripted(stopped("42 END!"))
    trajectory = await run(SingleTurn(SingleTurnConfig()), engine, ("D!", "END"))
    assert (trajectory.response, trajectory.end, trajectory.turns[0].stop_reason) == ("42 ", "done", "stop")
    (segment,) = trajectory.segments
    np.testing.assert_array_equal(segment.token_ids[segment.mask], toy.ids("42 END!"))
    assert trajectory.num_sampled == 7
    assert engine.asked[0][1].stop == ("D!", "END")


async def test_a_completion_that_ended_by_its_own_end_is_not_cut() -> None:
    trajectory = await run(SingleTurn(SingleTurnConfig()), toy.Scripted(toy.reply("4 EN")), ("END",))
    assert trajectory.response == "4 EN"


async def test_case_e10_the_budget_at_the_same_token_is_still_a_stop() -> None:
    """SkyRL#1319: what stopped is not over-long."""
    trajectory = await run(SingleTurn(SingleTurnConfig()), toy.Scripted(stopped("x" * 47 + "END")), ("END",))
    assert (trajectory.end, trajectory.response) == ("done", "x" * 47)


async def test_a_stop_without_any_of_the_strings_is_refused() -> None:
    with pytest.raises(EngineError, match=r"its text holds none of the stop strings \['END'\]"):
        await run(SingleTurn(SingleTurnConfig()), toy.Scripted(stopped("42")), ("END",))


async def test_rule_tk2_a_turn_that_was_cut_branches_the_history() -> None:
    """The next turn shows the cut text, which is not what was sampled: it gets a segment of its own."""
    environment = toy.TwoTurn()
    trajectory = await run(environment, toy.Scripted(stopped("oneEND"), stopped("twoEND")), ("END",), max_turns=2)
    assert environment.replies == ["one", "two"]
    assert trajectory.info["branches"] == 1
    assert [segment.token_ids[segment.mask].tolist() for segment in trajectory.segments] == [
        toy.ids("oneEND").tolist(),
        toy.ids("twoEND").tolist(),
    ]
