"""The critic's backend: values and gradients against plain torch, what they may not depend on (LO1), and its files (RR3)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from relax.algorithms.value_loss import ValueLoss
from relax.core.batch import MicroBatch, TrainRow
from relax.core.completion import frozen
from relax.core.error import UserError
from relax.training.config import AdamWConfig, ConstantConfig, LinearConfig, LoraConfig, TorchConfig
from relax.training.packing import pack
from relax.training.value import FILE, give_value_head
from relax.training.value_backend import ValueBackend
from tests.training import media_setting
from tests.training.setting import (
    ADAMW,
    CONSTANT,
    gradient_gap,
    gradients_of,
    make_model,
    make_row,
    make_rows,
    same_bits,
    total_weight,
    vocabulary,
    weight_gap,
    weights_of,
)

LOSS = ValueLoss(0.2)


def with_targets(row: TrainRow, number: int) -> TrainRow:
    """A row that a critic trains on: old values near 0, returns near 1."""
    rng = np.random.default_rng(7000 + number)
    old, returns = (np.where(row.mask, rng.normal(mean, 0.3, len(row)), 0) for mean in (0.0, 1.0))
    columns = {"values": frozen(old.astype(np.float32)), "returns": frozen(returns.astype(np.float32))}
    return replace(row, columns=columns)


ROWS = [with_targets(row, number) for number, row in enumerate(make_rows())]


def make_values(
    model: Any = None, config: TorchConfig | None = None, begun: bool = True, seed: int = 0, **arguments: Any
) -> ValueBackend:
    """A critic over a tiny model. Its head is not zero, so that gradients reach the whole model."""
    arguments = {"vocabulary": vocabulary(), **arguments}
    backend = ValueBackend(config or TorchConfig(device="cpu"), model or make_model(seed), **arguments)
    head = backend._trained.model.get_output_embeddings()
    with torch.no_grad():
        head.weight.copy_(0.1 * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed)))
        head.bias.fill_(0.3)
    if begun:
        backend.begin(ADAMW, CONSTANT, 100)
    return backend


def gradients_for(batches: Sequence[MicroBatch], **arguments: Any) -> dict[str, Tensor]:
    backend = make_values(**arguments)
    assert backend.forward_backward([list(batches)], LOSS).finite
    zeros = {name: torch.zeros_like(one) for name, one in backend._parameters.items()}
    return zeros | gradients_of(backend)


class Plain(nn.Module):
    """The value model as one would write it: the trunk, a linear layer, row by row without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = make_model().model
        self.head = nn.Linear(self.trunk.config.hidden_size, 1)
        theirs = make_values()._trained.model.get_output_embeddings()
        self.head.load_state_dict(theirs.state_dict())

    def values(self, row: TrainRow) -> Tensor:
        """[N]: of each masked token, from the hidden state of the one before it."""
        ids = torch.tensor(np.array(row.token_ids), dtype=torch.long)[None]
        hidden = self.trunk(input_ids=ids, use_cache=False).last_hidden_state[0]
        return self.head(hidden[torch.tensor(np.flatnonzero(row.mask) - 1)])[:, 0]

    def loss(self, rows: Sequence[TrainRow]) -> Tensor:
        total = torch.zeros(())
        for row in rows:
            if not row.mask.any():
                continue
            values = self.values(row)
            old, returns = (torch.tensor(np.array(row.columns[name][row.mask])) for name in ("values", "returns"))
            near = torch.clamp(values, old - 0.2, old + 0.2)
            errors = 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2)
            total = total + (torch.tensor(np.array(row.weights[row.mask])) * errors).sum()
        return total

    def named(self) -> dict[str, Tensor]:
        """Parameters under the names of the backend."""
        return {f"model.{name}": one for name, one in self.trunk.named_parameters()} | {
            f"lm_head.{name}": one for name, one in self.head.named_parameters()
        }


def test_a_fresh_critic_says_zero_and_only_its_head_has_a_gradient() -> None:
    backend = ValueBackend(TorchConfig(device="cpu"), make_model(), vocabulary())
    backend.begin(ADAMW, CONSTANT, 10)
    assert all(not values.any() for values in backend.values([[tuple(ROWS)]])[0][0])
    backend.forward_backward([[tuple(ROWS)]], LOSS)
    moved = {name for name, gradient in gradients_of(backend).items() if gradient.any()}
    assert moved == {"lm_head.weight", "lm_head.bias"}


def test_values_are_those_of_plain_torch_and_0_off_the_mask() -> None:
    plain = Plain()
    found = make_values().values([[tuple(ROWS)]])[0][0]
    for row, values in zip(ROWS, found, strict=True):
        assert values.dtype == np.float32
        assert not values[~row.mask].any()
        if row.mask.any():
            assert values[row.mask] == pytest.approx(plain.values(row).detach().numpy(), abs=1e-5)
            assert np.abs(values[row.mask]).max() > 1e-3


def test_the_gradient_is_that_of_plain_torch() -> None:
    plain = Plain()
    plain.loss(ROWS).backward()
    expected = {name: one.grad for name, one in plain.named().items()}
    assert gradient_gap(expected, gradients_for([tuple(ROWS)])) <= 1e-5


def test_ten_steps_are_those_of_a_plain_loop() -> None:
    plain, backend = Plain(), make_values()
    matrices = [one for one in plain.parameters() if one.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": [one for one in plain.parameters() if one.ndim < 2]}],
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0,
    )  # fmt: skip
    for step in range(10):
        rows = [ROWS[(4 * step + offset) % len(ROWS)] for offset in range(4)]
        optimizer.zero_grad()
        (plain.loss(rows) / total_weight(rows)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        backend.forward_backward([[(row,) for row in rows]], LOSS)
        backend.optim_step(total_weight(rows))
    assert weight_gap({name: one.detach() for name, one in plain.named().items()}, weights_of(backend)) <= 1e-5
    assert weight_gap(weights_of(make_values()), weights_of(backend)) > 1e-3


@pytest.mark.parametrize("budget", [1, 20, 50, 1000])
def test_case_d16_gradients_do_not_depend_on_the_micro_batches(budget: int) -> None:
    assert gradient_gap(gradients_for([tuple(ROWS)]), gradients_for(pack(ROWS, budget))) <= 1e-5


@pytest.mark.parametrize("shares", [False, True])
def test_rule_lo1_gradients_do_not_depend_on_shared_prompts_padding_or_order(shares: bool) -> None:
    prompt = make_row(40, 9, 0).token_ids
    siblings = [
        replace(row, token_ids=frozen(np.concatenate([prompt, row.token_ids[9:]])))
        for row in (with_targets(make_row(40 + number, 9, 3 + number), number) for number in range(4))
    ]
    config = TorchConfig(device="cpu", share_prompts=shares)
    padded = gradients_for([tuple(siblings[::-1])], config=config, vocabulary=replace(vocabulary(), pad_id=42))
    alone = gradients_for([(row,) for row in siblings])
    assert gradient_gap(alone, padded) <= 1e-5


@pytest.mark.parametrize("kind", media_setting.KINDS)
def test_rule_lo1_a_critic_that_reads_media(kind: str) -> None:
    rows = [with_targets(row, number) for number, row in enumerate(media_setting.make_media_rows(kind)[:6])]
    setting = {"vocabulary": media_setting.vocabulary_of(kind), "family": media_setting.family_of(kind)}
    whole = gradients_for([tuple(rows)], model=media_setting.make_model(kind), **setting)
    cut = gradients_for([(row,) for row in rows], model=media_setting.make_model(kind), **setting)
    assert gradient_gap(whole, cut) <= 1e-5
    assert max(float(one.abs().max()) for one in whole.values()) > 1e-3


def test_what_the_policy_freezes_stays_but_the_head_is_trained() -> None:
    backend = make_values(config=TorchConfig(device="cpu", freeze=("embeddings", "model.layers.0.*")))
    names = set(backend._parameters)
    assert {"lm_head.weight", "lm_head.bias", "model.layers.1.mlp.up_proj.weight"} <= names
    assert not any("embed_tokens" in name or "layers.0." in name for name in names)


def test_a_critic_beside_an_adapter_is_trained_whole() -> None:
    whole = make_values(config=TorchConfig(device="cpu", lora=LoraConfig(rank=2)))
    assert set(whole._parameters) == set(make_values()._parameters)


def test_rule_lo6_a_return_that_is_not_finite_changes_nothing() -> None:
    backend = make_values()
    before = weights_of(backend)
    bad = replace(ROWS[0], columns={**ROWS[0].columns, "returns": frozen(np.full(len(ROWS[0]), np.inf, np.float32))})
    assert not backend.forward_backward([[(bad,)]], LOSS).finite
    report = backend.optim_step(1.0)
    assert (report.applied, report.finite) == (False, False)
    assert same_bits(before, weights_of(backend))


def steps(backend: ValueBackend, first: int, count: int) -> None:
    for step in range(first, first + count):
        rows = tuple(ROWS[(3 * step + offset) % len(ROWS)] for offset in range(3))
        backend.forward_backward([[rows]], LOSS)
        backend.optim_step(total_weight(list(rows)))


def test_rule_rr3_a_critic_goes_on_from_its_files_bit_for_bit(tmp_path: Path) -> None:
    schedule = LinearConfig(warmup_steps=2)
    one = make_values(begun=False)
    one.begin(AdamWConfig(lr=1e-2), schedule, 12)
    steps(one, 0, 5)
    captured = one.capture()
    steps(one, 5, 5)
    captured.write(str(tmp_path))
    other = make_values(begun=False, seed=3)
    other.begin(AdamWConfig(lr=1e-2), schedule, 12)
    other.load(str(tmp_path))
    steps(other, 5, 5)
    assert same_bits(weights_of(one), weights_of(other))
    assert one.counters == other.counters


def test_files_of_another_model_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    kind = media_setting.VL
    theirs = ValueBackend(
        TorchConfig(device="cpu"),
        media_setting.make_model(kind),
        media_setting.vocabulary_of(kind),
        family=media_setting.family_of(kind),
    )
    theirs.begin(ADAMW, ConstantConfig(), 10)
    theirs.capture().write(str(tmp_path / "other"))
    backend = make_values()
    before = weights_of(backend)
    with pytest.raises(UserError, match="not the one of this run: its model type is 'qwen3_vl'"):
        backend.load(str(tmp_path / "other"))
    make_values().capture().write(str(tmp_path / "torn"))
    (tmp_path / "torn" / FILE).write_bytes((tmp_path / "torn" / FILE).read_bytes()[:100])
    with pytest.raises(UserError, match="no usable value model"):
        backend.load(str(tmp_path / "torn"))
    assert same_bits(before, weights_of(backend))


def test_a_model_without_an_output_layer_is_refused() -> None:
    with pytest.raises(UserError, match=r"critic\.model"):
        give_value_head(make_model().model)


def test_tied_embeddings_are_not_touched_by_the_head() -> None:
    """The tiny model ties its output layer to its embeddings; a value model has a layer of its own."""
    model = make_model()
    assert model.config.tie_word_embeddings
    embeddings = model.get_input_embeddings().weight
    before = embeddings.detach().clone()
    head = give_value_head(model)
    assert head.weight.data_ptr() != embeddings.data_ptr()
    assert torch.equal(embeddings, before)
