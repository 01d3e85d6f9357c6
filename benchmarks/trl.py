"""Seconds per step and time to a reward: TRL's GRPOTrainer against relax, on the same work in one run.

    python -m benchmarks.trl [--quick] [--steps N]

Both train recipes/models/qwen3-char from one supervised start with 64 prompts x 8 completions of at most 8 tokens, the same prompts,
AdamW, learning rates, clip range, number of steps and cores. TRL gets the number of intra-op threads that is faster for it; relax gives
one thread to each of its two models. Last line: one JSON object; `skipped` when TRL is not installed.
"""

import argparse
import contextlib
import io
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks.outcome import Aim, report, skip
from benchmarks.staleness_quality import Plan, train, warm_up
from relax.data.arithmetic import addition
from relax.services.ledger import Ledger

THREADS = 2
GROUP_SIZE, MAX_TOKENS, LEARNING_RATE, WARMUP_STEPS, WINDOW = 8, 8, 4e-4, 10, 5
"""`WINDOW` is over how many steps a reward is averaged before it counts as reached."""
AIM = 5.0


@dataclass(frozen=True)
class Story:
    """What a training run did: `seconds[i]` is the wall time of step i, `rewards[i]` the mean reward of its completions."""

    name: str
    seconds: Sequence[float]
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


def grpo_config(plan: Plan, steps: int, output: Path) -> Any:
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
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def run_trl(model: Path, plan: Plan, steps: int, threads: int) -> Story:
    """GRPOTrainer with all switched off that would only slow it here: checkpointing, trackers, saving, a reference model."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(threads)
    marks: list[float] = []

    class Marks(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

    records = addition(0, digits=2, split="train", count=min(8192, max(plan.groups, plan.groups * steps)))
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32),
        reward_funcs=exact,
        args=grpo_config(plan, steps, plan.directory / f"trl-{threads}"),
        train_dataset=Dataset.from_list([{"prompt": r["prompt"], "reference": r["reference"]} for r in records]),
        processing_class=AutoTokenizer.from_pretrained(str(model)),
        callbacks=[Marks()],
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return Story(f"trl, {threads} threads", [after - before for before, after in pairwise(marks)], rewards)


# --- relax ---------------------------------------------------------------------------------------------------------------


def run_relax(model: Path, plan: Plan, steps: int, max_staleness: int) -> Story:
    name = f"relax-{max_staleness}"
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
    train(config.model_copy(update={"stages": config.stages[1:]}))
    ledger = Ledger(plan.directory / name / "ledger.sqlite", read_only=True)
    try:
        seconds = [value for _, value in ledger.metric("step/seconds")]
        rewards = [value for _, value in ledger.metric("reward/trained")]
    finally:
        ledger.close()
    return Story(f"relax, max_staleness {max_staleness}", seconds, rewards)


# --- the comparison --------------------------------------------------------------------------------------------------------


def faster_threads(model: Path, plan: Plan, steps: int) -> int:
    """With how many threads TRL is faster; the first step is warm-up."""
    speed = {threads: median(run_trl(model, plan, steps, threads).seconds[1:]) for threads in (1, THREADS)}
    print(
        "  ".join(f"trl with {threads} threads: {seconds:.2f} s/step" for threads, seconds in speed.items()), flush=True
    )
    return min(speed, key=lambda threads: speed[threads])


def aims_of(trl: Story, ours: Sequence[Story], reward: float) -> list[Aim]:
    aims = []
    for story in ours:
        reason = "the event loop handles each short trajectory in Python: see what `controller` says of its cost"
        step = median(trl.seconds[1:]) / median(story.seconds[1:])
        aims.append(Aim(f"seconds per step, TRL / {story.name}", step, AIM, reason=reason, unit="x"))
        ratio = trl.time_to(reward) / story.time_to(reward)
        aims.append(Aim(f"time to reward {reward:.2f}, TRL / {story.name}", ratio, AIM, reason=reason, unit="x"))
    return aims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    if find_spec("trl") is None or find_spec("datasets") is None:
        skip("trl", "trl is not installed: pip install --no-deps trl==1.16.0, and datasets and accelerate")
        return
    logging.getLogger().setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        plan = Plan(directory, 12, 4, 12, 8) if arguments.quick else Plan(directory, arguments.steps, 64, 400, 256)
        model = warm_up(plan, 0)
        threads = faster_threads(model, plan, 2 if arguments.quick else 4)
        peer = run_trl(model, plan, plan.steps, threads)
        ours = [run_relax(model, plan, plan.steps, max_staleness) for max_staleness in (0, 1)]
    stories = [peer, *ours]
    reward = common_reward(stories)
    rows = []
    for story in stories:
        seconds, reached = median(story.seconds[1:]), story.time_to(reward)
        rows.append([story.name, f"{seconds:.3f}", f"{reached:.1f}", f"{fmean(story.rewards[-WINDOW:]):.3f}"])
        print(f"{story.name:26s} {seconds:7.3f} s/step, reward {reward:.2f} after {reached:.1f} s", flush=True)
    table = {"header": ["run", "s/step (median)", f"s to reward {reward:.2f}", "reward at the end"], "rows": rows}
    report("trl", aims_of(peer, ours, reward), quick=arguments.quick, table=table, runs=[asdict(s) for s in stories])


if __name__ == "__main__":
    main()
