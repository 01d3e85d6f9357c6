"""The table of engines. An engine is built as `component(config_node, **dependencies)` by the services."""

from relax.config.table import ComponentTable, Entry

ENGINES = ComponentTable(
    "engine",
    {
        "torch": Entry(
            "relax.engines.config:TorchEngineConfig",
            "relax.engines.torch.engine:TorchEngine",
            "embedded: continuous batching over any Hugging Face causal LM, on CPU or CUDA",
        ),
        "emulated": Entry(
            "relax.engines.config:EmulatedEngineConfig",
            "relax.engines.emulated:EmulatedEngine",
            "no model: seeded tokens, durations from a distribution on the injected clock",
        ),
    },
)
