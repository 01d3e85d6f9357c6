"""Evaluates a checkpoint of a run on the run's own evaluation sets, outside the run.

Called by `relax eval`. The same engine, episodes, rewards and request seeds as during training, so the numbers agree with the
run's own; the run directory is only read, but for the report.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from relax.config.tree import RunConfig
from relax.core.error import UserError
from relax.core.message import Json
from relax.data.quarantine import Quarantine
from relax.runtime.task import TaskSet
from relax.services.assembly import Assembly
from relax.services.directory import RunDirectory
from relax.services.publisher import Publisher
from relax.services.resume import BACKEND_FOLDER
from relax.services.roles.evaluation import Evaluation, EvaluationResult, EvaluationSet
from relax.services.unfinished import Unfinished
from relax.training.checkpoint import read_meta


def report_path(directory: RunDirectory, step: int) -> Path:
    """Where the report of a checkpoint's evaluation lies."""
    return directory.root / "evaluations" / f"step-{step:06d}.json"


def unfinished_path(directory: RunDirectory, step: int) -> Path:
    """Where the samples of an evaluation lie until its report is written."""
    return report_path(directory, step).with_suffix(".unfinished.jsonl")


async def evaluate(
    config: RunConfig, directory: RunDirectory, checkpoint: Path, sets: Sequence[str] = ()
) -> EvaluationResult:
    """Score `checkpoint` on the sets named (all when none is) and write the report.

    Goes on with what an interrupted call of the same evaluation has left.
    """
    step = int(read_meta(checkpoint)["step"])
    with Unfinished(unfinished_path(directory, step), _identity(config, checkpoint, step, sets)) as unfinished:
        result = await _evaluate(config, checkpoint, step, sets, unfinished)
        _write_report(directory, checkpoint, result)
        unfinished.remove()
    return result


async def _evaluate(
    config: RunConfig, checkpoint: Path, step: int, sets: Sequence[str], unfinished: Unfinished
) -> EvaluationResult:
    assembly = Assembly(_with_model(config, checkpoint), Quarantine())
    results: asyncio.Queue[EvaluationResult] = asyncio.Queue()
    try:
        evaluation = _evaluation(assembly, _chosen(assembly.evaluation_sets(), sets), results, unfinished)
        publisher = Publisher(assembly.store, assembly.backend, assembly.compute("trainer"), [], assembly.probe)
        await publisher.first(step)
        async with TaskSet("evaluation") as tasks:
            tasks.start("evaluation", evaluation.run(), endless=True)
            await evaluation.request(publisher.version, step)
            await evaluation.idle()
    finally:
        await assembly.close()
    return results.get_nowait()


def _identity(config: RunConfig, checkpoint: Path, step: int, sets: Sequence[str]) -> dict[str, Json]:
    """Everything that a sample of this evaluation depends on: two evaluations of the same identity have the same samples."""
    tree = config.model_dump(mode="json")
    weights = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(checkpoint.rglob("*.safetensors"))
    ]
    return {
        "checkpoint": str(checkpoint),
        "step": step,
        "weights": weights,
        "sets": sorted(sets),
        "config": {name: tree[name] for name in ("run", "model", "data", "tasks", "rollout", "eval")},
    }


def _evaluation(
    assembly: Assembly, sets: Sequence[EvaluationSet], results: asyncio.Queue[EvaluationResult], unfinished: Unfinished
) -> Evaluation:
    return Evaluation(
        assembly.engine("evaluation"),
        assembly.store,
        assembly.renderer,
        assembly.tasks,
        sets,
        assembly.limits,
        assembly.slots,
        number=lambda: 0,
        report=results.put,
        done=dict(unfinished.rows),
        on_sample=unfinished.add,
        media=assembly.supply.media,
    )


def _with_model(config: RunConfig, checkpoint: Path) -> RunConfig:
    """The run's tree, with the checkpoint's weights as the policy."""
    model = config.model.model_copy(
        update={
            "path": str(checkpoint / BACKEND_FOLDER),
            "source": "directory",
            "weights": "pretrained",
            "tokenizer": config.model.tokenizer or config.model.path,
        }
    )
    return config.model_copy(update={"model": model})


def _chosen(sets: Sequence[EvaluationSet], names: Sequence[str]) -> list[EvaluationSet]:
    known = {item.name: item for item in sets}
    if not known:
        raise UserError("the run's configuration has no evaluation sets; add some under eval.sets")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"no evaluation set is named {unknown[0]!r}; this run has {', '.join(known)}")
    return [item for item in sets if not names or item.name in names]


def _write_report(directory: RunDirectory, checkpoint: Path, result: EvaluationResult) -> None:
    path = report_path(directory, result.step)
    path.parent.mkdir(exist_ok=True)
    rows: list[Json] = [asdict(row) for row in result.rows]
    directory.write_json(
        path, {"checkpoint": str(checkpoint), "step": result.step, "metrics": result.metrics, "samples": rows}
    )
