"""The example of an own source: right records, the same for the same seed, mixed by weight through a recipe."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from examples.source.subtraction import subtraction
from relax.config.tree import RunConfig
from relax.data.mixture import Mixture, build_streams
from relax.data.quarantine import Quarantine
from relax.data.renderer import TextRenderer
from relax.data.stream import PromptRules
from relax.model.load import load_model_config
from relax.model.vocabulary import read_vocabulary


def test_answers_are_right_and_a_seed_decides_them() -> None:
    records = list(subtraction(7, digits=2, count=200))
    for record in records:
        first, second = record["prompt"].removesuffix("=").split("-")
        assert int(first) - int(second) == int(record["reference"]) >= 0
        assert len(record["reference"]) == 2
    assert records == list(subtraction(7, digits=2, count=200))
    assert records != list(subtraction(8, digits=2, count=200))


def test_a_recipe_mixes_it_by_weight(
    overlay: Callable[[str], RunConfig], tiny_tokenizer: Any, tiny_model_path: Any
) -> None:
    config = overlay("source/subtraction.yaml")
    vocabulary = read_vocabulary(tiny_tokenizer, load_model_config(tiny_model_path))
    streams = build_streams(
        config.data.sources,  # type: ignore[arg-type]
        renderer=TextRenderer(tiny_tokenizer, vocabulary, config.data.chat_template_args),
        rules=PromptRules(config.data.max_prompt_tokens),
        quarantine=Quarantine(),
        seed=config.run.seed,
    )
    source = Mixture(streams, {node.name: node.weight for node in config.data.sources})  # type: ignore[attr-defined]
    prompts = [next(source) for _ in range(30)]
    assert Counter(prompt.task for prompt in prompts) == {"addition": 10, "subtraction": 20}
    assert all("-" in prompt.messages[0].text for prompt in prompts if prompt.task == "subtraction")
