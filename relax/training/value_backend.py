"""The backend of a critic: what `TorchBackend` is for a policy, around a model whose output is a value.

Owned by a critic role, called on that role's compute thread only. Gradients, learning rate, counters and files are the policy
backend's own, so the same rules hold (LO1, LO2, LO4, LO6, RR3).
"""

from typing import Any

from relax.core.batch import Shards
from relax.core.completion import Floats
from relax.model.family import Family
from relax.model.vocabulary import Vocabulary
from relax.training.config import TorchConfig
from relax.training.torch_backend import TorchBackend
from relax.training.value import TrainedValue, ValueModel, give_value_head


class ValueBackend(TorchBackend):
    """A `TrainBackend` whose losses see values in `logprobs_BT`.

    `model` is made a value model and trained in place, whole even where the policy is trained by an adapter; what `config` freezes
    of the policy stays as it is here too, but for the output layer.
    """

    def __init__(
        self,
        config: TorchConfig,
        model: Any,
        vocabulary: Vocabulary,
        grad_clip: float | None = 1.0,
        deterministic: bool = False,
        family: Family | None = None,
    ) -> None:
        head = give_value_head(model)
        whole = config.model_copy(update={"lora": None})
        super().__init__(whole, model, vocabulary, grad_clip=grad_clip, deterministic=deterministic, family=family)
        head.requires_grad_(True)  # patterns of `freeze` may have named the layer that it stands for
        named = self._trained.model.named_parameters()
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._trained = TrainedValue(self._trained.model)
        self._policy = ValueModel(self._trained.model, self._encoders)

    def values(self, shards: Shards) -> list[list[list[Floats]]]:
        """Per replica, micro-batch and row: float32[T], the value before each masked token under the current weights, 0 elsewhere."""
        return self.logprobs(shards)
