"""A value model: a language model whose output layer is one number, the return that is expected before a token is sampled.

Used by `ValueBackend`. Everything but the last layer is the language model's own code, so prompts are shared, media are read and
positions are left out as in the policy. Values are float32; the layer starts at zero, so a fresh critic says 0 everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from relax.core.error import UserError
from relax.model.name import published_tensors
from relax.training.encoder import Encoders
from relax.training.file import quiet_saving
from relax.training.forward import Policy, Scored
from relax.training.padding import PaddedBatch

FILE = "value.safetensors"


def give_value_head(model: Any) -> nn.Linear:
    """Put a layer of one output, all zero, in place of the model's logits; returns it. Changes the model and its configuration.

    Raises UserError for a model without an output layer of its own.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise UserError(
            f"{type(model).__name__} has no linear output layer that a value could take the place of; give "
            "algorithm.critic.model a causal language model"
        )
    head = nn.Linear(layer.in_features, 1, device=layer.weight.device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
        if getattr(config, "final_logit_softcapping", None) is not None:
            config.final_logit_softcapping = None  # it would bound the value as well
    model.set_output_embeddings(head)
    return head


class ValueModel(Policy):
    """A forward pass that gives values where a policy's gives logprobs."""

    def __init__(self, model: Any, encoders: Encoders | None = None) -> None:
        super().__init__(model, torch.ones(1, dtype=torch.bool), 1.0, encoders)

    def forward(self, batch: PaddedBatch, with_entropy: bool = False, choices_BTK: Tensor | None = None) -> Scored:
        """float32[B, T] values of the state before each masked token, 0 off the mask; there is nothing else to score."""
        values_N1, silence = self._logits(batch)
        empty_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float32, device=values_N1.device)
        values_BT = empty_BT.index_put(batch.mask_BT.nonzero(as_tuple=True), values_N1[:, 0].float())
        return Scored(values_BT if silence is None else values_BT + silence)


class TrainedValue:
    """A `Trained` that is written and read under the names of memory: no other tool reads a critic."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def export(self) -> Mapping[str, Tensor]:
        """The live tensors; nobody publishes them."""
        return published_tensors(self.model)

    def applied(self) -> None:
        """Nothing to check: nothing is published."""

    def capture(self) -> "CapturedValue":
        copies = {name: one.to("cpu", copy=True).contiguous() for name, one in published_tensors(self.model).items()}
        return CapturedValue(copies, self.model.config.model_type)

    def load(self, folder: Path) -> None:
        """Copy what a capture wrote into the tensors that the model has. Raises UserError when they do not fit it."""
        path = folder / FILE
        try:
            with safe_open(path, framework="pt") as file:
                kind = (file.metadata() or {}).get("model_type")
            loaded = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder} holds no usable value model: {error}; resume from another checkpoint") from error
        own = published_tensors(self.model)
        problems = [] if kind == self.model.config.model_type else [f"its model type is {kind!r}"]
        problems += [f"{name} is only in one of them" for name in sorted(set(loaded) ^ set(own))]
        problems += [
            f"{name} is {tuple(loaded[name].shape)}, expected {tuple(own[name].shape)}"
            for name in sorted(set(loaded) & set(own))
            if loaded[name].shape != own[name].shape
        ]
        if problems:
            raise UserError(f"the value model in {folder} is not the one of this run: {'; '.join(problems[:3])}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(loaded[name])


@dataclass(frozen=True, slots=True)
class CapturedValue:
    """`tensors` are private copies."""

    tensors: Mapping[str, Tensor]
    model_type: str

    def write(self, folder: Path) -> None:
        """One file in `folder`. Raises OSError when the disk does not take it."""
        folder.mkdir(parents=True, exist_ok=True)
        with quiet_saving("the value model", folder):
            save_file(dict(self.tensors), folder / FILE, metadata={"model_type": self.model_type})
