"""A model that rewards may ask: how messages become its tokens, and who answers. Which engine and which process that is, nobody here knows.

Built by the services for each of `judges`, given to the rewards that name it. Every reply has a seed of its own from what it is
about (DE1), a time limit, and a bounded number of others beside it; what goes wrong is a TaskError with a reason of few kinds.
"""

import asyncio
from dataclasses import dataclass

from relax.core.completion import GenerateInput, Sampling, Session
from relax.core.error import DataError, InvariantError, LimitError, RelaxError, TaskError, UserError
from relax.core.id import GroupId
from relax.core.message import Message, Prompt
from relax.core.protocol import Generate, Renderer
from relax.core.seed import derive_seed


@dataclass(frozen=True, slots=True)
class Reply:
    """What the judge said. `complete` is false where the token budget cut it off: what it would have said is not known."""

    text: str
    complete: bool


class JudgeEngine:
    """`places` bounds the replies in flight, so that a limit counts time with the engine and not time before it."""

    def __init__(
        self, name: str, renderer: Renderer, generate: Generate, sampling: Sampling, run_seed: int, places: int
    ) -> None:
        self.name, self.run_seed = name, run_seed
        self._renderer, self._generate, self._sampling = renderer, generate, sampling
        self._places = asyncio.Semaphore(places)

    async def ask(
        self, messages: tuple[Message, ...], prompt: Prompt, part: str, number: int, timeout_s: float, shared: bool
    ) -> Reply:
        """Reply `number` about a prompt, for the reward called `part`. `shared`: the same messages are asked more than once.

        Raises LimitError when it takes too long, TaskError when the engine fails or refuses.
        """
        try:
            token_ids = self._renderer.encode(messages).token_ids
        except DataError as error:
            raise TaskError(f"judge {self.name}: its prompt cannot be rendered") from error
        key = prompt.key
        place = key.source, key.record, key.pass_number, key.attempt
        group = GroupId(f"{self.name}:{part}:{key.source}:{key.record}")
        seed = derive_seed(self.run_seed, "judge", self.name, part, *place, number)
        session = Session(group, 0, 0, base=0, seed=seed, prefix=str(group) if shared else None)
        async with self._places:  # no deadline: places come back when a reply ends, which has one
            try:
                async with asyncio.timeout(timeout_s):
                    completion = await self._generate.generate(GenerateInput(token_ids), self._sampling, session)
            except TimeoutError:
                raise LimitError(f"judge {self.name}: no reply within {timeout_s:g} s") from None
            except (InvariantError, UserError):
                raise
            except RelaxError as error:  # an engine's, or what is left of it after a wire
                raise TaskError(f"judge {self.name}: {type(error).__name__}") from error
        if completion.stop_reason == "abort":
            raise TaskError(f"judge {self.name}: its reply was aborted")
        text = self._renderer.decode(completion.token_ids)
        ends = [text.index(string) for string in self._sampling.stop if string in text]
        return Reply(text[: min(ends, default=len(text))], completion.stop_reason == "stop")
