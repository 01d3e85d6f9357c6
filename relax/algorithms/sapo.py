"""SAPO (Soft Adaptive Policy Optimization, arXiv 2511.20347): a soft gate on each token's ratio in place of a clip. Named `sapo`.

The objective is f(r) A with f(r) = sigmoid(tau (r - 1)) * 4 / tau. Its slope is 1 at r = 1 and fades on both sides, faster with
a larger tau; tau is larger where the advantage is negative. Advantages are those of GRPO.
"""

from dataclasses import dataclass

import torch

from relax.algorithms.advantage import GroupBaseline
from relax.algorithms.config_family import SapoConfig
from relax.algorithms.policy import build_policy
from relax.algorithms.policy_loss import Terms, Tokens, bounded_ratio
from relax.core.algorithm import Algorithm


@dataclass(frozen=True, slots=True)
class SoftGate:
    """The gated ratio times the advantage; field meanings are those of `SapoConfig`."""

    temperature_positive: float
    temperature_negative: float
    columns: tuple[str, ...] = ()

    def __call__(self, tokens: Tokens) -> Terms:
        ratio = bounded_ratio(tokens.logprobs, tokens.old_logprobs)
        temperature = torch.full_like(tokens.advantages, self.temperature_negative)
        temperature[tokens.advantages > 0] = self.temperature_positive
        gate = torch.sigmoid(temperature * (ratio - 1))
        means = {"policy/ratio_mean": ratio, "policy/gate_mean": (4 * gate * (1 - gate)).detach()}
        return Terms(gate * (4 / temperature) * tokens.advantages, means, {"policy/ratio_max": ratio})


def build_sapo(config: SapoConfig) -> Algorithm:
    """The functions of SAPO for a validated node."""
    objective = SoftGate(config.temperature_positive, config.temperature_negative)
    return build_policy(config, objective, GroupBaseline(config.normalize_advantage))
