"""Which steps belong to which stage, as the configuration says, and which stages sampled, as the ledger says.

Read by monitors (step of total), the summary, the curve and `relax status`. Loads no torch.
"""

from dataclasses import dataclass
from typing import Any

from relax.config.tree import RunConfig
from relax.services.ledger import Ledger


@dataclass(frozen=True, slots=True)
class StageOutline:
    """Steps `first .. end - 1`; version `end` is the last one that the stage publishes."""

    name: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class RunOutline:
    """The stages of a run, in order; at least one."""

    name: str
    stages: tuple[StageOutline, ...]

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.stages[-1].end

    def index_of(self, step: int) -> int:
        """The position of the stage that `step` belongs to; steps past the end belong to the last."""
        return next((i for i, stage in enumerate(self.stages) if step < stage.end), len(self.stages) - 1)


def outline_of(config: RunConfig) -> RunOutline:
    """Stages follow one another without gaps."""
    stages: list[StageOutline] = []
    first = 0
    for node in config.stages:
        stages.append(StageOutline(node.name, first, first + node.steps))
        first += node.steps
    return RunOutline(config.run.name, tuple(stages))


def sampling_stages(outline: RunOutline, ledger: Ledger) -> list[StageOutline]:
    """The stages that have begun and in which the policy sampled. RL begins where the first of them begins."""
    notes: list[tuple[StageOutline, Any]] = [(stage, ledger.note(f"stage/{stage.name}")) for stage in outline.stages]
    return [stage for stage, note in notes if note and note["samples"]]
