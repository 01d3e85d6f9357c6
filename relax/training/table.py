"""The components of this room by name: training backends, optimizers, learning-rate schedules."""

from relax.config.table import ComponentTable, Entry

BACKENDS = ComponentTable(
    "training backend",
    {
        "torch": Entry(
            "relax.training.config:TorchConfig",
            "relax.training.torch_backend:TorchBackend",
            "any Hugging Face causal language model, one process, float32",
        ),
        "emulated": Entry(
            "relax.training.config:EmulatedConfig",
            "relax.training.emulated:EmulatedBackend",
            "no model: counts rows and steps, for simulation",
        ),
    },
)

VALUE_BACKENDS = ComponentTable(
    "value backend",
    {
        "torch": Entry(
            "relax.training.config:TorchConfig",
            "relax.training.value_backend:ValueBackend",
            "the critic's model under backend 'torch': a scalar in place of logits",
        ),
    },
)
"""By the type of `training.backend`: what trains a critic beside a policy that the backend of that name trains."""

OPTIMIZERS = ComponentTable(
    "optimizer",
    {
        "adamw": Entry(
            "relax.training.config:AdamWConfig",
            "relax.training.optimizer:build_adamw",
            "Adam with decoupled weight decay",
        ),
        "sgd": Entry(
            "relax.training.config:SgdConfig",
            "relax.training.optimizer:build_sgd",
            "stochastic gradient descent, with momentum if asked",
        ),
    },
)

SCHEDULES = ComponentTable(
    "schedule",
    {
        "constant": Entry(
            "relax.training.config:ConstantConfig",
            "relax.training.schedule:build_constant",
            "the full learning rate after warm-up",
        ),
        "linear": Entry(
            "relax.training.config:LinearConfig",
            "relax.training.schedule:build_linear",
            "a straight line down to min_ratio",
        ),
        "cosine": Entry(
            "relax.training.config:CosineConfig",
            "relax.training.schedule:build_cosine",
            "half a cosine down to min_ratio",
        ),
    },
)


def value_problem(backend: str) -> str | None:
    """Why no critic can be trained beside a policy under this type of `training.backend`, None when one can."""
    if backend in VALUE_BACKENDS.entries:
        return None
    return f"training.backend {backend!r} trains no value model; use {' or '.join(VALUE_BACKENDS.entries)}"
