"""GSPO (Zheng et al., arXiv 2507.18071): one ratio for a whole trajectory, the geometric mean of its tokens'. Named `gspo`.

Each token has the value of the trajectory's ratio and the gradient of its own logprob (GSPO-token, equations 13 and 14). With one
advantage for all tokens and one weight for all tokens, as here, objective and gradient equal those of GSPO itself (equations 5
and 7), so one algorithm is both. The ratio moves with every update, so the rows of a trajectory share a forward pass.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relax.algorithms.advantage import GroupBaseline
from relax.algorithms.config_family import GspoConfig
from relax.algorithms.policy import build_policy
from relax.algorithms.policy_loss import MAX_LOG_RATIO, Clip, Terms, Tokens
from relax.core.algorithm import Algorithm


def trajectory_means(values_BT: Tensor, numbers_BT: Tensor, trained_BT: Tensor) -> Tensor:
    """At each trained token the mean of `values_BT` over the trained tokens with the same number; 0 elsewhere. Without gradient."""
    values_N = values_BT.detach()[trained_BT].double()
    _, index_N = torch.unique(numbers_BT[trained_BT], return_inverse=True)
    count = int(index_N.max()) + 1 if index_N.numel() else 0
    sums = torch.zeros(count, dtype=torch.float64, device=values_N.device).index_add(0, index_N, values_N)
    means_N = (sums / torch.bincount(index_N, minlength=count))[index_N]
    means_BT = torch.zeros_like(values_BT)
    means_BT[trained_BT] = means_N.to(values_BT.dtype)
    return means_BT


@dataclass(frozen=True, slots=True)
class SequenceObjective:
    """The clipped surrogate of the trajectory's ratio, with the gradient of each token's own logprob."""

    clip: Clip
    columns: tuple[str, ...] = ("trajectory_number",)

    def __call__(self, tokens: Tokens) -> Terms:
        log_ratio = tokens.logprobs.detach() - tokens.old_logprobs
        mean = trajectory_means(log_ratio, tokens.columns["trajectory_number"], tokens.trained)
        ratio = torch.exp(torch.clamp(mean, max=MAX_LOG_RATIO) + (tokens.logprobs - tokens.logprobs.detach()))
        return self.clip.terms(ratio, tokens.advantages)


def build_gspo(config: GspoConfig) -> Algorithm:
    """The functions of GSPO for a validated node."""
    algorithm = build_policy(config, SequenceObjective(Clip.of(config)), GroupBaseline(config.normalize_advantage))
    return replace(algorithm, keeps_trajectories_whole=True)
