"""Where a run is: kept by the run, read by what it tells of itself."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class StageProgress:
    """The steps `first .. end - 1` of the stage under way, and the seconds spent in each stage."""

    first: int = 0
    end: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
