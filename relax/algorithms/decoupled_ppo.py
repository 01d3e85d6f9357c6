"""Decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, equation 5): three policies. Named `decoupled_ppo`.

The proximal policy is version k, with which the step begins: the clip holds the step's updates to it, whoever sampled. An importance
weight, its probability over the behaviour policy's, leads back to the policy that sampled; AReaL's implementation bounds it,
and so does `correction`. Advantages are those of GRPO.
"""

from relax.algorithms.config_family import DecoupledPpoConfig
from relax.algorithms.grpo import build_grpo
from relax.core.algorithm import Algorithm


def build_decoupled_ppo(config: DecoupledPpoConfig) -> Algorithm:
    """The functions of decoupled PPO for a validated node."""
    return build_grpo(config)
