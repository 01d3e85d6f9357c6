"""Every metric of a run: name -> unit and meaning, declared once.

Read by documentation, tests and whoever prints a metric. A part in angle brackets stands for any text. Losses declare theirs
in `relax.algorithms.measure`. What is not a finite number is no metric (L3).
"""

import math
import numbers
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from relax.algorithms.measure import MEASURES


class Metric(NamedTuple):
    """`share` is a unit: 0 to 1."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {name: Metric(*entry) for name, entry in MEASURES.items()} | {
    "reward/mean": Metric(
        "1", "reward, mean over all trajectories whose group ended since the last step; a failed one counts as 0"
    ),
    "reward/mean/<source>": Metric(
        "1", "reward/mean of one data source, where the run has several; `other` holds those beyond a bound"
    ),
    "reward/trained": Metric("1", "reward, mean over the trajectories that the step trained on"),
    "rollout/failed": Metric("share", "trajectories without a reward among all whose group ended since the last step"),
    "rollout/failed/<source>": Metric("share", "rollout/failed of one data source, where the run has several"),
    "rollout/tokens/mean/<source>": Metric(
        "tokens", "sampled tokens of a trajectory of one data source, where the run has several; failed ones have none"
    ),
    "rollout/branches": Metric(
        "segments", "histories that no suffix continued, of trajectories that ended since the last step (TK2)"
    ),
    "rollout/unstable": Metric(
        "turns", "completions whose text encodes to other ids than were sampled; trained as sampled (TK1)"
    ),
    "rollout/mixed_tokens": Metric("tokens", "tokens sampled with old key-values after a load (on_load: keep, WS6)"),
    "bus/rows": Metric("rows", "rows on the bus"),
    "bus/bytes": Metric("bytes", "bytes of cells on the bus"),
    "bus/late": Metric("puts", "puts, renewals and acks under a lease that was gone, in this stage (TQ4)"),
    "media/looked_at": Metric("media", "media whose header was read, since the run began"),
    "media/decoded": Metric("media", "media that were decoded; siblings and later passes share them (MM2)"),
    "media/memory_hits": Metric("media", "media whose features were in memory already"),
    "media/disk_hits": Metric("media", "media whose features came from the cache on disk"),
    "media/refused": Metric("media", "times that a medium was refused; each record is in the quarantine (MM3)"),
    "media/encoded": Metric("media", "media that went through the engines' encoders"),
    "media/fetch_s": Metric("s", "seconds that reading, hashing and downloading content took"),
    "media/look_s": Metric("s", "seconds that calls reading headers took, waiting for a process included"),
    "media/decode_s": Metric("s", "seconds that decoding calls took, waiting for a process included"),
    "media/features_s": Metric("s", "seconds that threads took to make features of what was decoded"),
    "pool/killed": Metric("calls", "calls in the process pool that were killed over a limit, since the run began"),
    "pool/crashed": Metric("calls", "calls in the process pool whose process died, since the run began"),
    "eval/lost": Metric("1", "1 at the step of a version whose evaluation an interruption lost"),
    "eval/<set>/reward": Metric("1", "mean reward of an evaluation set; a failed sample counts as 0"),
    "eval/<set>/failed": Metric("samples", "samples of an evaluation set that failed"),
    "eval/<set>/pass@<k>": Metric(
        "share", "prompts of an evaluation set that one of k completions solves (unbiased, arXiv 2107.03374 eq. 1)"
    ),
    "eval/<set>/reward/<source>": Metric("1", "mean reward on the prompts of one source of a mixed evaluation set"),
    "eval/<set>/pass@<k>/<source>": Metric("share", "pass@k on the prompts of one source of a mixed evaluation set"),
    "staleness/max": Metric("steps", "age of the oldest token that the step trained on"),
    "staleness/mean": Metric("steps", "age of a trajectory's oldest token, mean over the step's trajectories"),
    "staleness/masked_tokens": Metric(
        "tokens", "tokens over the bound that `over_age: mask` kept out of the loss (ST5)"
    ),
    "rollout/tokens/mean": Metric("tokens", "sampled tokens of a trajectory"),
    "rollout/tokens_per_second": Metric("tokens/s", "tokens that all rollout engines sampled since the last step"),
    "rollout/queue_s": Metric("s", "mean wait of a request for an engine (roles in processes of their own)"),
    "rollout/load": Metric("share", "share of the engines' places in use (roles in processes of their own)"),
    "rollout/sampled_tokens": Metric("tokens", "sampled tokens of all groups that have ended"),
    "rollout/wasted_tokens": Metric("tokens", "those of groups that ended without being trained"),
    "rollout/resends": Metric(
        "requests",
        "requests that were sent to an engine again after the first was lost or let go of them, where the router is",
    ),
    "train/groups": Metric("groups", "groups of the step"),
    "train/rows_skipped": Metric("rows", "rows left out of the forward pass because their gradient is exactly zero"),
    "train/tokens": Metric("tokens", "masked tokens of the step"),
    "train/loss": Metric("1", "loss of the step: its sum over tokens, divided by the step's denominator"),
    "train/grad_norm": Metric("1", "norm of the gradient before clipping, mean over the step's updates"),
    "train/learning_rate": Metric("1", "learning rate of the step"),
    "train/updates": Metric("updates", "optimizer updates of the step that changed the weights"),
    "train/applied": Metric("0 or 1", "whether the step changed the weights"),
    "train/<phase>/seconds": Metric("s", "wall time of a phase of the step: columns, train, optim"),
    "training/tokens/forward": Metric(
        "tokens", "tokens that went through the trainer's forward pass, prompts included"
    ),
    "training/padding/share": Metric("share", "padded positions among all positions of the forward passes"),
    "training/encoder/media": Metric("media", "media that went through the trainer's encoders; siblings share theirs"),
    "training/encoder/tokens": Metric("tokens", "patches and frames that the trainer's encoders worked through"),
    "training/encoder/kept": Metric("media", "media of frozen encoders that were taken as encoded in an earlier pass"),
    "step/seconds": Metric("s", "wall time since the step before"),
    "idle/<thread>": Metric("share", "time that a compute thread did nothing since the step before"),
    "device/<role>/turns": Metric(
        "turns", "turns that a role has had on a device that it shares, since the run began (DT)"
    ),
    "device/<role>/yields": Metric("turns", "those that ended because others waited (DT3)"),
    "device/<role>/held_s": Metric("s", "seconds that the role's turns took"),
    "device/<role>/waited_s": Metric("s", "seconds that it waited for them, moves included"),
    "device/<role>/onloads": Metric("moves", "times that its model was put back onto the device"),
    "device/<role>/offloads": Metric("moves", "times that its model was taken off the device"),
    "device/<role>/moved_s": Metric("s", "seconds that these moves took"),
    "gate/lost": Metric("groups", "groups that ended untrained while the step was filled"),
    "ledger/admitted": Metric("groups", "groups admitted since the run began (AC1)"),
    "ledger/trained": Metric("groups", "groups that ended as trained"),
    "ledger/filtered": Metric("groups", "groups that a filter of the algorithm ended"),
    "ledger/failed": Metric("groups", "groups that ended because too few trajectories survived"),
    "ledger/dropped": Metric("groups", "groups that ended for any other reason"),
    "ledger/outstanding": Metric("groups", "groups admitted and not ended"),
    "weights/loads": Metric("loads", "weight versions that the rollout engines have loaded"),
    "weights/failures": Metric("loads", "loads that failed or were not proven"),
    "weights/swap_pause_s": Metric("s", "time that engines were paused for loads, since the run began"),
    "weights/prefill_again_s": Metric("s", "time spent on prefilling running requests again after loads"),
    "weights/prefill_again_tokens": Metric("tokens", "tokens prefilled again after loads"),
    "weights/probe_gap": Metric("nats", "largest logprob difference between trainer and engine on the probe (WS4)"),
    "weights/versions_moved": Metric("versions", "versions written or fetched by all processes, since their start"),
    "weights/bytes/<phase>": Metric(
        "bytes", "bytes of weights that a phase (copy, hash, write, map, verify) went through"
    ),
    "weights/seconds/<phase>": Metric("s", "seconds that a phase of moving weights took, in all processes together"),
    "weights/versions_kept": Metric("versions", "versions that can be fetched now"),
    "weights/bytes_kept": Metric("bytes", "what they take in shared memory or on the disk"),
}
"""By name; each part between slashes may be a template such as `<set>`."""


def metric_of(name: str) -> Metric | None:
    """The declaration that a metric's name matches, exactly or by template; None when there is none."""
    if name in METRICS:
        return METRICS[name]
    return next((metric for template, metric in METRICS.items() if _pattern(template).fullmatch(name)), None)


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(
        "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split("(<[^>]+>)", template))
    )


def split_numbers(metrics: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """What can be logged, as floats, and for each name that cannot, why."""
    accepted: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, value in metrics.items():
        if not isinstance(value, numbers.Real | np.bool_):
            refused[name] = f"it is a {type(value).__name__}, expected one number; reduce it first"
            continue
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            accepted[name] = number
        else:
            refused[name] = f"it is {number}, expected a finite number; leave an absent value out"
    return accepted, refused
