"""What every Environment does: the shipped ones, built from their default configuration by the table."""

import pytest

from relax.core.message import Prompt, PromptKey, text_message
from relax.core.protocol import Environment
from relax.tasks.table import ENVIRONMENTS

PROMPT = Prompt(PromptKey("toy", 7, 0), "task", (text_message("user", "1+1"),), "2")
MAX_TURNS = 100


@pytest.fixture(params=sorted(ENVIRONMENTS.entries))
def environment(request: pytest.FixtureRequest) -> Environment:
    config = ENVIRONMENTS.config_class(request.param)(type=request.param)
    made: Environment = ENVIRONMENTS.component(request.param)(config)
    return made


async def test_it_shows_messages_that_end_with_a_turn_to_answer(environment: Environment) -> None:
    shown = await environment.start(PROMPT)
    await environment.close()
    assert shown
    assert shown[-1].role in ("user", "tool")


async def test_it_ends_and_gives_messages_until_then(environment: Environment) -> None:
    await environment.start(PROMPT)
    ended = None
    for _ in range(MAX_TURNS):
        step = await environment.step(text_message("assistant", "2"))
        ended = step.done
        if ended is not None:
            break
        assert step.messages
    await environment.close()
    assert ended == "done"


async def test_it_can_be_closed_at_once_and_leaves_the_prompt_as_it_was(environment: Environment) -> None:
    await environment.start(PROMPT)
    await environment.close()
    assert Prompt(PromptKey("toy", 7, 0), "task", (text_message("user", "1+1"),), "2") == PROMPT
