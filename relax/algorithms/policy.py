"""From a node to the functions of a policy-gradient algorithm: what GRPO and its relatives share. Called by their builders.

An algorithm says what its objective is and what a trajectory is worth; ratio, correction, KL, entropy, filter, aggregate and
updates are the node's.
"""

from relax.algorithms.aggregate import build_aggregate
from relax.algorithms.config import RatioConfig
from relax.algorithms.correction import CORRECTIONS
from relax.algorithms.filter import FILTERS
from relax.algorithms.loss import PolicyLoss
from relax.algorithms.policy_loss import Objective
from relax.core.algorithm import Algorithm
from relax.core.protocol import AdvantageFn


def build_policy(config: RatioConfig, objective: Objective, advantages: AdvantageFn) -> Algorithm:
    """The functions of an algorithm with group-scope advantages, for a validated node."""
    correction = CORRECTIONS[config.correction.type]
    step_function = correction.step_function(config.correction)
    return Algorithm(
        name=config.type,
        group_size=config.group_size,
        tokens_from="rollout",
        loss=PolicyLoss(
            objective=objective,
            old_logprobs=config.old_logprobs,
            weigher=correction.weigher(config.correction),
            kl_weight=config.kl_weight,
            kl_estimator=config.kl_estimator,
            entropy_weight=config.entropy_weight,
        ),
        aggregate=build_aggregate(config),
        advantages=advantages,
        reward_filter=FILTERS[config.filter],
        corrects_staleness=config.corrects_staleness,
        masks_truncated=config.masks_truncated,
        # KL and entropy pull on a token whatever its advantage.
        skips_zero_advantage=config.kl_weight == 0 and config.entropy_weight == 0,
        updates=config.updates,
        epochs=config.epochs,
        step_functions=(step_function,) if step_function is not None else (),
    )
