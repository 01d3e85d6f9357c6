"""Metrics and samples as TensorBoard event files in the run directory; evaluations in the folder `eval` inside.

Built by the hub, and called on its own thread only. A resumed run tells TensorBoard to forget what it measures again: all from
the step on that it begins with, but the evaluation of the weights that this step began with. TensorBoard forgets a folder's
values by step alone, hence two folders.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax.core.message import Json
from relax.services.directory import RunDirectory
from relax.services.monitors.config import TensorboardConfig
from relax.services.outline import RunOutline


class TensorboardMonitor:
    """View with `tensorboard --logdir <run directory>/tensorboard`."""

    def __init__(self, config: TensorboardConfig, *, directory: RunDirectory, outline: RunOutline) -> None:
        self._folder, self._evaluations = directory.tensorboard, directory.tensorboard / "eval"
        self._flush_s = config.flush_s
        self._writers: dict[Path, Any] = {}
        self._has_begun = False

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._begin(step, metrics)
        for name, value in metrics.items():
            folder = self._evaluations if name.startswith("eval/") else self._folder
            self._writer(folder).add_scalar(name, value, step)

    async def log_samples(self, step: int, samples: Sequence[Mapping[str, Json]]) -> None:
        self._begin(step, ())
        for index, sample in enumerate(samples):
            text = "\n\n".join(f"**{key}** {value}" for key, value in sample.items())
            self._writer(self._folder).add_text(f"sample/{index}", text, step)

    async def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _begin(self, step: int, names: Iterable[str]) -> None:
        """Before the first entry, which is of `step` and has the metrics `names`."""
        if self._has_begun:
            return
        self._has_begun = True
        is_repeated = any(name.startswith("eval/") for name in names)
        for folder, forgotten in ((self._folder, step), (self._evaluations, step if is_repeated else step + 1)):
            if any(folder.glob("*.tfevents.*")):
                self._open(folder, forgotten)

    def _writer(self, folder: Path) -> Any:
        return self._writers.get(folder) or self._open(folder, None)

    def _open(self, folder: Path, forgotten: int | None) -> Any:
        """A new event file; values of step `forgotten` and later in the folder's other files count no more."""
        from torch.utils.tensorboard import SummaryWriter

        self._writers[folder] = SummaryWriter(str(folder), purge_step=forgotten, flush_secs=self._flush_s)
        return self._writers[folder]
