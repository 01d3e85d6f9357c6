"""GRPO: a clipped policy gradient whose baseline is the mean reward of a prompt's siblings (DeepSeekMath, arXiv 2402.03300).

Named `grpo` in the table. Dr. GRPO (arXiv 2503.20783) is two options of it: `normalize_advantage: false` takes out the division by
the rewards' deviation, `aggregate: constant` the division by a trajectory's own length.
"""

from relax.algorithms.advantage import GroupBaseline
from relax.algorithms.aggregate import build_aggregate
from relax.algorithms.config import PolicyConfig
from relax.algorithms.filter import FILTERS
from relax.algorithms.loss import build_policy_loss
from relax.core.algorithm import Algorithm


def build_grpo(config: PolicyConfig) -> Algorithm:
    """The functions of GRPO for a validated node (`GrpoConfig`, or a node that extends its fields)."""
    return Algorithm(
        name="grpo",
        group_size=config.group_size,
        tokens_from="rollout",
        loss=build_policy_loss(config),
        aggregate=build_aggregate(config),
        advantages=GroupBaseline(config.normalize_advantage),
        reward_filter=FILTERS[config.filter],
        corrects_staleness=config.corrects_staleness,
        masks_truncated=config.masks_truncated,
        # KL and entropy pull on a token whatever its advantage.
        skips_zero_advantage=config.kl_weight == 0 and config.entropy_weight == 0,
    )
