"""One trajectory, as the rollout and evaluation roles run it: a fresh environment, seeds from identity, the run's limits."""

from dataclasses import dataclass

from relax.core.completion import Bools, Sampling, Session
from relax.core.error import TaskError
from relax.core.id import GroupId
from relax.core.media import MediaReader
from relax.core.message import Prompt
from relax.core.protocol import Generate, Renderer
from relax.core.trajectory import Trajectory
from relax.services.task import Task
from relax.tasks.episode import request_seed, run_episode
from relax.tasks.foreign import describe, must_pass


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """`max_context_tokens` bounds one history, `max_sampled_tokens` all turns together (TK6); `allowed` bool[V] are the ids to
    accept from an engine (MM4). `run_seed` is what every request's seed derives from (DE1)."""

    run_seed: int
    max_context_tokens: int
    allowed: Bools | None = None
    max_sampled_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Player:
    """What is the same for all trajectories of a role."""

    renderer: Renderer
    generate: Generate
    sampling: Sampling
    limits: EpisodeLimits
    media: MediaReader | None = None
    """None where the policy reads text only."""

    async def play(self, prompt: Prompt, task: Task, group: GroupId, sibling: int, base: int) -> Trajectory:
        """Run sibling `sibling` of `group`; its requests go to engines at version `base` or above. The caller bounds the time.

        Raises TaskError and EngineError.
        """
        limits = self.limits

        def session(turn: int) -> Session:
            seed = request_seed(limits.run_seed, prompt.key, sibling, turn)
            return Session(group, sibling, turn, base, seed, prefix=str(group) if turn == 0 else None)

        try:
            environment = task.environment()
        except BaseException as error:
            if must_pass(error):
                raise
            raise TaskError(f"environment: it could not be made: {describe(error)}") from error
        return await run_episode(
            prompt,
            environment,
            self.renderer,
            self.generate,
            self.sampling,
            session,
            max_context_tokens=limits.max_context_tokens,
            max_turns=task.max_turns,
            max_sampled_tokens=limits.max_sampled_tokens,
            allowed=limits.allowed,
            media=self.media,
        )
