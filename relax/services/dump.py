"""Batches of steps whose loss or gradient was not finite, written for the person who has to find out why (LO6).

Called by the trainer role, at most as often as the run allows such steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relax.core.batch import TrainRow


@dataclass(frozen=True, slots=True)
class BatchDump:
    """Writes `<folder>/step-000123.npz`: for each row id `ID/token_ids`, `ID/mask`, `ID/weights` and each column."""

    folder: Path

    def __call__(self, step: int, rows: Sequence[TrainRow]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        arrays = {
            f"{row.id}/{name}": values
            for row in rows
            for name, values in {
                "token_ids": row.token_ids,
                "mask": row.mask,
                "weights": row.weights,
                **row.columns,
            }.items()
        }
        np.savez(self.folder / f"step-{step:06d}.npz", **arrays)  # type: ignore[arg-type]
