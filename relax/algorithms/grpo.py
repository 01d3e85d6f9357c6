"""GRPO: a clipped policy gradient whose baseline is the mean reward of a prompt's siblings (DeepSeekMath, arXiv 2402.03300).

Named `grpo` in the table. Dr. GRPO (arXiv 2503.20783) is two options of it: `normalize_advantage: false` takes out the division by
the rewards' deviation, `aggregate: constant` the division by a trajectory's own length.
"""

from relax.algorithms.advantage import GroupBaseline
from relax.algorithms.config import PolicyConfig
from relax.algorithms.policy import build_policy
from relax.algorithms.policy_loss import Clip, TokenObjective
from relax.core.algorithm import Algorithm


def build_grpo(config: PolicyConfig) -> Algorithm:
    """The functions of GRPO for a validated node (`GrpoConfig`, or a node that extends its fields)."""
    return build_policy(config, TokenObjective(Clip.of(config)), GroupBaseline(config.normalize_advantage))
