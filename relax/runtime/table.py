"""The runtimes that `runtime.type` may name."""

from relax.config.table import ComponentTable, Entry

RUNTIMES = ComponentTable(
    "runtime",
    {
        "local": Entry(
            "relax.runtime.config:LocalConfig", "relax.runtime.local:build_local", "every role in this process"
        )
    },
)
