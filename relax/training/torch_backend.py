"""The single-process training backend: any Hugging Face causal language model, float32, one device; whole or by an adapter.

Owned by a trainer or reference role, called on that role's compute thread only. Gradients are unnormalised sums until
`optim_step` (LO2); a step that is empty or not finite leaves model, optimizer and schedule exactly as they were (LO4, LO6).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relax.config.base import ComponentConfig
from relax.core.batch import ForwardBackward, Measure, MicroBatch, Shards, StepReport, TopLogprobs, merge_measures
from relax.core.completion import Floats
from relax.core.error import InvariantError, UserError
from relax.core.protocol import LossFn, LossInput
from relax.model.device import find_device
from relax.model.family import Family
from relax.model.source import ModelOrigin
from relax.model.vocabulary import Vocabulary
from relax.training import state
from relax.training.config import TorchConfig
from relax.training.encoder import Encoders
from relax.training.forward import Policy
from relax.training.padding import PaddedBatch, pad_batch, unpad
from relax.training.part import own_rates, parameter_parts, set_rates
from relax.training.recompute import recompute_activations
from relax.training.schedule import Schedule
from relax.training.table import OPTIMIZERS, SCHEDULES
from relax.training.trained import build_trained


class TorchBackend:
    """A `TrainBackend`. `temperature` is the rollout's (TK5); `grad_clip` bounds the global norm of the scaled gradient.

    `model` is moved to the configured device and trained in place, or shared with an adapter (`lora`). `base` is what it takes to
    load it again. `tokenizer_path` is a folder whose tokenizer files go into every capture, `processor_path` one whose processor's
    do. `deterministic` uses torch's
    deterministic kernels in the whole process and insists on one thread (DE2). `family` is that of a model that reads media.
    """

    num_replicas = 1

    def __init__(
        self,
        config: TorchConfig,
        model: Any,
        vocabulary: Vocabulary,
        temperature: float = 1.0,
        grad_clip: float | None = 1.0,
        deterministic: bool = False,
        tokenizer_path: Path | None = None,
        processor_path: Path | None = None,
        base: ModelOrigin | None = None,
        family: Family | None = None,
    ) -> None:
        device = find_device(config.device)
        self._trained = build_trained(config, model.to(device), base or ModelOrigin(model.name_or_path), family)
        if config.activation_checkpointing:
            recompute_activations(self._trained.model)
        self._device = device
        self._pad_id = vocabulary.pad_id
        self._encoders = None if family is None else Encoders(family, config.kept_encoder_tokens, self.num_replicas > 1)
        allowed = torch.tensor(vocabulary.allowed, device=device)
        self._policy = Policy(self._trained.model, allowed, temperature, self._encoders)
        self._shares_prompts = config.share_prompts and self._policy.shares_prompts
        self._media_ids = () if family is None else tuple(family.placeholders.values())
        self._parameters = _trained_parameters(self._trained.model)
        owners = parameter_parts(self._trained.model, family)
        self._own_rates = own_rates(owners, self._parameters.values(), config.parts)
        self._grad_clip = grad_clip
        self._deterministic = deterministic
        self._companions = state.companion_files(tokenizer_path, processor_path)
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule: Schedule = lambda step: 1.0
        self._rates: list[float] = []
        self._settings = state.StageSettings({}, {}, 0)
        self._counters = state.Counters()
        self._finite = True

    def begin(self, optimizer: ComponentConfig, schedule: ComponentConfig, total_steps: int) -> None:
        """Start a stage of `total_steps` optimizer steps. Raises UserError for a schedule that does not fit them."""
        if not self._parameters:
            raise UserError("the model has no parameter that needs a gradient; nothing can be trained")
        if self._deterministic:
            _insist_on_determinism()
        self._schedule = SCHEDULES.component(schedule.type)(schedule, total_steps)
        self._optimizer = OPTIMIZERS.component(optimizer.type)(optimizer, self._parameters.values())
        set_rates(self._optimizer, self._own_rates)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._settings = state.StageSettings(
            optimizer.model_dump(mode="json"), schedule.model_dump(mode="json"), total_steps
        )
        self._counters = state.Counters()
        self._clear()

    def forward_backward(self, shards: Shards, loss: LossFn) -> ForwardBackward:
        """Add the gradients of every micro-batch's unnormalised loss; an empty micro-batch adds zeros (LO4)."""
        (batches,) = self._own(shards)
        parts = [self._accumulate(batch, loss) for batch in batches]
        finite = all(part.finite for part in parts) and self._gradients_are_finite()
        self._finite = self._finite and finite
        return ForwardBackward(
            math.fsum(part.loss for part in parts) if finite else math.nan,
            math.fsum(part.weight for part in parts),
            sum(part.tokens for part in parts),
            merge_measures([part.measures for part in parts]),
            finite,
        )

    def optim_step(self, normalizer: float) -> StepReport:
        """Scale by 1/normalizer, clip, step. The learning rate advances with applied steps only (B7)."""
        optimizer = self._begun()
        if not 0 <= normalizer < math.inf:
            raise InvariantError("LO2", f"the normalizer of a step is {normalizer}, expected a number of at least 0")
        rate = self._set_learning_rate(optimizer)
        norm = self._scale_and_clip(normalizer) if normalizer > 0 and self._finite else 0.0
        finite = self._finite and math.isfinite(norm)
        applied = finite and normalizer > 0
        if applied:
            optimizer.step()
        if applied and norm > 0 and rate > 0:
            self._trained.applied()
        self._counters.count(applied, finite)
        self._clear()
        return StepReport(applied, norm if finite else math.nan, rate, finite)

    def logprobs(self, shards: Shards) -> list[list[list[Floats]]]:
        """Per replica, micro-batch and row: float32[T] under the current weights, 0 off the mask."""
        (batches,) = self._own(shards)
        with torch.no_grad():
            values = [[unpad(self._policy(self._pad(batch, ()))[0], batch) for batch in batches]]
        self._encoder_measures()  # what training did is measured, not this
        return values

    def top_logprobs(self, shards: Shards, count: int) -> list[list[list[TopLogprobs]]]:
        """Per replica, micro-batch and row: the logprobs of its tokens, and the `count` likeliest tokens at each masked position."""
        (batches,) = self._own(shards)
        found = [(self._policy.top(self._pad(batch, ()), count), batch) for batch in batches]
        self._encoder_measures()
        rows = [[zip(*(unpad(part, batch) for part in parts), strict=True) for parts, batch in found]]
        return [[[TopLogprobs(*row) for row in batch] for batch in replica] for replica in rows]

    def export(self) -> Mapping[str, Tensor]:
        """The weights under their published names, on the training device; those that are trained in place change with the next step."""
        return self._trained.export()

    def capture(self) -> state.CapturedBackend:
        """A copy in CPU memory of all that `load` needs; call it between steps, for gradients are not in it."""
        training = state.capture_training(self._begun(), self._parameters, self._settings, self._counters)
        return state.CapturedBackend(self._trained.capture(), training, self._companions)

    def load(self, path: str) -> None:
        """Go on exactly where `capture` left off; call `begin` first, with the stage's nodes.

        Raises UserError, with this backend unchanged, when the folder holds another model or another optimizer.
        """
        folder = Path(path)
        optimizer = self._begun()
        saved = state.read_training(folder, self._settings, self._parameters)
        self._trained.load(folder)
        if self._encoders is not None:
            self._encoders.clear()
        saved.restore(optimizer, self._parameters)
        self._counters = saved.counters
        self._clear()

    @property
    def counters(self) -> state.Counters:
        """Steps of this stage by outcome."""
        return self._counters

    def offload(self) -> None:
        """Leave the device to others (DT): everything trained goes to the CPU's memory. On a CPU nothing moves."""
        if self._device.type != "cpu":
            state.move_training(self._trained.model, self._optimizer, torch.device("cpu"))

    def onload(self) -> None:
        """Back onto the device, before the next call of any other method."""
        if self._device.type != "cpu":
            state.move_training(self._trained.model, self._optimizer, self._device)

    def _own(self, shards: Shards) -> Shards:
        if len(shards) != self.num_replicas:
            raise InvariantError("TQ9", f"got {len(shards)} shards for {self.num_replicas} replica")
        return shards

    def _pad(self, batch: MicroBatch, columns: tuple[str, ...]) -> PaddedBatch:
        return pad_batch(batch, columns, self._pad_id, self._device, self._shares_prompts, self._media_ids)

    def _accumulate(self, batch: MicroBatch, loss: LossFn) -> ForwardBackward:
        padded = self._pad(batch, tuple(loss.columns))
        choices = getattr(loss, "choices", None)
        choices_BTK = padded.columns[choices] if choices is not None and padded.rows else None
        scored = self._policy(padded, loss.needs_entropy, choices_BTK)
        given = padded.mask_BT, padded.weights_BT, padded.columns
        output = loss(LossInput(scored.logprobs_BT, *given, scored.entropy_BT, scored.choices_BTK))
        if not output.loss.requires_grad or output.loss.ndim:
            raise InvariantError(
                "LO4", f"{loss!r} returned no scalar with a graph; sum over all positions, even when none count"
            )
        value = float(output.loss.detach())
        if math.isfinite(value):  # a gradient of anything else would only spread NaN
            output.loss.backward()
        return ForwardBackward(
            value,
            float(padded.weights_BT.sum(dtype=torch.float64)),
            int(padded.mask_BT.sum()),
            {**output.measures, **_token_measures(padded), **self._encoder_measures()},
            math.isfinite(value),
        )

    def _encoder_measures(self) -> dict[str, Measure]:
        return {} if self._encoders is None else self._encoders.take_work().measures()

    def _gradients_are_finite(self) -> bool:
        gradients = [one.grad for one in self._parameters.values() if one.grad is not None]
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)

    def _scale_and_clip(self, normalizer: float) -> float:
        """The global norm after scaling and before clipping."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                # A parameter that no row touched has a zero gradient, not none: its momentum must not depend on the cut.
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(normalizer)
        limit = math.inf if self._grad_clip is None else self._grad_clip
        return float(nn.utils.clip_grad_norm_(list(self._parameters.values()), limit))

    def _set_learning_rate(self, optimizer: torch.optim.Optimizer) -> float:
        factor = self._schedule(self._counters.applied)
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        return max(float(group["lr"]) for group in optimizer.param_groups)

    def _begun(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise InvariantError(
                "RR3", "a training backend was used before begin() gave it an optimizer and a schedule"
            )
        return self._optimizer

    def _clear(self) -> None:
        self._finite = True
        for parameter in self._parameters.values():
            parameter.grad = None


def _token_measures(batch: PaddedBatch) -> dict[str, Measure]:
    """Real tokens that went through the model, and the share of padded positions among all of them."""
    if not batch.rows:
        return {}
    lengths = [lane.length for lane in batch.lanes.lanes] if batch.lanes else [len(row) for row in batch.rows]
    tokens, positions = sum(lengths), len(lengths) * max(lengths)
    padding = {"training/padding/share": Measure(positions - tokens, positions)} if positions else {}
    return {"training/tokens/forward": Measure(tokens, 1.0, "sum"), **padding}


def _trained_parameters(model: Any) -> dict[str, nn.Parameter]:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32:
            raise UserError(
                f"backend 'torch' trains in float32, but {name} is {parameter.dtype}; set model.dtype: float32"
            )
    return trained


def _insist_on_determinism() -> None:
    torch.use_deterministic_algorithms(True)
    if torch.get_num_threads() != 1:
        raise InvariantError("DE2", f"a deterministic backend needs one intra-op thread, has {torch.get_num_threads()}")
