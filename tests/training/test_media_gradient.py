"""Gradients through encoders: what they may and may not depend on (LO1, LO4), and that siblings encode what they share once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.batch import TrainRow
from relax.core.completion import frozen
from relax.training.config import TorchConfig
from relax.training.packing import pack
from tests.training.media_setting import (
    KINDS,
    OMNI,
    OMNI_25,
    VL,
    make_backend,
    make_media_row,
    make_media_rows,
    make_model,
    vocabulary_of,
)
from tests.training.setting import (
    LOSS,
    gradient_gap,
    gradients_of,
    same_bits,
    total_weight,
    weight_gap,
    weights_of,
)
from tests.training.test_media_logprobs import raw_inputs


def gradients_for(kind: str, batches: Sequence[tuple[TrainRow, ...]], **arguments: Any) -> dict[str, torch.Tensor]:
    backend = make_backend(kind, **arguments)
    assert backend.forward_backward([list(batches)], LOSS).finite
    return every_gradient(backend)


def every_gradient(backend: Any) -> dict[str, torch.Tensor]:
    """Zero where no row touched a parameter."""
    zeros = {name: torch.zeros_like(one) for name, one in backend._parameters.items()}
    return zeros | gradients_of(backend)


@pytest.mark.parametrize("kind", KINDS)
def test_rule_lo1_gradients_do_not_depend_on_the_cut_of_mixed_rows(kind: str) -> None:
    rows = make_media_rows(kind)
    reference = gradients_for(kind, [tuple(rows)])
    shuffled = [rows[index] for index in np.random.default_rng(3).permutation(len(rows))]
    cuts = {
        "by length": pack(rows, 200),
        "by id": pack(rows, 200, in_order=True),
        "by encoder tokens": pack(rows, 4000, encoder_budget=300),
        "shuffled": [tuple(shuffled[:7]), (), tuple(shuffled[7:])],
    }
    for name, batches in cuts.items():
        assert gradient_gap(reference, gradients_for(kind, batches)) <= 1e-5, name


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", [VL, OMNI])
def test_case_d4_micro_batch_size_changes_no_gradient_with_media(kind: str, size: int) -> None:
    rows = make_media_rows(kind)
    batches = [tuple(rows[start : start + size]) for start in range(0, len(rows), size)]
    assert gradient_gap(gradients_for(kind, [tuple(rows)]), gradients_for(kind, batches)) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_a_plain_forward_over_raw_features(kind: str) -> None:
    rows = make_media_rows(kind)
    model = make_model(kind)
    allowed = torch.tensor(vocabulary_of(kind).allowed)
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **raw_inputs(kind, row))
        logprobs = torch.log_softmax(output.logits[0].masked_fill(~allowed, -torch.inf), -1)[:-1]
        chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0][torch.from_numpy(row.mask[1:].copy())]
        scale = torch.from_numpy((row.weights * row.columns["advantages"])[row.mask].copy())
        (-(scale * chosen).sum()).backward()
    untouched = {name.rpartition("audio_tower.")[2] for name, one in model.named_parameters() if one.grad is None}
    assert untouched == ({"audio_bos_eos_token.weight"} if kind == OMNI_25 else set()), (
        "of a use that thinkers have not"
    )
    plain = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in model.named_parameters()}
    assert gradient_gap(gradients_for(kind, [tuple(rows)]), plain) <= 1e-5


def test_rule_lo1_gradients_do_not_depend_on_the_padding_value_with_media() -> None:
    rows = tuple(make_media_rows(OMNI))
    padded = gradients_for(OMNI, [rows], vocabulary=replace(vocabulary_of(OMNI), pad_id=5))
    assert gradient_gap(gradients_for(OMNI, [rows]), padded) <= 1e-5


@pytest.mark.parametrize("kind", [VL, OMNI])
def test_rule_lo1_weights_after_steps_do_not_depend_on_the_cut_of_mixed_rows(kind: str) -> None:
    rows = make_media_rows(kind)
    whole, cut = make_backend(kind), make_backend(kind)
    for _ in range(5):
        whole.forward_backward([[tuple(rows)]], LOSS)
        cut.forward_backward([pack(rows, 250)], LOSS)
        for backend in (whole, cut):
            assert backend.optim_step(total_weight(rows)).applied
    assert weight_gap(weights_of(make_backend(kind)), weights_of(whole)) > 1e-3
    assert weight_gap(weights_of(whole), weights_of(cut)) <= 1e-5


@pytest.mark.parametrize("kind", [VL, OMNI])
def test_rule_lo4_rows_without_a_mask_and_empty_micro_batches_add_nothing(kind: str) -> None:
    rows = make_media_rows(kind)[:4]
    silent = [replace(row, mask=frozen(np.zeros_like(row.mask))) for row in rows]
    alone = make_backend(kind)
    report = alone.forward_backward([[tuple(silent), ()]], LOSS)
    assert (report.loss, report.tokens, report.finite) == (0.0, 0, True)
    assert not any(bool(one.any()) for one in gradients_of(alone).values())
    assert not alone.optim_step(0.0).applied
    both = gradients_for(kind, [tuple(rows), (), tuple(silent)])
    assert gradient_gap(gradients_for(kind, [tuple(rows)]), both) <= 1e-6


@pytest.mark.parametrize("kind", [VL, OMNI])
def test_rule_mm2_siblings_of_a_micro_batch_encode_what_they_share_once(kind: str) -> None:
    rows = [make_media_row(kind, index, [("image", 6), ("video", 2)]) for index in range(4)]
    backend = make_backend(kind)
    report = backend.forward_backward([[tuple(rows)]], LOSS)
    media = {medium.key: medium for medium in rows[0].media}
    assert report.measures["training/encoder/media"].value == len(media) == 2
    assert report.measures["training/encoder/tokens"].value == sum(one.encoder_tokens for one in media.values())
    assert report.measures["training/encoder/kept"].value == 0
    assert gradient_gap(gradients_for(kind, [(row,) for row in rows]), every_gradient(backend)) <= 1e-5


def test_encoding_for_logprobs_is_not_counted_as_training() -> None:
    rows = tuple(make_media_rows(VL))
    backend = make_backend(VL)
    backend.logprobs([[rows]])
    report = backend.forward_backward([[rows[:1]]], LOSS)
    assert not rows[0].media
    assert not [name for name in report.measures if name.startswith("training/encoder/")]


@pytest.mark.parametrize("kind", KINDS)
def test_activations_that_are_computed_again_change_no_gradient(kind: str) -> None:
    rows = tuple(make_media_rows(kind))
    saving = gradients_for(kind, [rows], config=TorchConfig(device="cpu", activation_checkpointing=True))
    assert gradient_gap(gradients_for(kind, [rows]), saving) <= 1e-6


def test_rule_de2_equal_runs_with_media_end_with_equal_bits() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        runs = [make_backend(OMNI, deterministic=True) for _ in range(2)]
        rows = make_media_rows(OMNI)
        for backend in runs:
            for _ in range(2):
                backend.forward_backward([pack(rows, 300, in_order=True)], LOSS)
                assert backend.optim_step(total_weight(rows)).applied
        assert same_bits(*(weights_of(backend) for backend in runs))
    finally:
        torch.use_deterministic_algorithms(before)
