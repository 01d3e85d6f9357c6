"""Ranks whose rows hold other media run the same collectives, and end with the gradients of one process (MM5, case F5)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

from relax.training.encoder import smallest_medium
from relax.training.padding import pad_batch
from tests.training.media_setting import (
    KINDS,
    OMNI_25,
    family_of,
    make_media_row,
    make_media_rows,
    vocabulary_of,
)
from tests.training.rank_world import CPU, WAYS, make_policy, plans, run_rank, run_rounds
from tests.training.setting import gradient_gap


def gradients_of(policy: Any) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in policy.named_parameters() if one.grad is not None}


def test_case_f5_text_on_one_rank_and_media_on_another(tmp_path: Path) -> None:
    multiprocessing.spawn(run_rank, (str(tmp_path), True), nprocs=2)
    for name, (kind, _) in WAYS.items():
        alone = make_policy(kind, on_every_rank=False)
        logprobs = [run_rounds(alone, kind, batches) for batches in plans(kind)]
        for rank, expected in enumerate(logprobs):
            found = torch.load(tmp_path / f"{name}-{rank}.pt")
            assert gradient_gap(gradients_of(alone), found["gradients"]) <= 1e-5, name
            for values, wanted in zip(found["logprobs"], expected, strict=True):
                assert torch.allclose(values, wanted, atol=1e-5, rtol=0), name


@pytest.mark.parametrize("kind", KINDS)
def test_rule_mm5_every_encoder_has_a_gradient_whatever_the_rows_hold(kind: str) -> None:
    for batch in ((), (make_media_row(kind, 0),), (make_media_row(kind, 1, [("image", 1)]),)):
        everywhere, plain = make_policy(kind, on_every_rank=True), make_policy(kind, on_every_rank=False)
        logprobs = [run_rounds(policy, kind, [batch])[0] for policy in (everywhere, plain)]
        assert torch.equal(*logprobs)
        found, expected = gradients_of(everywhere), gradients_of(plain)
        missing = {name for name, _ in everywhere.named_parameters()} - set(found)
        assert missing == ({"model.model.audio_tower.audio_bos_eos_token.weight"} if kind == OMNI_25 else set())
        for name, gradient in found.items():
            wanted = expected.get(name, torch.zeros_like(gradient))
            assert torch.allclose(gradient, wanted, atol=1e-6, rtol=1e-5), name
            assert name in expected or not gradient.any(), name


@pytest.mark.parametrize("kind", KINDS)
def test_rule_mm5_the_number_of_encoder_calls_does_not_depend_on_the_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, family = make_policy(kind, on_every_rank=True), family_of(kind)
    rows = make_media_rows(kind)
    real, calls = family.encode, list[list[str]]()

    def counted(model: Any, media: Any) -> Any:
        calls.append([medium.modality for medium in media])
        return real(model, media)

    monkeypatch.setattr(family, "encode", counted)
    for batch in ((), (rows[0],), (rows[1],), tuple(rows), tuple(rows)):
        calls.clear()
        with torch.no_grad():
            policy(pad_batch(batch, (), vocabulary_of(kind).pad_id, CPU))
        assert [sorted(set(call)) for call in calls] == [[modality] for modality in family.modalities]


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_medium_is_small(kind: str) -> None:
    family = family_of(kind)
    for modality in family.modalities:
        medium = smallest_medium(family, modality)
        assert medium.modality == modality
        assert 1 <= medium.num_tokens <= 32
        assert medium.num_bytes < 1 << 20
