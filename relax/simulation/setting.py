"""What a seed means: the sizes, rates and troubles of one simulated schedule.

Drawn once per seed, before anything runs, and printed with a failure. Every trouble is absent in many seeds, so that each
is also met alone.
"""

from dataclasses import dataclass
from random import Random

from relax.core.protocol import LoadMode
from relax.services.gate_state import OverAge

_MODES: tuple[LoadMode, ...] = ("recompute", "recompute", "keep", "drain", "abort")


@dataclass(frozen=True, slots=True)
class StageSetting:
    """`max_lost` groups may end untrained before the step closes short; `short_rate` is a step's chance to close early anyhow.

    `noop_rate` is a step's chance to apply nothing (ST7). `space_groups` is how many groups fit on the bus.
    """

    name: str
    steps: int
    groups_per_step: int
    max_staleness: int
    siblings: int
    turns: int
    max_lost: int
    short_rate: float
    filter_rate: float
    noop_rate: float
    space_groups: int
    drops_failed: bool
    has_reference: bool
    over_age: OverAge
    max_requeues: int
    oversample: int


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """`lag_s` bounds what a load takes; the rates are shares of loads, fetches and requests that go wrong."""

    engines: int
    slots: int
    mode: LoadMode
    sigma: float
    lag_s: float
    request_failure: float
    load_failure: float
    load_damage: float
    fetch_failure: float
    pause_failure: float
    crashes: int


@dataclass(frozen=True, slots=True)
class RoleSetting:
    """`stall_rate` is a holder's chance to outlive its lease.

    `lease_share` scales rollout leases against the time limit of a sibling, which may wait as long for its place.
    """

    rollouts: int
    rewards: int
    places: int
    timeout_s: float
    max_attempts: int
    stall_rate: float
    lease_share: float
    reward_failure: float
    crashes: int
    trainer_crashes: int
    drops: int


@dataclass(frozen=True, slots=True)
class DiskSetting:
    """A snapshot follows every `snapshot_every`-th step and takes up to `snapshot_s`.

    The whole run is killed `kills` times, first anywhere, then after up to `gap` more events each; `torn` is a kill's chance to lose
    its last event, `lost` a restart's chance to find the newest snapshot gone.
    Gate and bus alone are brought back `rebuilds` times.
    """

    snapshot_every: int
    snapshot_s: float
    kills: int
    gap: int
    torn: float
    lost: float
    rebuilds: int


@dataclass(frozen=True, slots=True)
class Setting:
    seed: int
    stages: tuple[StageSetting, ...]
    engine: EngineSetting
    role: RoleSetting
    disk: DiskSetting


def draw_setting(seed: int) -> Setting:
    """The same seed draws the same setting."""
    random = Random(f"setting {seed}")
    num_stages = random.choice((1, 1, 2, 2, 3))
    disk = _disk(random)
    stages = tuple(_stage(random, index, num_stages, disk.snapshot_every) for index in range(num_stages))
    return Setting(seed, stages, _engine(random), _role(random), disk)


def _rate(random: Random, *rates: float) -> float:
    """None in half of the seeds, else one of `rates`."""
    return 0.0 if random.random() < 0.5 else random.choice(rates)


def _disk(random: Random) -> DiskSetting:
    kills = random.choice((0, 0, 1, 2, 4))
    return DiskSetting(
        snapshot_every=random.choice((1, 2, 3)),
        snapshot_s=random.choice((0.0, 0.5, 3.0)),
        kills=kills,
        gap=random.choice((20, 100, 300)),
        torn=random.choice((0.0, 0.3)),
        lost=random.choice((0.0, 0.3)),
        rebuilds=random.choice((0, 0, 2)),
    )


def _stage(random: Random, index: int, num_stages: int, snapshot_every: int) -> StageSetting:
    groups_per_step = random.randint(1, 6)
    max_staleness = random.choice((0, 1, 1, 2, 3, 4))
    steps = max(2, (10 if groups_per_step > 3 else 16) // (num_stages + 1))
    oversample = random.choice((0, 0, 0, 0, 1, 2, groups_per_step))
    capacity = (max_staleness + 1 + snapshot_every) * groups_per_step + oversample
    return StageSetting(
        name=f"stage-{index}",
        steps=random.randint(2, steps),
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        siblings=random.choice((1, 2, 2, 3, 4)),
        turns=random.choice((1, 1, 2, 3)),
        max_lost=random.choice((1, 1, 2, 3, 1000)),
        short_rate=_rate(random, 0.1, 0.3),
        filter_rate=_rate(random, 0.1, 0.4, 0.7),
        noop_rate=_rate(random, 0.2),
        space_groups=capacity + random.choice((-max_staleness, 0, 1, 3)) * groups_per_step,
        drops_failed=random.random() < 0.5,
        has_reference=random.random() < 0.3,
        over_age=random.choice(("wait", "mask", "mask", "requeue", "requeue")) if max_staleness else "wait",
        max_requeues=random.choice((0, 1, 2)),
        oversample=oversample,
    )


def _engine(random: Random) -> EngineSetting:
    return EngineSetting(
        engines=random.randint(1, 5),
        slots=random.randint(1, 6),
        mode=random.choice(_MODES),
        sigma=random.choice((0.3, 1.0, 2.0, 3.0)),
        lag_s=random.choice((0.0, 1.0, 5.0, 20.0)),
        request_failure=_rate(random, 0.02, 0.1),
        load_failure=_rate(random, 0.1, 0.3),
        load_damage=_rate(random, 0.1, 0.3),
        fetch_failure=_rate(random, 0.1),
        pause_failure=_rate(random, 0.1),
        crashes=random.choice((0, 0, 1, 3)),
    )


def _role(random: Random) -> RoleSetting:
    return RoleSetting(
        rollouts=random.randint(1, 2),
        rewards=random.randint(1, 2),
        places=random.choice((4, 8, 64)),
        timeout_s=random.choice((8.0, 20.0, 60.0)),
        max_attempts=random.randint(1, 3),
        stall_rate=_rate(random, 0.02, 0.1),
        lease_share=random.choice((2.1, 3.0)),
        reward_failure=_rate(random, 0.05, 0.2),
        crashes=random.choice((0, 0, 2, 4)),
        trainer_crashes=random.choice((0, 0, 1, 3)),
        drops=random.choice((0, 0, 2, 6)),
    )
