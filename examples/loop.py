"""The whole algorithm in one file: a supervised warm-up, then GRPO on two-digit addition, without the services.

Run it with `python examples/loop.py`, read it top to bottom. One step samples a group of answers to each prompt, scores them, compares
each with its siblings, takes one optimizer step, publishes the new weights and loads them into the engine. `relax train` makes the
same calls from roles that run side by side (docs/life-of-a-sample.md); here they follow one another, so every token is on-policy.
"""

import asyncio
import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from relax.algorithms.advantage import token_advantages
from relax.algorithms.config import GrpoConfig, SupervisedConfig
from relax.algorithms.grpo import build_grpo
from relax.algorithms.supervised import build_supervised
from relax.core.algorithm import Algorithm
from relax.core.batch import ForwardBackward, TrainRow
from relax.core.completion import PROMPT, Sampling, Session, frozen
from relax.core.id import GroupId, group_id, sample_id, trajectory_id
from relax.core.message import Prompt
from relax.core.protocol import GroupOutcome
from relax.core.trajectory import Trajectory
from relax.core.version import Version
from relax.core.weight import Probe
from relax.data.config import GeneratorConfig
from relax.data.quarantine import Quarantine
from relax.data.renderer import TextRenderer
from relax.data.stream import PromptRules, PromptStream, build_reader
from relax.engines.config import TorchEngineConfig
from relax.engines.torch.engine import TorchEngine
from relax.model.load import load_model, load_tokenizer
from relax.model.vocabulary import read_vocabulary
from relax.runtime.compute import ComputeThread
from relax.tasks.config import ExactConfig, SingleTurnConfig
from relax.tasks.environments.single_turn import SingleTurn
from relax.tasks.episode import request_seed, run_episode
from relax.tasks.rewards.exact import Exact
from relax.tasks.score import score
from relax.training.config import AdamWConfig, ConstantConfig, TorchConfig
from relax.training.packing import pack, split
from relax.training.torch_backend import TorchBackend
from relax.weights.proof import check_proof
from relax.weights.store import WeightStore

MODEL = Path(__file__).resolve().parent.parent / "recipes" / "models" / "qwen3-char"
SAMPLING = Sampling(temperature=1.0, max_tokens=8)
MAX_PROMPT_TOKENS = 16
MAX_CONTEXT_TOKENS = MAX_PROMPT_TOKENS + SAMPLING.max_tokens
MICROBATCH_TOKENS = 4096
WARM_LOSS = 0.35  # nats per token at which the warm-up ends: about a quarter of the four-token answers come out right


def main(
    warmup_steps: int = 1000, rl_steps: int = 200, prompts_per_step: int = 64, group_size: int = 8, seed: int = 2
) -> "History":
    """Train, printing as it goes; returns what happened at every step."""

    async def run() -> History:
        with ExitStack() as threads:
            parts, history = build_parts(threads, seed), History()
            await warm_up(parts, warmup_steps, 2 * prompts_per_step, history)
            await reinforce(parts, rl_steps, prompts_per_step, group_size, history)
            await parts.engine.close()
        return history

    return asyncio.run(run())


# --- 1. The parts ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class History:
    """One entry per step. `gaps` is the largest difference between the trainer's and the engine's logprob of a sampled token."""

    warmup_losses: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    versions: list[set[int]] = field(default_factory=list)
    """The weight versions stamped on the step's sampled tokens."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop talks to. `relax train` builds the same objects from a recipe (services/assembly.py)."""

    seed: int
    prompts: Iterator[Prompt]
    renderer: TextRenderer
    engine: TorchEngine  # samples
    backend: TorchBackend  # computes gradients
    trainer: ComputeThread  # the thread that the backend is called on; the event loop never computes
    store: WeightStore  # carries weight versions from the backend to the engine


def build_parts(threads: ExitStack, seed: int) -> Parts:
    """`threads` closes the two compute threads."""
    tokenizer = load_tokenizer(MODEL)
    model = load_model(MODEL, weights="random", dtype="float32", seed=seed)
    vocabulary = read_vocabulary(tokenizer, model.config)  # which ids may be sampled, for engine and trainer alike
    renderer = TextRenderer(tokenizer, vocabulary, {"plain": True})  # messages to tokens, tokens to text
    source = GeneratorConfig(name="addition", task="addition", function="relax.data.arithmetic:addition")
    reader = build_reader(
        source, renderer=renderer, rules=PromptRules(MAX_PROMPT_TOKENS), quarantine=Quarantine(), seed=seed
    )
    prompts = PromptStream(reader, seed=seed)  # endless: pass after pass over the records, each in an order of its own
    engine_thread = threads.enter_context(closing(ComputeThread("engine")))
    trainer_thread = threads.enter_context(closing(ComputeThread("trainer")))
    engine = TorchEngine(TorchEngineConfig(), copy.deepcopy(model), vocabulary, engine_thread, name="engine")
    backend = TorchBackend(TorchConfig(device="cpu"), model, vocabulary, temperature=SAMPLING.temperature)
    store = WeightStore(keep=2, compute=trainer_thread)
    return Parts(seed, iter(prompts), renderer, engine, backend, trainer_thread, store)


# --- 2. Warm-up: the policy learns the form of an answer from demonstrations -------------------------------------------


async def warm_up(parts: Parts, steps: int, prompts_per_step: int, history: History) -> None:
    algorithm = build_supervised(SupervisedConfig())
    parts.backend.begin(AdamWConfig(lr=2e-3), ConstantConfig(), total_steps=steps)
    for step in range(steps):
        numbers = range(step * prompts_per_step, (step + 1) * prompts_per_step)
        groups = [demonstrate(parts, next(parts.prompts), number, algorithm) for number in numbers]
        result, normalizer = await update(parts, algorithm, groups)
        history.warmup_losses.append(result.loss / normalizer)
        if step % 10 == 0:
            print(f"warm-up {step + 1:4d}  loss {history.warmup_losses[-1]:.3f}")
        if history.warmup_losses[-1] < WARM_LOSS:
            break


def demonstrate(parts: Parts, prompt: Prompt, number: int, algorithm: Algorithm) -> list[TrainRow]:
    """A group of one: the prompt with its reference answer. Only the answer's tokens are in the mask."""
    question = parts.renderer.encode(prompt.messages).token_ids
    answer = parts.renderer.encode_reply(prompt.reference)
    token_ids = np.concatenate([question, answer])
    mask = np.arange(len(token_ids)) >= len(question)
    (weight,) = algorithm.aggregate.token_weights(np.array([len(answer)]))
    sample = sample_id(trajectory_id(group_id(number), 0), 0)
    return [TrainRow(sample, frozen(token_ids), frozen(mask), (mask * weight).astype(np.float32))]


# --- 3. Reinforcement learning ----------------------------------------------------------------------------------------


async def reinforce(parts: Parts, steps: int, prompts_per_step: int, group_size: int, history: History) -> None:
    """Sample, score, compare, train, publish; then again with the new weights."""
    algorithm = build_grpo(GrpoConfig(group_size=group_size))
    parts.backend.begin(AdamWConfig(lr=4e-4), ConstantConfig(warmup_steps=10), total_steps=steps)
    version = Version(number=0)
    await publish(parts, version)
    for step in range(steps):
        numbers = range(step * prompts_per_step, (step + 1) * prompts_per_step)
        sampling = (sample_group(parts, next(parts.prompts), number, version, group_size) for number in numbers)
        groups = await asyncio.gather(*sampling)
        rows = [group_rows(group, algorithm) for group in groups]
        result, _ = await update(parts, algorithm, rows)
        history.rewards.append(float(np.mean([group.rewards for group in groups])))
        history.gaps.append(result.measures["policy/logprob_gap_max"].value)
        stamps = (one.segments[0].versions.tolist() for group in groups for one in group.trajectories)
        history.versions.append(set().union(*stamps) - {PROMPT})
        print(f"step {step + 1:4d}  reward {history.rewards[-1]:.3f}  sampled by {version}")
        version = version.next()  # a version counts published steps
        await publish(parts, version)


@dataclass(frozen=True, slots=True)
class Group:
    """The siblings of one prompt with their rewards: the unit of credit."""

    number: int
    trajectories: Sequence[Trajectory]
    rewards: Sequence[float]


async def sample_group(parts: Parts, prompt: Prompt, number: int, version: Version, group_size: int) -> Group:
    """All siblings at once; the engine batches them with those of the other groups and prefills their prompt once."""
    siblings = (sample_one(parts, prompt, group_id(number), sibling, version) for sibling in range(group_size))
    scored = await asyncio.gather(*siblings)
    return Group(number, [trajectory for trajectory, _ in scored], [reward for _, reward in scored])


async def sample_one(
    parts: Parts, prompt: Prompt, group: GroupId, sibling: int, version: Version
) -> tuple[Trajectory, float]:
    def session(turn: int) -> Session:
        # Seeds come from what a request is, never from when it runs, so a run can be repeated.
        seed = request_seed(parts.seed, prompt.key, sibling, turn)
        return Session(group, sibling, turn, base=version.number, seed=seed, prefix=group)

    environment = SingleTurn(SingleTurnConfig())
    trajectory = await run_episode(
        prompt, environment, parts.renderer, parts.engine, SAMPLING, session, max_context_tokens=MAX_CONTEXT_TOKENS
    )
    reward, scores = await score(prompt, trajectory, [("exact", 1.0, Exact(ExactConfig()))])
    assert reward is not None, f"every reference is text, so `exact` cannot fail: {scores}"
    return trajectory, reward


def group_rows(group: Group, algorithm: Algorithm) -> list[TrainRow]:
    """A training row for each sibling: the sampled ids as they are, and the columns that the loss reads."""
    lengths = np.array([trajectory.num_sampled for trajectory in group.trajectories])
    truncated = np.array([trajectory.end == "truncated" for trajectory in group.trajectories])
    advantages = algorithm.advantages(GroupOutcome(np.array(group.rewards), lengths, truncated))
    weights = algorithm.aggregate.token_weights(lengths)
    rows = []
    for sibling, trajectory in enumerate(group.trajectories):
        (segment,) = trajectory.segments  # one turn, so one unbroken history
        advantages_T = token_advantages(advantages[sibling], segment.mask)
        columns = {"advantages": advantages_T, "behaviour_logprobs": segment.logprobs}
        weights_T = (segment.mask * weights[sibling]).astype(np.float32)
        sample = sample_id(trajectory_id(group_id(group.number), sibling), 0)
        rows.append(TrainRow(sample, segment.token_ids, segment.mask, weights_T, columns))
    return rows


# --- 4. One optimizer step, and its weights on their way to the engine --------------------------------------------------


async def update(parts: Parts, algorithm: Algorithm, groups: Sequence[list[TrainRow]]) -> tuple[ForwardBackward, float]:
    """Micro-batches add up unnormalised gradients; one number, known once all groups are in, scales them."""
    micro_batches = pack([row for rows in groups for row in rows], MICROBATCH_TOKENS)
    shards = split(micro_batches, parts.backend.num_replicas)
    result = await parts.trainer.run(parts.backend.forward_backward, shards, algorithm.loss)
    normalizer = algorithm.aggregate.normalizer([np.array([row.mask.sum() for row in rows]) for rows in groups])
    await parts.trainer.run(parts.backend.optim_step, normalizer)
    return result, normalizer


async def publish(parts: Parts, version: Version) -> None:
    """Copy the weights out under a version, load them into the engine, and have the engine prove that it holds them."""
    token_ids = parts.renderer.encode_reply("12+34=640")
    mask = np.arange(len(token_ids)) > 0
    row = TrainRow(sample_id(trajectory_id(group_id(0), 0), 0), token_ids, mask, mask.astype(np.float32))
    expected = (await parts.trainer.run(parts.backend.logprobs, [[(row,)]]))[0][0][0]
    manifest = await parts.store.publish(version, parts.backend.export(), Probe(token_ids, expected))
    await parts.engine.pause("recompute")
    check_proof("engine", manifest, await parts.engine.load(version, parts.store))
    await parts.engine.resume()


if __name__ == "__main__":
    main()
