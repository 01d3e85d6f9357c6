"""The table of engines.

The services build an engine as `component(config_node, model=, vocabulary=, compute=, name=, deterministic=, clock=, seed=,
decode=)`; each takes what it needs.
"""

from relax.config.table import ComponentTable, Entry

ENGINES = ComponentTable(
    "engine",
    {
        "torch": Entry(
            "relax.engines.config:TorchEngineConfig",
            "relax.engines.torch.engine:build_torch_engine",
            "embedded: continuous batching over any Hugging Face causal LM, on CPU or CUDA",
        ),
        "sglang": Entry(
            "relax.engines.config:SglangEngineConfig",
            "relax.engines.sglang.engine:build_sglang_engine",
            "an SGLang server that runs already, by HTTP; loads through a disk that both see",
        ),
        "emulated": Entry(
            "relax.engines.config:EmulatedEngineConfig",
            "relax.engines.emulated:build_emulated_engine",
            "no model: seeded tokens, durations from a distribution on the injected clock",
        ),
    },
)
