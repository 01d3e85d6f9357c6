"""The table of algorithms: one line per name.

Read by the configuration (classes only, without torch) and by the services, which call the builder with the validated node.
A builder is `build_xxx(config) -> relax.core.algorithm.Algorithm`.
"""

from relax.config.table import ComponentTable, Entry

ALGORITHMS = ComponentTable(
    "algorithm",
    {
        "grpo": Entry(
            "relax.algorithms.config:GrpoConfig",
            "relax.algorithms.grpo:build_grpo",
            "clipped policy gradient with a group baseline; holds Dr. GRPO's two options",
        ),
        "dapo": Entry(
            "relax.algorithms.config:DapoConfig",
            "relax.algorithms.dapo:build_dapo",
            "GRPO with clip-higher, zero-signal filter, token aggregate and over-long shaping",
        ),
        "decoupled_ppo": Entry(
            "relax.algorithms.config_family:DecoupledPpoConfig",
            "relax.algorithms.decoupled_ppo:build_decoupled_ppo",
            "clipped against the step's first weights, with an importance weight back to the sampling policy",
        ),
        "rloo": Entry(
            "relax.algorithms.config_family:RlooConfig",
            "relax.algorithms.rloo:build_rloo",
            "REINFORCE with a leave-one-out baseline",
        ),
        "reinforce_pp": Entry(
            "relax.algorithms.config_family:ReinforcePpConfig",
            "relax.algorithms.reinforce_pp:build_reinforce_pp",
            "REINFORCE++: advantages normalised over the tokens of the step, KL penalty on rewards",
        ),
        "reinforce_pp_baseline": Entry(
            "relax.algorithms.config_family:ReinforcePpBaselineConfig",
            "relax.algorithms.reinforce_pp:build_reinforce_pp_baseline",
            "REINFORCE++ with the siblings' mean as baseline",
        ),
        "gspo": Entry(
            "relax.algorithms.config_family:GspoConfig",
            "relax.algorithms.gspo:build_gspo",
            "clipped policy gradient with one ratio for a whole trajectory",
        ),
        "sapo": Entry(
            "relax.algorithms.config_family:SapoConfig",
            "relax.algorithms.sapo:build_sapo",
            "policy gradient with a soft gate in place of the clip",
        ),
        "cispo": Entry(
            "relax.algorithms.config_family:CispoConfig",
            "relax.algorithms.cispo:build_cispo",
            "REINFORCE with clipped importance weights",
        ),
        "ppo": Entry(
            "relax.algorithms.config_critic:PpoConfig",
            "relax.algorithms.ppo:build_ppo",
            "several epochs of clipped updates, with advantages from a value model",
        ),
        "distillation": Entry(
            "relax.algorithms.config_distillation:DistillationConfig",
            "relax.algorithms.distillation:build_distillation",
            "towards a teacher on what the policy sampled: reverse KL per token, no reward needed",
        ),
        "supervised": Entry(
            "relax.algorithms.config:SupervisedConfig",
            "relax.algorithms.supervised:build_supervised",
            "cross-entropy on demonstrations from a data source",
        ),
        "dpo": Entry(
            "relax.algorithms.config_family:DpoConfig",
            "relax.algorithms.dpo:build_dpo",
            "preference pairs from a data source",
        ),
    },
    imported="relax.algorithms.config:AlgorithmConfig",
)
