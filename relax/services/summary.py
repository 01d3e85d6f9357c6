"""What a run came to, in one JSON object: `summary.json`, or `stopped.json` for a run that was stopped and may go on.

Called by the run at its end. Everything but this process's own seconds is read from the ledger, so a resumed run is summed up
whole. `relax train` prints it.
"""

import logging
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from relax import __version__
from relax.algorithms.measure import NUM_AGES, gap_name
from relax.config.tree import RunConfig
from relax.core.message import Json
from relax.services.account import END_STATES
from relax.services.curve import draw_curve, finite, read_curve
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger
from relax.services.outline import RunOutline, StageOutline, outline_of, sampling_stages

EDGE_STEPS = 10
"""Steps whose mean is the first and the last reward: one step is too noisy."""
MAX_REASON_LENGTH = 200
"""Characters of a printed reason; the account holds all of it."""

_log = logging.getLogger(__name__)


def write_summary(
    config: RunConfig, directory: RunDirectory, ledger: Ledger, seconds: Mapping[str, float], stopped: bool
) -> dict[str, Json]:
    """Sum up, write the JSON and the curve. `seconds` are those that this process spent in each stage."""
    outline = outline_of(config)
    summary = summarize(outline, [item.name for item in config.eval.sets], ledger, seconds)
    directory.write_json(stopped_path(directory) if stopped else directory.summary, summary)
    if not stopped:
        stopped_path(directory).unlink(missing_ok=True)
    try:
        draw_curve(read_curve(ledger, outline, [item.name for item in config.eval.sets]), directory.curve)
    except OSError as error:  # the numbers are safe already
        _log.warning("cannot write %s: %s", directory.curve, error)
    return summary


def stopped_path(directory: RunDirectory) -> Path:
    """The summary so far of a run that was stopped."""
    return directory.root / "stopped.json"


def summarize(
    outline: RunOutline, sets: Sequence[str], ledger: Ledger, seconds: Mapping[str, float]
) -> dict[str, Json]:
    """See the fields below; a value that was never measured is None or missing, never 0."""
    sampling = sampling_stages(outline, ledger)
    staleness = [value for _, value in finite(ledger.metric("staleness/max"))]
    return {
        "run": outline.name,
        "version": __version__,
        "steps": max((step + 1 for step, _ in ledger.metric("train/applied")), default=0),
        "seconds": _seconds(outline, ledger, seconds),
        "eval/initial": _evaluation(ledger, sets, sampling[0].first if sampling else None),
        "eval/final": _evaluation(ledger, sets, -1),
        "reward": _reward(ledger),
        "staleness/max": int(max(staleness)) if staleness else None,
        "ledger": _account(ledger),
        "tokens_per_s": _over_time(ledger, "rollout/tokens_per_second", sampling),
        "idle": _idle(ledger, sampling),
        "logprob_gap": _gap(ledger),
    }


def _within(points: Sequence[tuple[int, float]], stages: Sequence[StageOutline]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in points if any(stage.first <= step < stage.end for stage in stages)]


def _seconds(outline: RunOutline, ledger: Ledger, seconds: Mapping[str, float]) -> dict[str, float]:
    """Wall seconds of each stage, over all processes that worked on it, and in all.

    What earlier processes spent is known by their steps only, so the larger of the two counts.
    """
    steps = finite(ledger.metric("step/seconds"))
    found: dict[str, float] = {}
    for stage in outline.stages:
        total = max(sum(value for _, value in _within(steps, [stage])), seconds.get(stage.name, 0.0))
        if total > 0:
            found[stage.name] = round(total, 3)
    return {**found, "total": round(sum(found.values()), 3)}


def _evaluation(ledger: Ledger, sets: Sequence[str], step: int | None) -> dict[str, float]:
    """Mean reward of each set at `step`; -1 is the last one evaluated."""
    found: dict[str, float] = {}
    for name in sets:
        points = finite(ledger.metric(f"eval/{name}/reward"))
        values = [value for at, value in points if at == step] if step != -1 else [value for _, value in points[-1:]]
        if values:
            found[name] = values[0]
    return found


def _reward(ledger: Ledger) -> dict[str, float]:
    values = [value for _, value in finite(ledger.metric("reward/mean"))]
    if not values:
        return {}
    return {"first": float(np.mean(values[:EDGE_STEPS])), "last": float(np.mean(values[-EDGE_STEPS:]))}


def _account(ledger: Ledger) -> dict[str, Json]:
    """AC1's counts, and whether they balance: at every step, and between the account and the rows themselves."""
    account = ledger.note("account") or {
        "admitted": 0, **dict.fromkeys(END_STATES, 0), "outstanding": 0, "reasons": {},
    }  # fmt: skip
    rows = ledger.counts()
    matches = all(rows.get(state, 0) == account[state] for state in END_STATES)
    by_step = {name: dict(ledger.metric(f"ledger/{name}")) for name in ("admitted", *END_STATES, "outstanding")}
    steady = all(
        admitted == sum(by_step[name].get(step, 0) for name in (*END_STATES, "outstanding"))
        for step, admitted in by_step["admitted"].items()
    )
    final = account["admitted"] == sum(account[name] for name in (*END_STATES, "outstanding"))
    return {**account, "balances": matches and steady and final}


def top_reasons(account: Mapping[str, Json], most: int = 3) -> list[tuple[str, int]]:
    """Why groups were not trained, such as `failed(timeout)`: the most frequent reasons with their counts."""
    ordered = sorted((account.get("reasons") or {}).items(), key=lambda item: -item[1])
    return [(textwrap.shorten(reason, MAX_REASON_LENGTH, placeholder="..."), count) for reason, count in ordered[:most]]


def _over_time(ledger: Ledger, name: str, stages: Sequence[StageOutline]) -> float | None:
    """The mean of a rate or share over the steps of `stages`, each weighted by how long it took."""
    seconds = dict(finite(ledger.metric("step/seconds")))
    points = [(value, seconds.get(step, 0.0)) for step, value in _within(finite(ledger.metric(name)), stages)]
    total = sum(weight for _, weight in points)
    return sum(value * weight for value, weight in points) / total if total > 0 else None


def _idle(ledger: Ledger, sampling: Sequence[StageOutline]) -> dict[str, float]:
    """Idle share of each compute thread over the last stage that sampled."""
    names = [name for name in sorted(ledger.last_metrics()) if name.startswith("idle/")]
    shares = {name.removeprefix("idle/"): _over_time(ledger, name, sampling[-1:]) for name in names}
    return {name: share for name, share in shares.items() if share is not None}


def _gap(ledger: Ledger) -> dict[str, Json]:
    """Engine-trainer logprob gap over all steps: mean over tokens, largest, and mean by age of the token's version."""
    largest = [value for _, value in finite(ledger.metric("policy/logprob_gap_max"))]
    mean = _token_mean(ledger, "policy/logprob_gap_mean")
    if mean is None:
        return {}
    labels = {str(age) if age < NUM_AGES - 1 else f"{age} or more": gap_name(age) for age in range(NUM_AGES)}
    by_age = {label: _token_mean(ledger, name) for label, name in labels.items()}
    return {
        "mean": mean,
        "max": max(largest) if largest else None,
        "by_age": {age: gap for age, gap in by_age.items() if gap is not None},
    }


def _token_mean(ledger: Ledger, name: str) -> float | None:
    tokens = dict(finite(ledger.metric("train/tokens")))
    points = [(value, tokens.get(step, 1.0)) for step, value in finite(ledger.metric(name))]
    total = sum(weight for _, weight in points)
    return sum(value * weight for value, weight in points) / total if total > 0 else None
