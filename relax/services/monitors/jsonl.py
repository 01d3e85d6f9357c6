"""Metrics as lines of JSON in the run directory: `metrics.jsonl`, and `samples.jsonl` for samples.

Built by the hub, and called on its own thread only. Each line is whole and flushed; a resumed run first takes back the lines of
the steps that it trains again.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from relax.core.message import Json
from relax.services.directory import RunDirectory
from relax.services.monitors.config import JsonlConfig
from relax.services.outline import RunOutline


class JsonlMonitor:
    """A line is `{"step": 12, "time": <unix seconds>, "<metric>": <number>, ...}`. A step may have more than one line."""

    def __init__(self, config: JsonlConfig, *, directory: RunDirectory, outline: RunOutline) -> None:
        self._paths = {"metrics": directory.metrics, "samples": directory.root / "samples.jsonl"}
        self._files: dict[str, IO[str]] = {}

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("metrics", step, [{"step": step, "time": round(time.time(), 3), **metrics}])

    async def log_samples(self, step: int, samples: Sequence[Mapping[str, Json]]) -> None:
        self._write("samples", step, [{"step": step, **sample} for sample in samples])

    async def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, kind: str, step: int, lines: Sequence[Mapping[str, Json]]) -> None:
        if kind not in self._files:
            self._files[kind] = _open_before(self._paths[kind], step)
        file = self._files[kind]
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        file.flush()


def _open_before(path: Path, step: int) -> IO[str]:
    """The file, opened for appending, without the lines of `step` and later and without a torn last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        lines = path.read_text("utf-8").splitlines(keepends=True)
        kept = [line for line in lines if _is_before(line, step)]
        if len(kept) != len(lines):
            aside = path.with_name(f".{path.name}")
            aside.write_text("".join(kept), "utf-8")
            aside.replace(path)
    return path.open("a", encoding="utf-8")


def _is_before(line: str, step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["step"] < step
    except (ValueError, KeyError, TypeError):
        return False
