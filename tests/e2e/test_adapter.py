"""A whole run that trains an adapter: supervised, then RL against a reference; stopped, resumed, evaluated."""

from pathlib import Path
from typing import Any

import pytest

from relax.model.load import load_model
from relax.services.directory import RunDirectory
from relax.services.evaluate import evaluate
from relax.services.resume import BACKEND_FOLDER
from relax.training.checkpoint import CheckpointStore
from tests.e2e.tiny import ADDITION, run_root, tiny_config, train

LORA: dict[str, Any] = {
    "backend": {"type": "torch", "lora": {"rank": 4, "alpha": 8}},
    "checkpoint": {"every": 2, "keep_last": 9},
}
STAGES: list[dict[str, Any]] = [
    {
        "name": "warm-up",
        "steps": 3,
        "groups_per_step": 16,
        "algorithm": {"type": "supervised", "group_size": 1},
        "optimizer": {"type": "adamw", "lr": 2e-3},
    },
    {
        "name": "rl",
        "steps": 5,
        "groups_per_step": 4,
        "algorithm": {"type": "grpo", "group_size": 4, "kl_weight": 0.1},
    },
]
EVAL: dict[str, Any] = {
    "sets": [{"name": "heldout", "source": {"name": "heldout", "args": {"digits": 1, "split": "heldout"}, **ADDITION}}]
}


@pytest.mark.parametrize("stop_after", [1, 5])
async def test_an_adapter_run_is_stopped_resumed_and_evaluated(stop_after: int, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, training=LORA, stages=STAGES, eval=EVAL)
    await train(config, stop_after=stop_after)
    summary, watcher = await train(config, resume=True)
    assert summary["ledger"]["balances"]
    gaps = [metrics["weights/probe_gap"] for metrics in watcher.metrics.values() if "weights/probe_gap" in metrics]
    assert gaps
    assert max(gaps) < 1e-5, "the engines sample from what the trainer scores"

    divergence = [m["policy/kl_reference"] for _, m in sorted(watcher.metrics.items()) if "policy/kl_reference" in m]
    assert divergence[-1] > 1e-7
    if stop_after < 3:
        assert divergence[0] < 1e-10, "the reference is the policy that its stage began with, adapter included"

    newest = CheckpointStore(run_root(config) / "checkpoints").newest()
    assert newest is not None
    assert not (newest / BACKEND_FOLDER / "model.safetensors").exists()
    load_model(newest / BACKEND_FOLDER, "pretrained", "float32")

    result = await evaluate(config, RunDirectory(run_root(config)), newest)
    assert result.step == 8
    assert result.metrics["eval/heldout/reward"] == pytest.approx(summary["eval/final"]["heldout"])
