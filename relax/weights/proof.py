"""The proof of a load: the engine's logprobs of the probe prompt equal the trainer's (WS4).

Called by the updater of each rollout engine and by the evaluation role. Digests do not see packed, tied or fused copies of
what was sent; this does.
"""

import numpy as np

from relax.core.error import EngineError
from relax.core.weight import LoadReport, Manifest


def probe_gap(name: str, manifest: Manifest, report: LoadReport | None) -> float:
    """The largest difference of logprobs, in nats; 0 for a version without a probe, NaN when a logprob is NaN.

    Raises EngineError when engine `name` gave no logprobs, or another number of them.
    """
    probe = manifest.probe
    if probe is None:
        return 0.0
    answer = None if report is None else report.probe_logprobs
    if answer is None or answer.shape != probe.logprobs.shape:
        raise EngineError(
            f"engine {name} gave no proof of {manifest.version}: expected {probe.logprobs.shape[0]} logprobs of the"
            f" probe, got {None if answer is None else answer.shape}"
        )
    # Position 0 has no logprob: nothing predicts it.
    return float(np.max(np.abs(answer[1:] - probe.logprobs[1:]), initial=0.0))


def check_proof(name: str, manifest: Manifest, report: LoadReport | None, tolerance: float | None = None) -> float:
    """The gap of `probe_gap`, which must be within `tolerance` (None: the probe's own).

    Raises EngineError when engine `name` gave no logprobs, or others than the trainer's.
    """
    gap = probe_gap(name, manifest, report)
    probe = manifest.probe
    accepted = tolerance if tolerance is not None or probe is None else probe.tolerance
    if accepted is not None and not gap <= accepted:
        raise EngineError(
            f"[WS4] engine {name} holds other weights than {manifest.version}: its logprobs of the probe differ by"
            f" {gap:.2e}, accepted are {accepted:.0e} (weights.probe_tolerance); a packed, tied or fused copy was not"
            " updated, or the engine computes in another precision"
        )
    return gap
