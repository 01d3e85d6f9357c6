"""The metrics that losses report: name -> (unit, meaning). Merged into the metric table by the services; free of torch.

Means are over trained tokens with the weights of the loss (LO7); `max` and `min` are extremes over trained tokens. A metric is
absent when there is nothing to measure.
"""

NUM_AGES = 5
"""Ages 0 to 3 have a metric each; the last one holds every greater age."""


def gap_name(age: int) -> str:
    """The metric of the mean logprob gap of tokens that are `age` >= 0 versions old."""
    last = NUM_AGES - 1
    return f"policy/logprob_gap_age_{age}" if age < last else f"policy/logprob_gap_age_{last}_up"


MEASURES: dict[str, tuple[str, str]] = {
    "policy/loss": ("1", "policy-gradient part of the loss, after clipping and correction"),
    "policy/ratio_mean": ("1", "policy probability / old probability of a token"),
    "policy/ratio_max": ("1", "largest such ratio"),
    "policy/clip_fraction_low": ("share", "tokens without gradient: negative advantage, ratio below 1 - clip_low"),
    "policy/clip_fraction_high": ("share", "tokens without gradient: positive advantage, ratio above 1 + clip_high"),
    "policy/clip_fraction_negative": (
        "share",
        "tokens without gradient: negative advantage, ratio above clip_ratio_negative",
    ),
    "policy/importance_weight_mean": ("1", "importance weight against the behaviour logprobs, after truncation"),
    "policy/importance_capped": ("share", "tokens whose importance weight met its cap"),
    "policy/importance_rejected": ("share", "tokens that the correction took out of the loss"),
    "policy/gate_mean": (
        "share",
        "slope of SAPO's gate: the share of its gradient that a token keeps, but for its ratio",
    ),
    "policy/weight_clipped": ("share", "tokens whose weight in CISPO met a bound"),
    "policy/return_mean": ("1", "return of a trained token before it is normalised over the step"),
    "policy/kl_reference": ("nats", "KL towards the reference policy, by the configured estimator"),
    "policy/kl_behaviour": ("nats", "KL from the policy that sampled to the policy trained, estimator k3"),
    "policy/entropy": ("nats", "entropy of the policy at a token"),
    "policy/logprob_mean": ("nats", "logprob of a trained token"),
    "policy/logprob_gap_mean": ("nats", "absolute difference between trainer and engine logprob"),
    "policy/logprob_gap_max": ("nats", "largest absolute difference between trainer and engine logprob"),
    "critic/loss": ("1", "loss of the value model: half the squared distance to the return, after clipping"),
    "critic/clip_fraction": ("share", "tokens whose value moved by more than critic.clip and has no gradient"),
    "critic/value_mean": ("1", "value of a trained token, as the critic trains it"),
    "critic/return_mean": ("1", "what the critic is trained towards: advantage plus value, before whitening"),
    "critic/explained_variance": (
        "share",
        "1 - variance of return minus value over variance of the return, by the values that the step began with",
    ),
    "critic/grad_norm": ("1", "norm of the critic's gradient before clipping, mean over its updates of the step"),
    "critic/learning_rate": ("1", "learning rate of the critic"),
    "critic/updates": ("updates", "optimizer updates of the step that changed the critic"),
    "critic/nonfinite": ("0 or 1", "whether the critic's loss or gradient was not finite"),
    "critic/seconds": ("s", "wall time that the critic trained in the step, beside the policy"),
    "distillation/reverse_kl": (
        "nats",
        "logprob of a sampled token under the policy minus that under the teacher: its mean estimates KL(policy || teacher)",
    ),
    "distillation/top_reverse_kl": ("nats", "KL(policy || teacher) over the teacher's top_k tokens, all others as one"),
    "distillation/top_mass": ("share", "probability of the policy on the teacher's top_k tokens"),
    "preference/loss": ("nats", "loss of a preference pair"),
    "preference/margin": ("1", "implicit reward of the chosen minus that of the rejected trajectory"),
    "preference/accuracy": ("share", "pairs whose chosen trajectory has the higher implicit reward"),
    "preference/logprob_mean": ("nats", "logprob of a token of a pair"),
    "supervised/loss": ("nats", "cross-entropy of a demonstrated token"),
    "supervised/logprob_min": ("nats", "logprob of the least likely demonstrated token"),
} | {
    gap_name(age): ("nats", f"logprob gap of tokens {age}{' or more' if age == NUM_AGES - 1 else ''} versions old")
    for age in range(NUM_AGES)
}
