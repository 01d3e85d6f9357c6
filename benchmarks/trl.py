"""Seconds per step and time to a reward: TRL's GRPOTrainer against relax, on the same work in one run.

    python -m benchmarks.trl [--quick] [--steps N] [--rounds N]

Both train recipes/models/qwen3-char in float32 from one supervised start: 64 prompts x 8 completions of at most 8 tokens, the same
task, AdamW (fused), learning rates, clip range, normalisation and number of updates, one update per batch. Short runs of both alternate
and their first steps are left out; a step's wall and processor time are read at its end on both sides. TRL gets the number of intra-op
threads that is faster for it and nothing that would slow it; relax, journal and snapshots on, one thread for each of its two models.
Last line: one JSON object; `skipped` when TRL is not installed.
"""

import argparse
import asyncio
import contextlib
import io
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks.outcome import Aim, report, skip
from benchmarks.staleness_quality import Plan, warm_up
from relax.config.tree import RunConfig
from relax.data.arithmetic import addition
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger
from relax.services.monitors.hub import MonitorHub
from relax.services.run import Run

THREADS = 2
GROUP_SIZE, MAX_TOKENS, LEARNING_RATE, WARMUP_STEPS, WINDOW = 8, 8, 4e-4, 10, 5
"""`WINDOW` is over how many steps a reward is averaged before it counts as reached."""
UNMEASURED, MEASURED = 3, 9
"""Steps of a short run: those that are left out at its beginning, and those that count."""
AIM = 5.0
REASON = (
    "both do the same matrix products, most of TRL's step at this size; relax saves some (siblings share their prompt) and adds the "
    "bookkeeping of every trajectory (bus, gate, journal, ledger: see controller) on one event loop, which shares the cores with engine "
    "and trainer. Columnar puts of whole groups would take much of that away; 5x is out of reach where the products alone take more than "
    "a fifth of TRL's step. Longer answers and larger models shrink the bookkeeping's share"
)


class StepClock:
    """Wall and processor seconds of this process at the end of each step."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        self._marks.append((time.perf_counter(), time.process_time()))

    def wall(self) -> list[float]:
        return [after - before for (before, _), (after, _) in pairwise(self._marks)]

    def processor(self) -> list[float]:
        return [after - before for (_, before), (_, after) in pairwise(self._marks)]


class MarkingHub(MonitorHub):
    """Marks a clock where a step's own time is reported, and monitors nothing."""

    def __init__(self, clock: StepClock) -> None:
        super().__init__([])
        self._clock = clock

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if "step/seconds" in metrics:
            self._clock.mark()


@dataclass(frozen=True)
class Story:
    """What a training run did: step i took `seconds[i]` of wall time and `processor[i]` of processor time; `rewards[i]` is the mean
    reward of its completions."""

    name: str
    seconds: Sequence[float]
    processor: Sequence[float]
    rewards: Sequence[float]

    def smooth(self) -> list[float]:
        return [fmean(self.rewards[max(0, end - WINDOW) : end]) for end in range(1, len(self.rewards) + 1)]

    def time_to(self, reward: float) -> float:
        """Seconds of training until the mean of the last `WINDOW` steps has reached it; infinite when it never does."""
        for step, value in enumerate(self.smooth(), start=1):
            if step >= WINDOW and value >= reward:
                return sum(self.seconds[:step])
        return float("inf")


def common_reward(stories: Sequence[Story]) -> float:
    """The highest reward that every run reached."""
    return min(max(story.smooth()[WINDOW - 1 :]) for story in stories)


# --- TRL -----------------------------------------------------------------------------------------------------------------


def exact(completions: list[str], reference: list[str], **_: Any) -> list[float]:
    return [float(completion.strip() == answer) for completion, answer in zip(completions, reference, strict=True)]


def grpo_config(plan: Plan, steps: int, output: Path, checkpointing: bool) -> Any:
    """What relax's recipe says, in TRL's words."""
    from trl import GRPOConfig

    config = plan.configure("unused", 0)
    optimizer = config.training.optimizer
    return GRPOConfig(
        output_dir=str(output),
        use_cpu=True,
        bf16=False,
        seed=0,
        max_steps=steps,
        per_device_train_batch_size=plan.groups * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        num_iterations=1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        warmup_steps=WARMUP_STEPS,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        optim="adamw_torch_fused",
        max_grad_norm=config.training.grad_clip,
        gradient_checkpointing=checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def run_trl(model: Path, plan: Plan, steps: int, threads: int, checkpointing: bool = False) -> Story:
    """GRPOTrainer with all switched off that would only slow it here: checkpointing of activations (its default), trackers, saving,
    a reference model, logprobs under the old policy (which one update per batch does not need)."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(threads)
    clock = StepClock()

    class Marks(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.mark()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.mark()

    records = addition(0, digits=2, split="train", count=min(8192, max(plan.groups, plan.groups * steps)))
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32),
        reward_funcs=exact,
        args=grpo_config(plan, steps, plan.directory / f"trl-{threads}", checkpointing),
        train_dataset=Dataset.from_list([{"prompt": r["prompt"], "reference": r["reference"]} for r in records]),
        processing_class=AutoTokenizer.from_pretrained(str(model)),
        callbacks=[Marks()],
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    name = f"trl, {threads} {'threads' if threads > 1 else 'thread'}{', activations checkpointed' if checkpointing else ''}"
    return Story(name, clock.wall(), clock.processor(), rewards)


# --- relax ---------------------------------------------------------------------------------------------------------------


def run_relax(model: Path, plan: Plan, steps: int, max_staleness: int) -> Story:
    name = f"relax-{max_staleness}-{steps}"
    config = plan.configure(
        name,
        0,
        *(f"model.path={model}", "model.weights=pretrained", f"model.tokenizer={model}"),
        *(f"stages.rl.steps={steps}", f"stages.rl.groups_per_step={plan.groups}"),
        f"stages.rl.algorithm.group_size={GROUP_SIZE}",
        *(f"rollout.max_staleness={max_staleness}", f"rollout.sampling.max_tokens={MAX_TOKENS}"),
        *(f"training.optimizer.lr={LEARNING_RATE}", f"training.schedule.warmup_steps={WARMUP_STEPS}"),
        *("training.schedule.min_ratio=0", "eval.every=0", "eval.sets=[]"),
    )
    clock = StepClock()
    _train(config.model_copy(update={"stages": config.stages[1:]}), clock)
    folder = plan.directory / name
    ledger = Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        rewards = [value for _, value in ledger.metric("reward/trained")]
    finally:
        ledger.close()
    shutil.rmtree(folder)
    return Story(f"relax, max_staleness {max_staleness}", clock.wall(), clock.processor(), rewards)


def _train(config: RunConfig, clock: StepClock) -> None:
    with RunDirectory(Path(config.run.directory) / config.run.name) as directory:
        clock.mark()
        asyncio.run(Run(config, directory, MarkingHub(clock)).execute())


# --- the comparison --------------------------------------------------------------------------------------------------------


def short_runs(runs: Mapping[str, Callable[[int], Story]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median wall and processor seconds of a step. The runs take turns, so that a busy neighbour meets them all."""
    wall: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            story = run(UNMEASURED + MEASURED)
            wall[name] += story.seconds[UNMEASURED:]
            processor[name] += story.processor[UNMEASURED:]
            print(f"{name:36s} {median(story.seconds[UNMEASURED:]):7.3f} s/step", flush=True)
    return {name: (median(wall[name]), median(processor[name])) for name in runs}


def contenders(model: Path, plan: Plan) -> dict[str, Callable[[int], Story]]:
    runs: dict[str, Callable[[int], Story]] = {}
    for threads in (1, THREADS):
        runs[f"trl, {threads} thread{'s' if threads > 1 else ''}"] = partial(_trl, model, plan, threads)
    runs["trl, 1 thread, activations checkpointed"] = partial(_trl, model, plan, 1, checkpointing=True)
    for max_staleness in (0, 1):
        runs[f"relax, max_staleness {max_staleness}"] = partial(_relax, model, plan, max_staleness)
    return runs


def _trl(model: Path, plan: Plan, threads: int, steps: int, checkpointing: bool = False) -> Story:
    return run_trl(model, plan, steps, threads, checkpointing)


def _relax(model: Path, plan: Plan, max_staleness: int, steps: int) -> Story:
    return run_relax(model, plan, steps, max_staleness)


def aims_of(speeds: Mapping[str, tuple[float, float]], peer: str, stories: Sequence[Story], reward: float) -> list[Aim]:
    aims = []
    trl, *ours = stories
    for story in ours:
        ratio = speeds[peer][0] / speeds[story.name][0]
        aims.append(Aim(f"seconds per step, TRL / {story.name}", ratio, AIM, reason=REASON, unit="x"))
        ratio = trl.time_to(reward) / story.time_to(reward)
        aims.append(Aim(f"time to reward {reward:.2f}, TRL / {story.name}", ratio, AIM, reason=REASON, unit="x"))
    return aims


def table_of(speeds: Mapping[str, tuple[float, float]], stories: Mapping[str, Story], reward: float) -> dict[str, Any]:
    rows = []
    for name, (wall, processor) in speeds.items():
        story = stories.get(name)
        reached = (
            ["", ""] if story is None else [f"{story.time_to(reward):.1f}", f"{fmean(story.rewards[-WINDOW:]):.3f}"]
        )
        rows.append([name, f"{wall:.3f}", f"{processor:.3f}", *reached])
    header = ["run", "s/step", "processor s/step", f"s to reward {reward:.2f}", "reward at the end"]
    return {"header": header, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--steps", type=int, default=50, help="of the runs that are compared by their reward")
    parser.add_argument("--rounds", type=int, default=3, help="of the short runs that are compared by their steps")
    arguments = parser.parse_args()
    if find_spec("trl") is None or find_spec("datasets") is None:
        skip("trl", "trl is not installed: pip install --no-deps trl==1.16.0, and datasets and accelerate")
        return
    logging.getLogger().setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        plan = Plan(directory, 12, 4, 12, 8) if arguments.quick else Plan(directory, arguments.steps, 64, 400, 256)
        runs = contenders(warm_up(plan, 0), plan)
        speeds = short_runs(runs, 1 if arguments.quick else arguments.rounds)
        peer = min((name for name in runs if name.startswith("trl")), key=lambda name: speeds[name][0])
        names = [peer, *(name for name in runs if name.startswith("relax"))]
        stories = {name: runs[name](plan.steps) for name in names}
    reward = common_reward(list(stories.values()))
    table = table_of(speeds, stories, reward)
    for row in table["rows"]:
        print("  ".join(row), flush=True)
    aims = aims_of(speeds, peer, list(stories.values()), reward)
    notes = [f"TRL is at its best as {peer!r}. Its own default checkpoints activations; that row is in the table too."]
    runs_json = {name: asdict(story) for name, story in stories.items()}
    report("trl", aims, quick=arguments.quick, notes=notes, table=table, runs=runs_json)


if __name__ == "__main__":
    main()
