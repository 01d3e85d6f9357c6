"""What a training backend takes along when it gives its device up (DT)."""

from typing import Any

import torch

from relax.training.state import move_training
from tests.training.setting import LOSS, make_backend, make_rows, train_steps, weights_of


def test_weights_gradients_and_the_optimizers_tensors_move_and_parameters_stay_themselves() -> None:
    backend = make_backend()
    train_steps(backend, make_rows(), 1)
    backend.forward_backward([[tuple(make_rows())]], LOSS)
    model, optimizer = backend._trained.model, backend._optimizer
    assert optimizer is not None
    before = list(map(id, model.parameters()))
    there: Any = torch.float64  # stands for another device, of which this machine has none: `to` takes either
    move_training(model, optimizer, there)
    assert list(map(id, model.parameters())) == before, "the optimizer goes on with the same objects"
    assert {one.dtype for one in model.parameters()} == {torch.float64}
    assert {one.grad.dtype for one in model.parameters() if one.grad is not None} == {torch.float64}
    held = [(name, value) for state in optimizer.state.values() for name, value in state.items()]
    assert {value.dtype for name, value in held if name != "step"} == {torch.float64}
    assert {value.dtype for name, value in held if name == "step"} == {torch.float32}, "a counter stays on the CPU"


def test_on_a_cpu_nothing_moves() -> None:
    backend = make_backend()
    train_steps(backend, make_rows(), 1)
    before = {name: value.data_ptr() for name, value in backend.export().items()}
    backend.offload()
    backend.onload()
    assert {name: value.data_ptr() for name, value in backend.export().items()} == before
    train_steps(backend, make_rows(), 1)
    assert weights_of(backend)
