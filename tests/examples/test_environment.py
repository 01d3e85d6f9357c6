"""The example of an own environment runs two turns, with the real renderer and a scripted engine."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relax.config.tree import RunConfig
from relax.core.completion import Completion, GenerateInput, Sampling, Session
from relax.core.id import group_id
from relax.core.message import Prompt, PromptKey, text_message
from relax.core.trajectory import Trajectory
from relax.data.renderer import TextRenderer
from relax.model.load import load_model_config
from relax.model.vocabulary import read_vocabulary
from relax.tasks.episode import run_episode
from relax.tasks.table import ENVIRONMENTS


class Scripted:
    """Says the next of its answers, whatever it is asked."""

    def __init__(self, renderer: TextRenderer, answers: list[str]) -> None:
        self._completions = [renderer.encode_reply(answer) for answer in answers]

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        token_ids = self._completions.pop(0)
        count = len(token_ids)
        return Completion(
            token_ids, np.full(count, -1.0, np.float32), np.zeros(count, np.int32), np.zeros(count, bool), "stop"
        )


async def run(config: RunConfig, renderer: TextRenderer, answers: list[str]) -> Trajectory:
    node: Any = config.tasks["addition"].env
    prompt = Prompt(PromptKey("addition", 0, 0), "addition", (text_message("user", "07+45="),), "250")
    return await run_episode(
        prompt,
        ENVIRONMENTS.component(node.type)(node),
        renderer,
        Scripted(renderer, answers),
        Sampling(max_tokens=config.rollout.sampling.max_tokens),
        lambda turn: Session(group_id(0), 0, turn, base=0, seed=turn),
        max_context_tokens=config.rollout.max_context_tokens or 0,
        max_turns=node.max_turns,
    )


@pytest.mark.parametrize(
    ("answers", "tries"), [(["250"], 1), (["251", "250"], 2), (["251", "252"], 2)], ids=["right", "mended", "wrong"]
)
async def test_a_wrong_answer_gets_a_second_try(
    overlay: Callable[[str], RunConfig], tiny_tokenizer: Any, tiny_model_path: Any, answers: list[str], tries: int
) -> None:
    config = overlay("environment/second_try.yaml")
    vocabulary = read_vocabulary(tiny_tokenizer, load_model_config(tiny_model_path))
    renderer = TextRenderer(tiny_tokenizer, vocabulary, config.data.chat_template_args)
    trajectory = await run(config, renderer, answers)
    assert (trajectory.end, trajectory.response) == ("done", answers[-1])
    assert trajectory.info["environment"][-1:] == [{"tries": tries}]
    (segment,) = trajectory.segments  # the second turn extends the first: one history, one sample
    said = [renderer.decode(segment.token_ids[turn.start : turn.end]) for turn in trajectory.turns]
    assert said == answers
    assert segment.mask.sum() == sum(len(renderer.encode_reply(answer)) for answer in answers)
    assert ("no, try again" in renderer.decode(segment.token_ids)) == (tries == 2)
