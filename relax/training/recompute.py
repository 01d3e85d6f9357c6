"""Activation checkpointing: a layer keeps its input only, and computes the rest again in the backward pass.

Called by `TorchBackend`. Gradients are the same; memory for activations falls to one layer's, for about a third more time.
"""

from typing import Any

from relax.core.error import UserError


def recompute_activations(model: Any) -> None:
    """Turn it on in every layer of `model`. Raises UserError for a model whose layers do not know how."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not getattr(model, "supports_gradient_checkpointing", False) or not layers:
        raise UserError(
            f"{type(model).__name__} has no activation checkpointing in transformers; leave "
            "training.backend.activation_checkpointing out, and lower training.microbatch_tokens to save memory"
        )
    model.activation_checkpointing_enable({"use_reentrant": False})
    # That also makes the embeddings' output need a gradient, which only the reentrant form would use.
    model.disable_input_require_grads()
    for layer in layers:
        # Layers recompute in training mode only. Their parts stay in evaluation mode: no dropout may come between the policy that
        # sampled and the one that is trained.
        layer.training = True
