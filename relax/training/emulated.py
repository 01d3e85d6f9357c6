"""A training backend without a model: it counts, so that simulation runs the real trainer role in no time.

Used by `relax.simulation` and by tests of the services. What it exports depends on the number of applied steps and nothing
else, so a loaded version can be told from another.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax.core.batch import ForwardBackward, Measure, Shards, StepReport
from relax.core.completion import Floats, frozen
from relax.core.error import InvariantError, UserError
from relax.core.protocol import LossFn
from relax.core.weight import Tensor
from relax.training.config import EmulatedConfig


@dataclass(frozen=True, slots=True)
class CapturedCount:
    """Core's `Captured`."""

    applied: int
    stage: int

    def write(self, path: str) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "emulated.json").write_text(json.dumps(asdict(self)))


class EmulatedBackend:
    """A `TrainBackend`. Dependencies that real backends take (model, vocabulary, ...) are accepted and not used."""

    num_replicas = 1

    def __init__(self, config: EmulatedConfig, **dependencies: object) -> None:
        self._size = config.size
        self._applied = 0
        self._stage = 0

    def begin(self, optimizer: Any, schedule: Any, total_steps: int) -> None:
        self._stage += 1

    def forward_backward(self, shards: Shards, loss: LossFn) -> ForwardBackward:
        """Counts masked tokens and their weights; the loss is 0 and is not called."""
        rows = [row for batches in self._own(shards) for batch in batches for row in batch]
        weight = math.fsum(float(row.weights[row.mask].sum(dtype=np.float64)) for row in rows)
        tokens = sum(int(row.mask.sum()) for row in rows)
        measures = {"training/tokens/forward": Measure(sum(len(row) for row in rows), 1.0, "sum")} if rows else {}
        return ForwardBackward(0.0, weight, tokens, measures)

    def optim_step(self, normalizer: float) -> StepReport:
        if not 0 <= normalizer < math.inf:
            raise InvariantError("LO2", f"the normalizer of a step is {normalizer}, expected a number of at least 0")
        if self._stage == 0:
            raise InvariantError(
                "RR3", "a training backend was used before begin() gave it an optimizer and a schedule"
            )
        self._applied += normalizer > 0
        return StepReport(normalizer > 0, 0.0, 0.0)

    def logprobs(self, shards: Shards) -> list[list[list[Floats]]]:
        return [
            [[frozen(np.zeros(len(row), np.float32)) for row in batch] for batch in batches]
            for batches in self._own(shards)
        ]

    def export(self) -> Mapping[str, Tensor]:
        """One float32 tensor that holds the number of applied steps."""
        import torch

        return {"emulated.weight": torch.full((self._size,), float(self._applied))}

    def capture(self) -> "CapturedCount":
        return CapturedCount(self._applied, self._stage)

    def load(self, path: str) -> None:
        file = Path(path) / "emulated.json"
        if not file.is_file():
            raise UserError(f"{path} holds no usable training state: it was not saved by the emulated backend")
        saved = json.loads(file.read_text())
        self._applied, self._stage = saved["applied"], saved["stage"]

    def _own(self, shards: Shards) -> Shards:
        if len(shards) != self.num_replicas:
            raise InvariantError("TQ9", f"got {len(shards)} shards for {self.num_replicas} replica")
        return shards
