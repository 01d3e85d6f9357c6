"""The environment of questions with one answer: it shows the prompt and ends after the first reply."""

from relax.config.base import ComponentConfig
from relax.core.message import Message, Prompt
from relax.core.protocol import Step


class SingleTurn:
    """Core's `Environment`; keeps nothing."""

    def __init__(self, config: ComponentConfig) -> None:
        del config  # it has no settings beside its type

    async def start(self, prompt: Prompt) -> tuple[Message, ...]:
        return prompt.messages

    async def step(self, reply: Message) -> Step:
        return Step(done="done")

    async def close(self) -> None: ...
