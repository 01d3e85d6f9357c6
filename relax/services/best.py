"""Which checkpoints of a run are kept, and which is the best: retention by what the ledger knows (RR4).

Used by the run, which prunes by it, and by `relax export --best`, so that both mean the same checkpoint. A checkpoint of step k
holds weight version k, and an evaluation of that version is a metric of step k; where none was made at k the last one before it
counts, so the periods of evaluations and checkpoints need not divide each other (B11).
"""

import sqlite3
from bisect import bisect_right
from collections.abc import Sequence

from relax.config.suggestion import suggestion
from relax.config.tree import RunConfig
from relax.core.error import ConfigError, UserError
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger
from relax.services.metric import metric_of
from relax.training.checkpoint import CheckpointStore, Score


def open_checkpoints(config: RunConfig, directory: RunDirectory) -> CheckpointStore:
    """The store of a run's checkpoints, with the retention that its configuration asks for."""
    node = config.training.checkpoint
    best = node.keep_best
    if best is None:
        return CheckpointStore(directory.checkpoints, node.keep_last, node.keep_every)
    score = metric_score(directory, best.metric)
    return CheckpointStore(directory.checkpoints, node.keep_last, node.keep_every, score, best.mode)


def metric_score(directory: RunDirectory, metric: str) -> Score:
    """A checkpoint is worth the last value of `metric` known at or before its step; None when there is none, or no ledger.

    Each call opens the ledger for reading, so it may come from any thread. Raises OSError when it cannot be read now.
    """

    def score(step: int) -> float | None:
        try:
            ledger = Ledger(directory.ledger, read_only=True)
        except UserError:
            return None
        try:
            return last_known(ledger.metric(metric), step)
        except sqlite3.Error as error:
            raise OSError(f"{directory.ledger} cannot be read: {error}") from error
        finally:
            ledger.close()

    return score


def last_known(points: Sequence[tuple[int, float | None]], step: int) -> float | None:
    """The value of the last point at or before `step`; `points` are in step order, and one without a number is passed over."""
    known = [(at, value) for at, value in points if value is not None]
    index = bisect_right(known, step, key=lambda point: point[0])
    return known[index - 1][1] if index else None


def check_retention(config: RunConfig) -> None:
    """Raises ConfigError when `keep_best` names a metric that the run will never have; known ones are a choice of the usual."""
    best = config.training.checkpoint.keep_best
    if best is None:
        return
    names = [item.name for item in config.eval.sets]
    known = [*(f"eval/{name}/reward" for name in names), "reward/mean", "train/loss"]
    parts = best.metric.split("/")
    if metric_of(best.metric) is None or (parts[0] == "eval" and parts[1] not in names):
        raise ConfigError(
            [
                f"training.checkpoint.keep_best.metric: this run has no metric {best.metric!r}; {suggestion(best.metric, known)}"
            ]
        )
