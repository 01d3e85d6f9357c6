"""Configuration nodes of backends, optimizers and learning-rate schedules.

Read by the configuration tree before torch is imported. Each node holds only what its component accepts (K5).
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from relax.config.base import ComponentConfig, Config, Violation, rule

Decay = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]


class BackendConfig(ComponentConfig):
    """What every backend's node has. `needs_model` is false for a backend that trains nothing real.

    `dtypes` are the values of `model.dtype` that it can train.
    """

    needs_model: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")


class LoraConfig(Config):
    """A low-rank adapter beside the frozen model (Hu et al. 2021). It has no dropout: training must score the policy that sampled."""

    rank: PositiveInt = 16
    """Rank of the two factors of every adapted layer's change."""
    alpha: PositiveFloat = 32.0
    """The change is scaled by `alpha / rank`."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("all-linear",)
    """Last names of the linear layers that are adapted, such as `q_proj`; `all-linear`: all but the output layer. Of a model that
    reads media, layers of the language model alone: its encoders stay as they are."""

    @rule
    def all_linear_stands_alone(self) -> Iterator[Violation]:
        if "all-linear" in self.targets and len(self.targets) > 1:
            yield ("targets",), "names 'all-linear' beside other layers; give it alone, or leave it out"


class PartConfig(Config):
    """One part of a model that reads media."""

    train: bool = True
    """False: the part stays as it is. Media whose whole encoder stays are encoded once and kept."""
    lr: PositiveFloat | None = None
    """Learning rate of this part before the schedule's factor; null: the optimizer's."""

    @rule
    def only_what_is_trained_has_a_rate(self) -> Iterator[Violation]:
        if self.lr is not None and not self.train:
            yield ("lr",), "has no effect with `train: false`; leave one of the two out"


class TorchConfig(BackendConfig):
    """One process, one device, float32."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    type: str = "torch"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is CUDA where there is a device, else the CPU."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the model's own weights (needs the extra `lora`); merged weights are published."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: `embeddings` (input and output), or patterns of parameter names, such as `model.layers.0.*`."""
    parts: dict[str, PartConfig] = Field(default_factory=dict)
    """For models that read media: `vision` and `audio` (encoders), `projector` (from an encoder to the language model's width) and
    `language`, each trained or not, with a learning rate of its own if need be. Parts not named are trained like any model."""
    kept_encoder_tokens: Annotated[int, Field(ge=0)] = 65_536
    """Encoder tokens of media that are kept, as encoded, from step to step where nothing of their encoder is trained. 0: none."""
    share_prompts: bool = True
    """Siblings that answer the same prompt share its forward pass, where the model's attention can be told so (all layers see
    everything before them). Gradients are the same; short answers to long prompts take a fraction of the time."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""

    @rule
    def an_adapter_freezes_the_rest(self) -> Iterator[Violation]:
        for name in ("freeze", "parts"):
            if self.lora is not None and getattr(self, name):
                yield (
                    (name,),
                    "has no effect with `lora`, which trains nothing of the model itself; leave one of the two out",
                )


class EmulatedConfig(BackendConfig):
    """A backend for simulation: it counts."""

    needs_model: ClassVar[bool] = False
    type: str = "emulated"
    size: PositiveInt = 4
    """Elements of the one tensor that it exports."""


class OptimizerConfig(ComponentConfig):
    """What every optimizer's node has; own optimizers derive from it."""

    lr: PositiveFloat = 1e-5
    """Learning rate before the schedule's factor."""
    weight_decay: NonNegativeFloat = 0.0
    """Applied to matrices only: norms, biases and other vectors never decay."""


class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    type: str = "adamw"
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the squared mean."""


class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent."""

    type: str = "sgd"
    momentum: Decay = 0.0
    """Share of the last update that goes on."""


class ScheduleConfig(ComponentConfig):
    """What every schedule's node has; own schedules derive from it."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up; the first one already runs at 1/warmup_steps."""

    def problem(self, total_steps: int) -> str | None:
        """Why a stage of `total_steps` cannot have this schedule, None when it can."""
        return None


class ConstantConfig(ScheduleConfig):
    """The full learning rate after warm-up."""

    type: str = "constant"


class FallingConfig(ScheduleConfig):
    """A schedule that falls between warm-up and the end of the stage."""

    min_ratio: Ratio = 0.0
    """The last factor of the learning rate."""

    def problem(self, total_steps: int) -> str | None:
        """The warm-up must leave steps to fall in."""
        if self.warmup_steps < total_steps:
            return None
        return (
            f"schedule {self.type!r}: warmup_steps is {self.warmup_steps}, but the stage has {total_steps} steps; "
            "give fewer warm-up steps, or schedule 'constant'"
        )


class LinearConfig(FallingConfig):
    """Falls on a straight line after warm-up, to `min_ratio` at the end of the stage."""

    type: str = "linear"


class CosineConfig(FallingConfig):
    """Falls on half a cosine after warm-up, to `min_ratio` at the end of the stage."""

    type: str = "cosine"
