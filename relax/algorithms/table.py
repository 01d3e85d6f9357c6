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
        "supervised": Entry(
            "relax.algorithms.config:SupervisedConfig",
            "relax.algorithms.supervised:build_supervised",
            "cross-entropy on demonstrations from a data source",
        ),
    },
    imported="relax.algorithms.config:AlgorithmConfig",
)
