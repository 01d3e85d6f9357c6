"""What a seed means in tier 2: stages, engines, tasks and troubles of one run of the real services.

Drawn once per seed and printed with a failure. Sizes stay small: what is attacked is the order of things.
"""

from dataclasses import dataclass
from random import Random
from typing import Literal

from relax.core.protocol import LoadMode
from relax.services.gate_state import GatePolicy, OverAge

OVER_AGE: tuple[OverAge, ...] = ("wait", "mask", "requeue")


@dataclass(frozen=True, slots=True)
class StageScenario:
    """`space_groups` is how many groups fit on the bus beyond what the stage needs."""

    name: str
    algorithm: Literal["supervised", "grpo", "dapo"]
    steps: int
    groups_per_step: int
    max_staleness: int
    group_size: int
    max_lost: int
    kl_weight: float
    space_groups: int
    policy: GatePolicy = GatePolicy()


@dataclass(frozen=True, slots=True)
class FleetScenario:
    engines: int
    slots: int
    mode: LoadMode
    mean_s: float
    sigma: float
    load_s: float
    request_failure: float
    load_failure: float
    load_damage: float


@dataclass(frozen=True, slots=True)
class TaskScenario:
    """`delay_s` is what a turn or a judgement takes; at 0 many things happen in one instant.

    `reward_stall` is a judge's chance to outlive its role's lease.
    """

    turns: int
    delay_s: float
    branch_rate: float
    timeout_s: float
    max_attempts: int
    on_failure: Literal["survivors", "drop"]
    environment_failure: float
    reward_failure: float
    reward_stall: float
    bad_reference: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """`releases` leases are taken from their holders, `drops` groups end in their middle; `strict` copies and reorders calls.

    The whole run is killed up to `kills` times and resumed from a snapshot of every `snapshot_every`-th step and the journal.
    """

    seed: int
    stages: tuple[StageScenario, ...]
    fleet: FleetScenario
    task: TaskScenario
    compute_s: float
    nonfinite_rate: float
    in_order: bool
    strict: bool
    releases: int
    drops: int
    kills: int
    snapshot_every: int


def draw_scenario(seed: int) -> Scenario:
    """The same seed draws the same scenario."""
    random = Random(f"scenario {seed}")
    kinds = random.choice((("policy",), ("supervised", "policy"), ("policy", "policy")))
    return Scenario(
        seed=seed,
        stages=tuple(_stage(random, index, kind) for index, kind in enumerate(kinds)),
        fleet=_fleet(random),
        task=_task(random),
        compute_s=random.choice((0.0, 0.05, 0.5)),
        nonfinite_rate=_rate(random, 0.1),
        in_order=random.random() < 0.3,
        strict=random.random() < 0.3,
        releases=random.choice((0, 0, 3, 10)),
        drops=random.choice((0, 0, 2, 5)),
        kills=random.choice((0, 1, 1, 2, 4)),
        snapshot_every=random.choice((1, 1, 2, 3)),
    )


def _rate(random: Random, *rates: float) -> float:
    return 0.0 if random.random() < 0.5 else random.choice(rates)


def _stage(random: Random, index: int, kind: str) -> StageScenario:
    supervised = kind == "supervised"
    max_staleness = random.randint(0, 1 if supervised else 3)
    return StageScenario(
        name=f"stage-{index}",
        algorithm="supervised" if supervised else random.choice(("grpo", "dapo")),
        steps=random.randint(2, 5),
        groups_per_step=random.randint(1, 5),
        max_staleness=max_staleness,
        group_size=1 if supervised else random.randint(2, 4),
        max_lost=random.choice((1, 2, 5, 1000)),
        kl_weight=random.choice((0.0, 0.0, 0.1)),
        space_groups=random.choice((0, 1, 5)),
        policy=GatePolicy() if supervised else _policy(random, max_staleness),
    )


def _policy(random: Random, max_staleness: int) -> GatePolicy:
    over_age = random.choice(OVER_AGE) if max_staleness else "wait"
    return GatePolicy(over_age, random.choice((0, 1, 2)), random.choice((0, 0, 0, 1, 3)))


def _fleet(random: Random) -> FleetScenario:
    return FleetScenario(
        engines=random.randint(1, 4),
        slots=random.randint(1, 6),
        mode=random.choice(("recompute", "keep", "drain", "abort")),
        mean_s=random.choice((0.0, 0.5, 4.0)),
        sigma=random.choice((0.3, 1.2)),
        load_s=random.choice((0.0, 0.5, 3.0)),
        request_failure=_rate(random, 0.02, 0.1),
        load_failure=_rate(random, 0.1, 0.2),
        load_damage=_rate(random, 0.1, 0.2),
    )


def _task(random: Random) -> TaskScenario:
    return TaskScenario(
        turns=random.randint(1, 3),
        delay_s=random.choice((0.0, 0.1)),
        branch_rate=_rate(random, 0.3),
        timeout_s=random.choice((6.0, 30.0, 120.0)),
        max_attempts=random.randint(1, 2),
        on_failure=random.choice(("survivors", "drop")),
        environment_failure=_rate(random, 0.02, 0.1),
        reward_failure=_rate(random, 0.05, 0.2),
        reward_stall=_rate(random, 0.01),
        bad_reference=_rate(random, 0.1),
    )
