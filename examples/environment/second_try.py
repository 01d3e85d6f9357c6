"""An environment of one's own: whoever answers wrongly is told so and may answer once more.

A recipe names it by import path (`second_try.yaml`). relax makes one for every trajectory, calls `start`, then `step` after each
reply until it says `done`, and `close` on every path. What it shows is rendered to tokens that nobody trains on.
"""

from relax.config.base import ComponentConfig
from relax.core.message import Message, Prompt, text_message
from relax.core.protocol import Step


class SecondTry:
    """Core's `Environment`."""

    class Config(ComponentConfig):
        """Its node in a recipe."""

        max_turns: int = 2
        """Replies that one trajectory may have."""
        hint: str = "no, try again"
        """What a wrong answer is told."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tries = 0

    async def start(self, prompt: Prompt) -> tuple[Message, ...]:
        self._expected = str(prompt.reference)
        return prompt.messages

    async def step(self, reply: Message) -> Step:
        """Ends after a right answer or the last try; `info` is kept with the trajectory."""
        self._tries += 1
        if reply.text.strip() == self._expected or self._tries == self._config.max_turns:
            return Step(done="done", info={"tries": self._tries})
        return Step(messages=(text_message("user", self._config.hint),))

    async def close(self) -> None: ...
