"""Metrics and samples as TensorBoard event files in the run directory.

Built by the hub, and called on its own thread only. A resumed run tells TensorBoard to forget the steps that it trains again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from relax.core.message import Json
from relax.services.directory import RunDirectory
from relax.services.monitors.config import TensorboardConfig
from relax.services.outline import RunOutline


class TensorboardMonitor:
    """View with `tensorboard --logdir <run directory>/tensorboard`."""

    def __init__(self, config: TensorboardConfig, *, directory: RunDirectory, outline: RunOutline) -> None:
        self._folder, self._flush_s = directory.tensorboard, config.flush_s
        self._writer: Any = None

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._open(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    async def log_samples(self, step: int, samples: Sequence[Mapping[str, Json]]) -> None:
        writer = self._open(step)
        for index, sample in enumerate(samples):
            text = "\n\n".join(f"**{key}** {value}" for key, value in sample.items())
            writer.add_text(f"sample/{index}", text, step)

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            is_resumed = self._folder.exists() and any(self._folder.iterdir())
            self._writer = SummaryWriter(
                str(self._folder), purge_step=step if is_resumed else None, flush_secs=self._flush_s
            )
        return self._writer
