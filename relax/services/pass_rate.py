"""What an evaluation set's rewards come to: mean, failures, pass@k, and the same for each source of a mixed set.

Called by the evaluation role. A failed sample counts as 0 and solves nothing, so it is in every denominator (AC5).
"""

import math
from collections.abc import Mapping, Sequence

from relax.services.ledger import EvaluationRow


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The chance that one of `k` of the `samples` completions, drawn without putting back, is among the `passed` ones.

    1 - C(n - c, k) / C(n, k), unbiased for what k completions would reach (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def set_metrics(
    name: str, groups: Mapping[str, Sequence[Sequence[EvaluationRow]]], ks: Sequence[int], threshold: float
) -> dict[str, float]:
    """Metrics of a set. `groups` holds, by source, the samples of each prompt; a set of one source has no values by source."""
    everything = [rows for of_source in groups.values() for rows in of_source]
    failed = sum(row.failure is not None for rows in everything for row in rows)
    metrics = {f"eval/{name}/reward": _mean_reward(everything), f"eval/{name}/failed": float(failed)}
    metrics |= {f"eval/{name}/pass@{k}": _pass_rate(everything, k, threshold) for k in ks}
    if len(groups) > 1:
        for source, of_source in groups.items():
            metrics[f"eval/{name}/reward/{source}"] = _mean_reward(of_source)
            metrics |= {f"eval/{name}/pass@{k}/{source}": _pass_rate(of_source, k, threshold) for k in ks}
    return metrics


def _mean_reward(groups: Sequence[Sequence[EvaluationRow]]) -> float:
    rewards = [row.reward if row.reward is not None else 0.0 for rows in groups for row in rows]
    return math.fsum(rewards) / len(rewards)


def _pass_rate(groups: Sequence[Sequence[EvaluationRow]], k: int, threshold: float) -> float:
    chances = [pass_at_k(len(rows), sum(_passes(row, threshold) for row in rows), k) for rows in groups]
    return math.fsum(chances) / len(chances)


def _passes(row: EvaluationRow, threshold: float) -> bool:
    """A failed sample has no reward, and a threshold of 0 or less does not make it a solution."""
    return row.reward is not None and row.reward >= threshold
