"""Small real runs: the quickstart's parts with few steps, as the end-to-end tests need them."""

import asyncio
from pathlib import Path
from typing import Any

import yaml

from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.core.message import Json
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger
from relax.services.monitors.hub import MonitorHub
from relax.services.run import Run

ADDITION = {"type": "generator", "function": "relax.data.arithmetic:addition", "task": "addition"}


def distinct_characters(response: str) -> float:
    """A reward that an untrained policy already gets some of, so that steps have a signal."""
    return float(len(set(response)))


def tiny_tree(directory: Path, **sections: Any) -> dict[str, Any]:
    """Three supervised and five GRPO steps on two-digit addition; `sections` replace or extend top-level sections."""
    tree: dict[str, Any] = {
        "schema": 1,
        "run": {"name": "tiny", "directory": str(directory)},
        "model": {"path": "recipes/models/qwen3-char", "weights": "random"},
        "data": {
            "sources": [{"name": "addition", "args": {"digits": 1, "split": "train"}, **ADDITION}],
            "max_prompt_tokens": 12,
            "chat_template_args": {"plain": True},
        },
        "tasks": {"addition": {"rewards": [{"type": "tests.e2e.tiny:distinct_characters", "in_process": True}]}},
        "stages": [
            {
                "name": "warm-up",
                "steps": 3,
                "groups_per_step": 16,
                "algorithm": {"type": "supervised", "group_size": 1},
                "optimizer": {"type": "adamw", "lr": 2e-3},
            },
            {"name": "rl", "steps": 5, "groups_per_step": 4, "algorithm": {"type": "grpo", "group_size": 4}},
        ],
        "rollout": {"max_staleness": 1, "engine": {"type": "torch", "slots": 32}, "sampling": {"max_tokens": 3}},
        "training": {"optimizer": {"type": "adamw", "lr": 4e-4}, "checkpoint": {"every": 2, "keep_last": 2}},
        "monitors": [],
    }
    for name, section in sections.items():
        tree[name] = {**tree[name], **section} if isinstance(tree.get(name), dict) else section
    return tree


def tiny_config(directory: Path, **sections: Any) -> RunConfig:
    path = directory / "recipe.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tiny_tree(directory, **sections)))
    return load_config([path])


class Watcher(MonitorHub):
    """A hub that keeps every step's metrics, and can act on one."""

    def __init__(self) -> None:
        super().__init__([])
        self.metrics: dict[int, dict[str, float]] = {}
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def step(self, step: int, metrics: Any) -> None:
        self.metrics.setdefault(step, {}).update(metrics)
        for number, future in self._waiting:
            if number in self.metrics and not future.done():
                future.set_result(None)

    async def reached(self, step: int) -> None:
        """Return once something of `step` was measured."""
        if step not in self.metrics:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((step, future))
            await future


async def train(
    config: RunConfig, *, resume: bool = False, stop_after: int | None = None
) -> tuple[dict[str, Json], Watcher]:
    """Run it; with `stop_after`, ask for a stop once that step has been reported."""
    hub = Watcher()
    with RunDirectory(run_root(config)) as directory:
        run = Run(config, directory, hub, resume=resume)
        if stop_after is not None:
            _stop_after(run, hub, stop_after)
        return await run.execute(), hub


def _stop_after(run: Run, hub: Watcher, step: int) -> None:
    report = hub.step

    def step_and_stop(number: int, metrics: Any) -> None:
        report(number, metrics)
        if number >= step and "train/groups" in metrics:
            asyncio.get_running_loop().create_task(run.stop(), name="stop")

    hub.step = step_and_stop  # type: ignore[method-assign]


def run_root(config: RunConfig) -> Path:
    return Path(config.run.directory) / config.run.name


def open_ledger(config: RunConfig) -> Ledger:
    return Ledger(run_root(config) / "ledger.sqlite", read_only=True)


def final_weights(config: RunConfig) -> dict[str, Any]:
    """The tensors of the newest checkpoint."""
    from safetensors.torch import load_file

    newest = sorted((run_root(config) / "checkpoints").glob("step-*"))[-1]
    return load_file(newest / "model" / "model.safetensors")
