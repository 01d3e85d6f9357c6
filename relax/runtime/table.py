"""The runtimes that `runtime.type` may name."""

from relax.config.table import ComponentTable, Entry

RUNTIMES = ComponentTable(
    "runtime",
    {
        "local": Entry(
            "relax.runtime.config:LocalConfig", "relax.runtime.local:build_local", "every role in this process"
        ),
        "ray": Entry("relax.runtime.config:RayConfig", "relax.runtime.ray:build_ray", "every role in its own process"),
    },
)
