"""Step time of the real services with emulated stages, against the shortest that the stage times and the window allow.

    python -m benchmarks.pipeline [--quick]

Stage times follow a published profile: of a colocated step rollout takes 65 % (heavy tail, lognormal), reward 3, reference 7, old
logprobs 7 and training 18; the last two share the trainer's device. Virtual time, so figures are exact and repeat. Varied: streaming,
`max_staleness`, the share of filtered groups, the tail, and the share of training. Last line: one JSON object.
"""

import argparse
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist

from benchmarks.bound import Recurrence, StageTimes, Window, resource_floor
from benchmarks.emulation import EmulatedRun, Profile, emulate
from benchmarks.outcome import Aim, report

ROLLOUT, REWARD, REFERENCE, OLD_LOGPROBS, TRAINING = 65.0, 3.0, 7.0, 7.0, 18.0
"""Seconds of a colocated step of 100; the rollout's share includes the wait for its longest request."""
STALENESS, FILTERS = (0, 1, 2, 4), (0.0, 0.5, 0.8)
SIGMAS, TRAINING_SHARES = (0.5, 1.0, 1.3), (18.0, 40.0, 70.0)
WARM = 4
"""Steps that fill the pipeline, left out at both ends."""
SLACK_AIM = 1.05


@dataclass(frozen=True)
class Setting:
    """What is varied; the rest follows from the profile."""

    max_staleness: int
    streaming: bool = True
    filtered: float = 0.0
    sigma: float = 1.0
    training: float = TRAINING


@dataclass(frozen=True)
class Result:
    """Seconds per step: measured, the shortest the window allows, and what the busiest stage needs (`stage`).

    `slack` is the time of all steps over their bound's, from an empty pipeline on: never below 1 but for rounding.
    """

    setting: Setting
    measured: float
    bound: float
    floor: float
    stage: str
    slack: float


def profile_of(setting: Setting, steps: int, mean_s: float) -> Profile:
    """`mean_s` is a request's mean running time in a step whose rollout takes `ROLLOUT`; the stages share what training leaves."""
    profile = Profile(steps=steps)
    count = profile.trajectories_per_step
    scale = (100.0 - setting.training) / (100.0 - TRAINING)
    return replace(
        profile,
        max_staleness=setting.max_staleness,
        streaming=setting.streaming,
        filtered=setting.filtered,
        sigma=setting.sigma,
        mean_s=mean_s * scale,
        reward_s=REWARD * scale / count,
        reference_s=REFERENCE * scale / count,
        train_s=(setting.training + OLD_LOGPROBS * scale) / count,
    )


def calibrate(sigma: float = 1.0, steps: int = 400) -> float:
    """The mean running time with which a step's requests, all sent at once, take `ROLLOUT` seconds to their last."""
    profile = Profile(steps=steps)
    quantiles = NormalDist()
    count = profile.trajectories_per_step * steps
    # A low-discrepancy sequence: the same on every machine, and even tails.
    normal = [quantiles.inv_cdf((0.5 + index * 0.6180339887498949) % 1 or 0.5) for index in range(count)]
    durations = [2.718281828459045 ** (sigma * value - sigma**2 / 2) for value in normal]
    size = profile.group_size

    def requests(number: int) -> tuple[Sequence[float], bool]:
        return durations[number * size : (number + 1) * size], False

    times = StageTimes(profile.engines * profile.slots, 0.0, 0.0, 0.0)
    window = Window(profile.groups_per_step, 0, steps, streaming=True)
    return ROLLOUT * steps / Recurrence(requests, times, window).run()[-1]


def measure(setting: Setting, steps: int, mean_s: float) -> Result:
    profile = profile_of(setting, steps + 2 * WARM, mean_s)
    return emulate(profile, lambda run: compare(run, setting))


def compare(run: EmulatedRun, setting: Setting) -> Result:
    """A finished run against the recurrence over its own requests."""
    profile, filtered = run.profile, run.filtered_groups()
    times = StageTimes(profile.engines * profile.slots, profile.reward_s, profile.reference_s, profile.train_s)
    window = Window(profile.groups_per_step, profile.max_staleness, profile.steps - WARM, profile.streaming)

    def requests(number: int) -> tuple[list[float], bool]:
        # What the run did not admit before its end is as long as a mean request.
        durations = [run.durations.get((number, sibling), profile.mean_s) for sibling in range(profile.group_size)]
        return durations, number in filtered

    bound = Recurrence(requests, times, window).run()
    judged = len(run.durations)
    trained = judged - len(filtered) * profile.group_size
    stages = resource_floor(sum(run.durations.values()), trained, judged, profile.steps, times)
    stage = max(stages, key=lambda name: stages[name])
    published = run.published[:-WARM]
    slack = published[-1] / bound[-1]
    return Result(setting, step_seconds(published), step_seconds(bound), stages[stage], stage, slack)


def step_seconds(published: Sequence[float]) -> float:
    """Mean over the steps of a steady pipeline."""
    return (published[-1] - published[WARM - 1]) / (len(published) - WARM)


def settings() -> Iterator[Setting]:
    for filtered in FILTERS:
        for streaming in (False, True):
            for max_staleness in STALENESS:
                yield Setting(max_staleness, streaming, filtered)
    for sigma in SIGMAS:
        for training in TRAINING_SHARES:
            if (sigma, training) == (1.0, TRAINING):
                continue
            yield Setting(0, False, sigma=sigma, training=training)
            for max_staleness in (0, 1, 4):
                yield Setting(max_staleness, True, sigma=sigma, training=training)


def serial_of(results: Sequence[Result], setting: Setting) -> float:
    """The step time of the same work without streaming at `max_staleness` 0."""
    serial = replace(setting, max_staleness=0, streaming=False)
    return next(result.measured for result in results if result.setting == serial)


HEADER = ("filtered", "sigma", "training", "streaming", "S", "measured", "bound", "ratio", "busiest stage", "speed-up")


def rows_of(results: Sequence[Result]) -> list[list[str]]:
    """`speed-up` is against the same work at `max_staleness` 0 without streaming."""
    rows = []
    for result in results:
        s = result.setting
        varied = [f"{s.filtered:.0%}", f"{s.sigma:g}", f"{s.training:g}", "on" if s.streaming else "off"]
        times = [f"{result.measured:.1f}", f"{result.bound:.1f}", f"{result.slack:.3f}"]
        stage = f"{result.stage} {result.floor:.1f}"
        rows.append([*varied, str(s.max_staleness), *times, stage, f"{serial_of(results, s) / result.measured:.2f}"])
    return rows


def notes_of(results: Sequence[Result]) -> list[str]:
    """Per share of training, what asynchrony adds to streaming; the tail is sigma 1, nothing is filtered."""
    notes = []
    for training in sorted({result.setting.training for result in results}):
        same = [r for r in results if replace(r.setting, max_staleness=0) == Setting(0, True, training=training)]
        on_policy = next(r for r in same if r.setting.max_staleness == 0)
        best = min(same, key=lambda r: r.measured)
        gain = on_policy.measured / best.measured
        verdict = (
            "the trainer is the floor, and asynchrony cannot help"
            if best.stage == "training"
            else "rollout is the floor"
        )
        notes.append(
            f"Training {training:g} % of a colocated step: streaming at S = 0 takes {on_policy.measured:.1f} s, the best S "
            f"{best.measured:.1f} s ({gain:.2f}x) with a floor of {best.floor:.1f} s: {verdict}"
        )
    return notes


def aims_of(results: Sequence[Result]) -> list[Aim]:
    """The worst ratio per share of filtered groups."""
    aims = []
    for filtered in sorted({result.setting.filtered for result in results}):
        worst = max((r for r in results if r.setting.filtered == filtered), key=lambda r: r.slack)
        where = f"max_staleness {worst.setting.max_staleness}, streaming {worst.setting.streaming}"
        aims.append(
            Aim(
                f"measured / bound, {filtered:.0%} filtered, worst setting ({where})",
                worst.slack,
                SLACK_AIM,
                "lower",
                reason="the bound leaves out the queue before the reference and the order in which groups may be taken (ST3)",
            )
        )
    return aims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few settings and steps: does it run?")
    parser.add_argument("--steps", type=int, default=0, help="steps measured per setting")
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    steps = arguments.steps or (2 if arguments.quick else 24)
    mean_s = calibrate()
    chosen = list(settings())
    if arguments.quick:
        chosen = [
            s for s in chosen if (s.sigma, s.training) == (1.0, TRAINING) and s.max_staleness < 2 and s.filtered < 0.8
        ]
    results: list[Result] = []
    print("  ".join(f"{cell:>9}" for cell in HEADER))
    for setting in chosen:
        results.append(measure(setting, steps, mean_s))
        print("  ".join(f"{cell:>9}" for cell in rows_of(results)[-1]), flush=True)
    notes = notes_of(results)
    print(*notes, sep="\n")
    report(
        "pipeline",
        aims_of(results),
        quick=arguments.quick,
        notes=notes,
        table={"header": HEADER, "rows": rows_of(results)},
        mean_s=mean_s,
        settings=[asdict(result) for result in results],
    )


if __name__ == "__main__":
    main()
