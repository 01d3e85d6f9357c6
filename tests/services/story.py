"""A made-up run on disk: a supervised stage, then RL, with groups of every end; written through the real ledger."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.core.id import evaluation_id, group_id
from relax.services.directory import RunDirectory
from relax.services.ledger import EvaluationRow, GroupRow, Ledger, LedgerRow, SampleRow, TrajectoryRow

RECIPE = """
schema: 1
run: {name: story, directory: DIRECTORY}
model: {path: MODEL, weights: random}
data:
  sources: [{name: add, type: generator, function: "relax.data.arithmetic:addition", task: addition}]
  max_prompt_tokens: 32
tasks: {addition: {rewards: [{type: exact, weight: 1}]}}
stages:
  - {name: warm-up, steps: 20, groups_per_step: 2, algorithm: {type: supervised}}
  - {name: rl, steps: 40, groups_per_step: 2, algorithm: {type: grpo, group_size: 2}}
rollout: {max_staleness: 1, sampling: {max_tokens: 4}}
eval:
  every: 10
  sets:
    - name: heldout
      source: {name: held, type: generator, function: "relax.data.arithmetic:addition", task: addition, args: {split: heldout}}
"""

WARM_UP, STEPS = 20, 60


def write_recipe(folder: Path, model: Path | str = "recipes/models/qwen3-char") -> Path:
    """The recipe as a file; its runs go to `folder/runs`."""
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("DIRECTORY", str(folder / "runs")).replace("MODEL", str(model)))
    return path


def story_config(folder: Path) -> RunConfig:
    return load_config([write_recipe(folder)])


def story_directory(config: RunConfig) -> RunDirectory:
    """The run's directory, made, with its configuration in it."""
    from relax.services.cli.origin import config_text

    directory = RunDirectory(Path(config.run.directory) / config.run.name)
    directory.root.mkdir(parents=True)
    directory.config.write_text(config_text(config))
    return directory


def reward_at(step: int) -> float:
    """The made-up training reward of an RL step."""
    return 0.9 - 0.7 * math.exp(-(step - WARM_UP) / 12) + 0.05 * math.sin(step * 2.3)


def heldout_at(step: int) -> float:
    """The made-up accuracy of a version."""
    return 0.01 * step if step <= WARM_UP else 0.95 - 0.75 * math.exp(-(step - WARM_UP) / 12)


def step_metrics(step: int) -> dict[str, float]:
    """What the run would record under a step, its account included."""
    metrics = {
        "train/applied": 1.0,
        "train/loss": 2.0 - 0.02 * step,
        "train/tokens": 16.0,
        "step/seconds": 0.5 if step < WARM_UP else 2.0,
        "idle/trainer": 0.1 if step < WARM_UP else 0.4,
        "ledger/admitted": 2.0 * (step + 1) + lost(step + 1),
        "ledger/trained": 2.0 * (step + 1),
        "ledger/filtered": float(lost(step + 1)),
        "ledger/failed": 0.0,
        "ledger/dropped": 0.0,
        "ledger/outstanding": 0.0,
    }
    if step >= WARM_UP:
        metrics |= {
            "reward/mean": reward_at(step),
            "staleness/max": float(min(1, step - WARM_UP)),
            "rollout/tokens_per_second": 1000.0 + step,
            "idle/engine-0": 0.25,
            "policy/logprob_gap_mean": 1e-7,
            "policy/logprob_gap_max": 2e-6 + step * 1e-8,
            "policy/logprob_gap_age_0": 1e-7,
            "policy/logprob_gap_age_1": 3e-7,
        }
    return metrics


def lost(steps: int) -> int:
    """Groups filtered in the first `steps` steps: one in every tenth RL step."""
    return max(0, (steps - WARM_UP + 9) // 10)


def write_story(ledger: Ledger, steps: int = STEPS) -> None:
    """Write the first `steps` steps, with the evaluations that they brought."""
    metrics = {step: step_metrics(step) for step in range(steps)}
    for step in range(0, steps + 1, 10):
        metrics.setdefault(step, {})["eval/heldout/reward"] = heldout_at(step)
    notes: dict[str, object] = {"stage/warm-up": {"first": 0, "end": WARM_UP, "samples": False}}
    if steps >= WARM_UP:
        notes["stage/rl"] = {"first": WARM_UP, "end": STEPS, "samples": True}
    rows = [*_groups(steps), *_evaluations()]
    trained = sum(isinstance(row, GroupRow) and row.state == "trained" for row in rows)
    notes["account"] = {
        "admitted": trained + lost(steps), "trained": trained, "filtered": lost(steps), "failed": 0, "dropped": 0, "outstanding": 0,
        "reasons": {"filtered(zero_signal)": lost(steps)} if lost(steps) else {},
    }  # fmt: skip
    ledger.write(rows, metrics, notes)


def _groups(steps: int) -> Iterator[LedgerRow]:
    number = 0
    for step in range(steps):
        filtered = 1 if step >= WARM_UP and (step - WARM_UP) % 10 == 0 else 0
        for index in range(2 + filtered):
            state = "trained" if index < 2 else "filtered"
            yield from _group(number, step, state)
            number += 1


def _group(number: int, step: int, state: str) -> Iterator[LedgerRow]:
    """Two siblings that were right and wrong; the second one got its last token from the version after."""
    id, stage = group_id(number), "rl" if step >= WARM_UP else "warm-up"
    is_rl, base = stage == "rl", max(step - 1, WARM_UP) if step >= WARM_UP else step
    reason, trained_at = ("", step) if state == "trained" else ("zero_signal", None)
    yield GroupRow(
        id,
        number,
        stage,
        "add",
        number,
        0,
        0,
        "addition",
        base,
        base + 1,
        state,
        reason,
        trained_at,
        "user: 07+45=",
        '"250"',
    )
    for sibling in range(2 if is_rl else 1):
        reward = (float(sibling == 0) if state == "trained" else 0.0) if is_rl else None
        parts = [{"name": "exact", "weight": 1.0, "value": reward, "failure": None, "info": {}}] if is_rl else []
        versions = (f"{base}x4" if sibling == 0 or base == step else f"{base}x3,{step}x1") if is_rl else ""
        yield TrajectoryRow(
            f"{id}/{sibling}",
            number,
            reward,
            json.dumps(parts),
            None,
            "done",
            4,
            versions,
            "250" if sibling == 0 else "[251]",
        )
        advantage = (0.7 if sibling == 0 else -0.7) if is_rl and state == "trained" else None
        yield SampleRow(f"{id}/{sibling}/0", number, 0, 10, 4, advantage)


def _evaluations() -> Iterator[LedgerRow]:
    for number, reward in enumerate((1.0, 0.0, None)):
        failure = "timeout" if reward is None else None
        yield EvaluationRow(f"{evaluation_id(number)}/0", 0, "heldout", 0, reward, failure, "250")
