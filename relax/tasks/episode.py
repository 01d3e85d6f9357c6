"""The loop over turns: one sibling's run through its environment.

Called by the rollout and evaluation roles. It ends with a trajectory (`done` or `truncated`), or raises (generation or the
environment failed: the message says which) and then nothing of it is graded. The environment is closed on every path.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from relax.core.completion import Bools, Completion, GenerateInput, Sampling, Session
from relax.core.error import DataError, EngineError, RelaxError, TaskError
from relax.core.media import MediaReader, Medium
from relax.core.message import Json, Message, Prompt, PromptKey, text_message
from relax.core.protocol import Encoded, Environment, Generate, Renderer, Step
from relax.core.seed import derive_seed
from relax.core.trajectory import EndReason, Trajectory
from relax.tasks.draft import Draft
from relax.tasks.foreign import check_messages, check_step, describe, must_pass

_MIN_LOGPROB = -1000.0
"""Nothing is sampled with a lower one: it is an engine's way of saying that it has none (case D2)."""


def request_seed(run_seed: int, key: PromptKey, sibling: int, turn: int) -> int:
    """The seed of one request, from what it is and never from when it comes (DE1): the same again after a retry (AC2)."""
    return derive_seed(run_seed, key.source, key.record, key.pass_number, key.attempt, sibling, turn)


async def run_episode(
    prompt: Prompt,
    environment: Environment,
    renderer: Renderer,
    generate: Generate,
    sampling: Sampling,
    session_of: Callable[[int], Session],
    *,
    max_context_tokens: int,
    max_turns: int = 1,
    max_sampled_tokens: int | None = None,
    allowed: Bools | None = None,
    media: MediaReader | None = None,
) -> Trajectory:
    """Run `environment` to its end. `session_of(turn)` is the session of each request.

    `sampling.max_tokens` bounds each turn, `max_sampled_tokens` all turns together, `max_context_tokens` each segment; whichever
    is met ends the trajectory as `truncated` (TK6). `allowed` bool[V]: a completion with any other id is refused (MM4). `media` reads
    images, sounds and videos, of the prompt (already looked at) and of later turns; None where the policy reads text only.
    Raises TaskError (environment failed, generation aborted) and EngineError (no or no valid completion). The caller bounds the time.
    """
    limits = max_context_tokens, max_turns, max_sampled_tokens
    run = _Episode(prompt, environment, renderer, generate, sampling, *limits, media)
    try:
        end = await run.turns(session_of, allowed)
    except BaseException:
        with suppress(TaskError):  # the first error says more
            await run.close()
        raise
    await run.close()
    return run.trajectory(end)


class _Episode:
    """The state of one run. `shown` is the prompt as the environment put it, `said` all messages after it."""

    def __init__(
        self,
        prompt: Prompt,
        environment: Environment,
        renderer: Renderer,
        generate: Generate,
        sampling: Sampling,
        max_context_tokens: int,
        max_turns: int,
        max_sampled_tokens: int | None,
        media: MediaReader | None,
    ) -> None:
        self.media = media
        self.prompt, self.environment, self.renderer, self.generate = prompt, environment, renderer, generate
        self.sampling = sampling
        if not set(renderer.stops) <= set(sampling.stop_ids):
            self.sampling = replace(sampling, stop_ids=tuple(dict.fromkeys((*sampling.stop_ids, *renderer.stops))))
        self.max_context_tokens, self.max_turns, self.max_sampled_tokens = (
            max_context_tokens,
            max_turns,
            max_sampled_tokens,
        )
        self.draft = Draft()
        self.shown: tuple[Message, ...] = ()
        self.said: list[Message] = []
        self.steps: list[Json] = []
        self.branches = 0
        self.unstable = 0

    async def turns(self, session_of: Callable[[int], Session], allowed: Bools | None) -> EndReason:
        self.shown = check_messages(await self._ask("start", self.prompt), "environment: start")
        if not self.shown:
            raise TaskError(
                "environment: start gave no message; it gives those to show first, usually the prompt's own"
            )
        if self.shown != self.prompt.messages:
            self.shown = await self._shown_media(self.shown)
        await self._begin()
        for turn in range(self.max_turns):
            room = self._room()
            if room <= 0:
                return "truncated"
            sampling = self.sampling if room == self.sampling.max_tokens else replace(self.sampling, max_tokens=room)
            completion = await self._sample(sampling, session_of(turn), allowed)
            if completion.stop_reason == "length":
                return "truncated"
            step = check_step(await self._ask("step", self.said[-1]))
            if step.info is not None:
                self.steps.append(step.info)
            if step.done is not None:
                self.said.extend(step.messages)
                return step.done
            if not step.messages:
                raise TaskError("environment: step gave neither messages nor an end; give one of them")
            if turn + 1 < self.max_turns:
                await self._append(step)
            else:
                self.said.extend(step.messages)
        return "truncated"

    def _room(self) -> int:
        """Tokens that the next completion may have: the least of what the three budgets leave."""
        left = [self.sampling.max_tokens, self.max_context_tokens - self.draft.length]
        if self.max_sampled_tokens is not None:
            left.append(self.max_sampled_tokens - sum(turn.end - turn.start for turn in self.draft.turns))
        return min(left)

    async def _sample(self, sampling: Sampling, session: Session, allowed: Bools | None) -> Completion:
        request = GenerateInput(self.draft.token_ids, self.draft.media)
        completion = await self.generate.generate(request, sampling, session)
        _check(completion, sampling, allowed)
        text = _said(self.renderer.decode(completion.token_ids), completion, sampling)
        self.draft.sample(completion, text)
        self.said.append(text_message("assistant", text))
        self.unstable += not self.renderer.is_stable(completion.token_ids)
        return completion

    async def _begin(self) -> None:
        """A full render, nobody's sample, opens a segment."""
        try:
            opened = self.renderer.encode([*self.shown, *self.said])
            media = await self._load(opened)
        except DataError as error:
            raise _refused(error) from error
        self.draft.begin(opened.token_ids, media)

    async def _append(self, step: Step) -> None:
        """Show the environment's messages: as a suffix where that equals a full render, else in a branch (TK2)."""
        try:
            messages = await self._look(step.messages)
            suffix = self.renderer.extend([*self.shown, *self.said], self.draft.token_ids, messages)
            media = () if suffix is None else await self._load(suffix)
        except DataError as error:
            raise _refused(error) from error
        self.said.extend(messages)
        if suffix is None:
            self.branches += 1
            await self._begin()
        else:
            self.draft.show(suffix.token_ids, media)

    async def _shown_media(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """What an environment shows in place of the prompt may hold media of its own."""
        try:
            return await self._look(messages)
        except DataError as error:
            raise _refused(error) from error

    async def _look(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        has_media = any(message.media for message in messages)
        return await self.media.look(messages) if has_media and self.media is not None else messages

    async def _load(self, encoded: Encoded) -> tuple[Medium, ...]:
        """The features of what was rendered (MM1: the reader holds their count against the placeholders)."""
        return await self.media.load(encoded.parts) if encoded.parts and self.media is not None else ()

    async def _ask(self, what: str, *arguments: Any) -> Any:
        """Call a method of the environment. Whatever it raises is a TaskError, but for relax's own errors and real cancellation."""
        try:
            return await getattr(self.environment, what)(*arguments)
        except BaseException as error:
            if must_pass(error) or (isinstance(error, RelaxError) and not isinstance(error, DataError)):
                raise
            raise TaskError(f"environment: {what} raised {describe(error)}") from error

    async def close(self) -> None:
        await self._ask("close")

    def trajectory(self, end: EndReason) -> Trajectory:
        info: dict[str, Json] = {"branches": self.branches, "unstable": self.unstable}
        if self.steps:
            info["environment"] = self.steps
        return Trajectory(self.draft.segments(), tuple(self.draft.turns), tuple(self.said), end, info)


def _refused(error: DataError) -> TaskError:
    """Prompts were rendered when their records were read, so what cannot be rendered now is the environment's."""
    return TaskError(f"environment: its messages cannot be shown to the policy: {error}")


def _said(text: str, completion: Completion, sampling: Sampling) -> str:
    """A completion's text: `text`, up to the first stop string where one ended it. The tokens stay as they were sampled (TK1)."""
    if completion.stop_reason != "stop" or int(completion.token_ids[-1]) in sampling.stop_ids:
        return text
    found = [text.index(string) for string in sampling.stop if string in text]
    if not found:
        raise EngineError(f"generation: stopped, but its text holds none of the stop strings {list(sampling.stop)}")
    return text[: min(found)]


def _check(completion: Completion, sampling: Sampling, allowed: Bools | None) -> None:
    """Trust no engine with what will be graded and trained. Raises TaskError for an abort, EngineError for a broken completion."""
    ids = completion.token_ids
    if completion.stop_reason == "abort":
        raise TaskError(f"generation: aborted after {len(ids)} tokens; an answer that was cut off is not graded")
    if any(len(part) != len(ids) for part in (completion.logprobs, completion.versions, completion.mixed)):
        raise EngineError(f"generation: {len(ids)} tokens, but not as many logprobs, versions and mixed flags")
    if not 0 < len(ids) <= sampling.max_tokens:
        raise EngineError(f"generation: {len(ids)} tokens where 1 to {sampling.max_tokens} were asked for")
    if completion.stop_reason == "stop" and int(ids[-1]) not in sampling.stop_ids and not sampling.stop:
        raise EngineError(f"generation: stopped at token {int(ids[-1])}, which is no stop id")
    if not (completion.logprobs.min() > _MIN_LOGPROB and completion.logprobs.max() < np.inf):  # a NaN is neither
        raise EngineError("generation: a sampled token has no finite logprob that a token can be sampled with")
    if allowed is not None:
        outside = [token for token in ids.tolist() if not (0 <= token < len(allowed) and allowed[token])]
        if outside:
            raise EngineError(
                f"generation: token {outside[0]} is a media placeholder or unknown; no policy may sample it"
            )
