"""PPO with a critic (Schulman et al., arXiv 1707.06347, equation 7, and 9 without its entropy term). Named `ppo` in the table.

Advantages come from a value model by generalised advantage estimation. It is a model of its own with an optimizer of its own, so
the weight that equation 9 gives to the value loss has nothing to weigh here. A step trains several epochs of mini-batches on its
groups, all against the policy that sampled.
"""

from dataclasses import replace

from relax.algorithms.aggregate import TokenMean
from relax.algorithms.config_critic import PpoConfig
from relax.algorithms.gae import COLUMN, WHITENED, Gae, GaeWhitening
from relax.algorithms.loss import PolicyLoss
from relax.algorithms.policy import build_policy
from relax.algorithms.policy_loss import Clip, TokenObjective
from relax.algorithms.reinforce_pp import RawReward
from relax.algorithms.value_loss import ValueLoss
from relax.core.algorithm import Algorithm, ValueFunctions


def build_ppo(config: PpoConfig) -> Algorithm:
    """The functions of PPO for a validated node: the KL penalty is in the rewards, not in the loss."""
    without_kl = config.model_copy(update={"kl_weight": 0.0})
    algorithm = build_policy(without_kl, TokenObjective(Clip.of(config)), RawReward())
    assert isinstance(algorithm.loss, PolicyLoss)
    whitening = (GaeWhitening(),) if config.normalize_advantage else ()
    critic = config.critic
    return replace(
        algorithm,
        loss=replace(algorithm.loss, advantages=WHITENED if whitening else COLUMN),
        step_functions=(*algorithm.step_functions, *whitening),
        skips_zero_advantage=False,  # a reward of 0 is no advantage of 0
        critic=ValueFunctions(
            estimate=Gae(config.discount, config.trace, config.kl_weight),
            loss=ValueLoss(critic.clip),
            aggregate=TokenMean(),
            epochs=critic.epochs or config.epochs,
            updates=critic.updates or config.updates,
            warm_up_steps=critic.warm_up_steps,
        ),
    )
