"""Activation checkpointing: the same gradients, less kept, and a refusal where a model cannot."""

from pathlib import Path

import pytest
import torch

from relax.core.error import UserError
from relax.training.config import LoraConfig, TorchConfig
from tests.training.setting import LOSS, gradient_gap, gradients_of, make_backend, make_model, make_rows, same_bits

ROWS = make_rows()
LORA = LoraConfig(rank=4)


def kept_bytes(config: TorchConfig) -> int:
    """Bytes that autograd keeps for the backward pass of one micro-batch."""
    backend = make_backend(config=config)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        backend.forward_backward([[tuple(ROWS)]], LOSS)
    return sum(kept.values())


@pytest.mark.parametrize("changes", [{}, {"freeze": ("embeddings",)}, {"lora": LORA}], ids=["whole", "frozen", "lora"])
def test_gradients_are_the_same_with_and_without(changes: dict) -> None:
    plain, saving = (
        make_backend(config=TorchConfig(device="cpu", activation_checkpointing=on, **changes)) for on in (False, True)
    )
    reports = [backend.forward_backward([[tuple(ROWS), tuple(ROWS[:3])]], LOSS) for backend in (plain, saving)]
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-6)
    assert gradient_gap(gradients_of(plain), gradients_of(saving)) <= 1e-6
    assert max(float(one.abs().max()) for one in gradients_of(saving).values()) > 0


def test_layers_are_computed_again_in_the_backward_pass() -> None:
    calls = []
    for on in (False, True):
        model = make_model()
        backend = make_backend(model=model, config=TorchConfig(device="cpu", activation_checkpointing=on))
        count = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        backend.forward_backward([[tuple(ROWS)]], LOSS)
        calls.append(len(count))
    assert calls == [1, 2]


def test_logprobs_do_not_change_and_parts_stay_in_evaluation_mode() -> None:
    plain, saving = make_backend(), make_backend(config=TorchConfig(device="cpu", activation_checkpointing=True))
    ours, theirs = (backend.logprobs([[tuple(ROWS)]])[0][0] for backend in (plain, saving))
    assert all((one == other).all() for one, other in zip(ours, theirs, strict=True))
    assert not any(module.training for layer in saving._trained.model.model.layers for module in layer.children())


def test_a_model_without_support_is_refused() -> None:
    model = make_model()
    type(model).supports_gradient_checkpointing, before = False, type(model).supports_gradient_checkpointing
    try:
        with pytest.raises(UserError, match="Qwen3ForCausalLM has no activation checkpointing"):
            make_backend(model=model, config=TorchConfig(device="cpu", activation_checkpointing=True))
    finally:
        type(model).supports_gradient_checkpointing = before


def test_what_is_captured_is_an_ordinary_model(tmp_path: Path) -> None:
    config = TorchConfig(device="cpu", activation_checkpointing=True)
    backend = make_backend(config=config)
    backend.capture().write(str(tmp_path))
    other = make_backend(seed=1)
    other.load(str(tmp_path))
    assert same_bits(dict(backend.export()), dict(other.export()))
