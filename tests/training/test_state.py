"""Capture, write and load of the torch backend: exact continuation, files for people, refusals (RR3)."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.error import InvariantError, UserError
from relax.model.load import load_model, load_tokenizer
from relax.training.config import AdamWConfig, CosineConfig, OptimizerConfig, SgdConfig, TorchConfig
from relax.training.state import Counters
from relax.training.torch_backend import TorchBackend
from tests.training.setting import (
    ADAMW,
    CONSTANT,
    FROZEN,
    LORA,
    LOSS,
    MODEL_PATH,
    make_backend,
    make_row,
    make_rows,
    same_bits,
    train_steps,
    vocabulary,
    weights_of,
)

ROWS = make_rows()
COSINE = CosineConfig(warmup_steps=2, min_ratio=0.1)


@pytest.mark.parametrize("optimizer", [ADAMW, SgdConfig(lr=0.1, momentum=0.9), SgdConfig(lr=0.1)], ids=["a", "m", "s"])
def test_rule_rr3_a_loaded_backend_goes_on_with_the_same_bits(optimizer: OptimizerConfig, tmp_path: Path) -> None:
    stage: dict[str, Any] = {"optimizer": optimizer, "schedule": COSINE, "total_steps": 6}
    straight = make_backend(**stage)
    train_steps(straight, ROWS, 6)
    first = make_backend(**stage)
    train_steps(first, ROWS, 3)
    first.capture().write(str(tmp_path))
    resumed = make_backend(seed=99, **stage)
    resumed.load(str(tmp_path))
    assert same_bits(weights_of(first), weights_of(resumed))
    train_steps(resumed, ROWS, 3, first=3)
    assert resumed.counters == straight.counters
    assert same_bits(weights_of(straight), weights_of(resumed))
    assert not same_bits(weights_of(first), weights_of(resumed)), "steps after the load have to change something"


def skip_steps(backend: TorchBackend) -> None:
    """One step with nothing to train, and one that is not finite."""
    backend.forward_backward([[()]], LOSS)
    backend.optim_step(0.0)
    row = make_row(50, 3, 4, columns={"advantages": np.full(7, np.inf, dtype=np.float32)})
    backend.forward_backward([[(row,)]], LOSS)
    assert not backend.optim_step(1.0).finite


@pytest.mark.parametrize("config", [TorchConfig(device="cpu"), FROZEN, LORA], ids=["whole", "frozen", "lora"])
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_rule_rr3_a_kill_at_any_step_costs_nothing(config: TorchConfig, stop: int, tmp_path: Path) -> None:
    """Whatever is trained, before the first step, within the warm-up and past it, right after skipped steps."""
    stage: dict[str, Any] = {"schedule": COSINE, "total_steps": 6, "config": config}
    straight, first, resumed = (make_backend(**stage) for _ in range(3))
    for backend in (straight, first):
        train_steps(backend, ROWS, stop)
        skip_steps(backend)
    first.capture().write(str(tmp_path))
    train_steps(resumed, ROWS, 1, first=2)  # what it held before must not matter
    resumed.load(str(tmp_path))
    assert resumed.counters == first.counters == Counters(applied=stop, empty=1, nonfinite=1)
    for backend in (straight, resumed):
        train_steps(backend, ROWS, 6 - stop, first=stop)
    assert same_bits(weights_of(straight), weights_of(resumed))
    assert optimizer_bits(straight) == optimizer_bits(resumed)


def optimizer_bits(backend: TorchBackend) -> list[tuple[str, bytes]]:
    """Every tensor of the optimizer, by parameter and name."""
    assert backend._optimizer is not None
    held = backend._optimizer.state
    return [
        (f"{name}/{key}", held[parameter][key].numpy().tobytes())
        for name, parameter in backend._parameters.items()
        for key in sorted(held[parameter])
    ]


@pytest.mark.parametrize("config", [TorchConfig(device="cpu"), LORA], ids=["whole", "lora"])
def test_what_was_captured_does_not_change_while_training_goes_on(config: TorchConfig, tmp_path: Path) -> None:
    backend = make_backend(config=config, tokenizer_path=MODEL_PATH)
    train_steps(backend, ROWS, 2)
    expected, optimizer = weights_of(backend), optimizer_bits(backend)
    captured = backend.capture()
    torch.rand(5)
    train_steps(backend, ROWS, 2, first=2)
    writer = threading.Thread(target=captured.write, args=(str(tmp_path),))
    writer.start()
    train_steps(backend, ROWS, 3, first=4)
    writer.join()
    assert not same_bits(expected, weights_of(backend))
    loaded = make_backend(config=config)
    loaded.load(str(tmp_path))
    assert same_bits(expected, weights_of(loaded))
    assert optimizer_bits(loaded) == optimizer
    assert loaded.counters.applied == 2


def test_capturing_shares_nothing_and_changes_nothing() -> None:
    backend = make_backend()
    train_steps(backend, ROWS, 1)
    before, state = weights_of(backend), torch.get_rng_state()
    captured = backend.capture()
    assert torch.equal(torch.get_rng_state(), state)
    assert same_bits(before, weights_of(backend))
    mine = {tensor.data_ptr() for tensor in backend.export().values()}
    theirs = {tensor.data_ptr() for tensor in captured.model.model.state_dict().values()}  # type: ignore[attr-defined]
    assert not mine & theirs


def test_load_keeps_the_tensors_that_others_hold(tmp_path: Path) -> None:
    saved = make_backend(seed=1)
    saved.capture().write(str(tmp_path))
    backend = make_backend(seed=2)
    exported = backend.export()
    backend.load(str(tmp_path))
    assert same_bits(dict(exported), weights_of(saved))


def test_load_restores_the_random_state_and_drops_gradients(tmp_path: Path) -> None:
    backend = make_backend()
    backend.capture().write(str(tmp_path))
    expected = torch.rand(3)
    before = weights_of(backend)
    backend.forward_backward([[tuple(ROWS)]], LOSS)
    backend.load(str(tmp_path))
    assert torch.equal(torch.rand(3), expected)
    assert all(one.grad is None for one in backend._parameters.values())
    assert same_bits(before, weights_of(backend))


def test_a_saved_folder_is_a_model_that_people_can_load(tmp_path: Path) -> None:
    backend = make_backend(tokenizer_path=MODEL_PATH)
    train_steps(backend, ROWS, 1)
    backend.capture().write(str(tmp_path))
    loaded = load_model(tmp_path, "pretrained", "float32")
    again = TorchBackend(TorchConfig(device="cpu"), loaded, vocabulary())
    assert same_bits(weights_of(backend), weights_of(again))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer("1+2=3").input_ids == load_tokenizer(MODEL_PATH)("1+2=3").input_ids
    assert tokenizer.chat_template == load_tokenizer(MODEL_PATH).chat_template


def test_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    from transformers import AutoConfig, Qwen3ForCausalLM

    config = AutoConfig.from_pretrained(MODEL_PATH)
    config.intermediate_size = 64
    other = make_backend(model=Qwen3ForCausalLM(config))
    other.capture().write(str(tmp_path))
    backend = make_backend()
    train_steps(backend, ROWS, 2)
    before = weights_of(backend)
    with pytest.raises(UserError, match=r"is not the one of this run: .*mlp.* is \(.*64.*\), expected"):
        backend.load(str(tmp_path))
    assert same_bits(before, weights_of(backend))
    assert backend.counters.applied == 2


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    make_backend().capture().write(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(UserError, match="holds a model of type 'llama', this run has 'qwen3'"):
        make_backend().load(str(tmp_path))


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    make_backend(optimizer=SgdConfig(lr=0.1)).capture().write(str(tmp_path))
    backend = make_backend(seed=3)
    before = weights_of(backend)
    with pytest.raises(UserError, match=r"saved with optimizer 'sgd', this run has 'adamw'; set .*type: sgd"):
        backend.load(str(tmp_path))
    assert same_bits(before, weights_of(backend))


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_damaged_training_state_is_refused(damage: str, tmp_path: Path) -> None:
    backend = make_backend()
    train_steps(backend, ROWS, 1)
    backend.capture().write(str(tmp_path))
    file = tmp_path / "training" / "state.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="no usable training state"):
        backend.load(str(tmp_path))


def test_a_backend_that_was_not_begun_says_so(tmp_path: Path) -> None:
    make_backend().capture().write(str(tmp_path / "saved"))
    backend = TorchBackend(TorchConfig(device="cpu"), load_model(MODEL_PATH, "random", "float32"), vocabulary())
    for call in (
        lambda: backend.optim_step(1.0),
        lambda: backend.capture().write(str(tmp_path)),
        lambda: backend.load(str(tmp_path / "saved")),
    ):
        with pytest.raises(InvariantError, match=r"before begin\(\)"):
            call()


def test_begin_starts_a_fresh_optimizer_on_the_weights_as_they_are() -> None:
    backend = make_backend()
    train_steps(backend, ROWS, 2)
    before = weights_of(backend)
    backend.begin(AdamWConfig(lr=1e-3), CONSTANT, 5)
    assert same_bits(before, weights_of(backend))
    assert backend.counters.applied == 0
    assert not backend._optimizer.state
