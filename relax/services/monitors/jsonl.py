"""Metrics as lines of JSON in the run directory: `metrics.jsonl`, and `samples.jsonl` for samples.

Built by the hub, and called on its own thread only. Each line is whole and flushed. A resumed run first takes back what it
measures again: all from the step on that it begins with, but the evaluation of the weights that this step began with.
"""

import json
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import IO

from relax.core.message import Json
from relax.services.directory import RunDirectory
from relax.services.file import write_whole
from relax.services.monitors.config import JsonlConfig
from relax.services.outline import RunOutline


class JsonlMonitor:
    """A line is `{"step": 12, "time": <unix seconds>, "<metric>": <number>, ...}`. A step may have more than one line."""

    def __init__(self, config: JsonlConfig, *, directory: RunDirectory, outline: RunOutline) -> None:
        self._paths = {"metrics": directory.metrics, "samples": directory.root / "samples.jsonl"}
        self._files: dict[str, IO[str]] = {}
        self._has_begun = False

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._begin(step, metrics)
        self._write("metrics", [{"step": step, "time": round(time.time(), 3), **metrics}])

    async def log_samples(self, step: int, samples: Sequence[Mapping[str, Json]]) -> None:
        self._begin(step, ())
        self._write("samples", [{"step": step, **sample} for sample in samples])

    async def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _begin(self, step: int, names: Container[str]) -> None:
        """Before the first entry, which is of `step` and has the metrics `names`."""
        if not self._has_begun:
            self._has_begun = True
            for path in self._paths.values():
                if path.exists():
                    _take_back(path, step, names)

    def _write(self, kind: str, lines: Sequence[Mapping[str, Json]]) -> None:
        if kind not in self._files:
            path = self._paths[kind]
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[kind] = path.open("a", encoding="utf-8")
        file = self._files[kind]
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        file.flush()


def _take_back(path: Path, step: int, names: Container[str]) -> None:
    """Remove the lines of `step` and later, and a torn last one; of `step` itself, evaluations not among `names` stay."""
    lines = path.read_text("utf-8").splitlines(keepends=True)
    kept = [_kept(line, step, names) for line in lines]
    if kept != lines:
        write_whole(path, "".join(kept))


def _kept(line: str, step: int, names: Container[str]) -> str:
    """What stays of a line: all, its evaluation or nothing."""
    try:
        values: dict[str, Json] = json.loads(line)
        at = values["step"]
        if at < step:
            return line if line.endswith("\n") else ""
        measured = {name for name in values if name.startswith("eval/") and name not in names}
        if at > step or not measured or not line.endswith("\n"):
            return ""
        return (
            json.dumps({key: value for key, value in values.items() if key in ("step", "time") or key in measured})
            + "\n"
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
