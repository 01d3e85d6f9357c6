"""Logprobs of rows with media: the policy's are those of a plain forward of the model over raw features."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.batch import TrainRow
from relax.core.completion import frozen
from relax.core.error import InvariantError
from relax.training.packing import pack
from tests.training.media_setting import (
    KINDS,
    OMNI,
    OMNI_25,
    VL,
    VL_25,
    family_of,
    make_backend,
    make_media_row,
    make_media_rows,
    make_medium,
    make_model,
    vocabulary_of,
)


def raw_inputs(kind: str, row: TrainRow) -> dict[str, Any]:
    """What the model's own processor would give it: raw features of one row, and no positions."""
    found: dict[str, list[torch.Tensor]] = {}
    for medium in row.media:
        for name, array in medium.arrays.items():
            found.setdefault(name, []).append(torch.from_numpy(array.copy()))
    inputs: dict[str, Any] = {
        name: torch.cat(found[name]) for name in ("pixel_values", "pixel_values_videos") if name in found
    }
    for name in ("image_grid_thw", "video_grid_thw"):
        if name in found:
            inputs[name] = torch.stack(found[name])
    if "second_per_grid" in found:
        name = {VL_25: "second_per_grid_ts", OMNI: "video_second_per_grid", OMNI_25: "video_second_per_grid"}.get(kind)
        inputs |= {name: torch.cat(found["second_per_grid"])} if name else {}
    inputs |= sounds(found)
    placeholders = family_of(kind).placeholders
    if kind not in (OMNI, OMNI_25):
        types = {"image": 1, "video": 2}
        kinds = sum((row.token_ids == placeholders[one]) * number for one, number in types.items())
        inputs["mm_token_type_ids"] = torch.from_numpy(np.asarray(kinds, np.int64))[None]
    return inputs


def sounds(found: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    if "input_features" not in found:
        return {}
    longest = max(one.shape[-1] for one in found["input_features"])
    features = [torch.nn.functional.pad(one, (0, longest - one.shape[-1])) for one in found["input_features"]]
    mask = torch.zeros(len(features), longest, dtype=torch.int64)
    for number, one in enumerate(found["input_features"]):
        mask[number, : one.shape[-1]] = 1
    return {"input_features": torch.stack(features), "feature_attention_mask": mask}


@torch.no_grad()
def plain_logprobs(kind: str, model: Any, row: TrainRow) -> np.ndarray:
    ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **raw_inputs(kind, row))
    logits = output.logits[0].float().masked_fill(~torch.tensor(vocabulary_of(kind).allowed), -torch.inf)
    logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return np.where(row.mask[1:], logprobs.numpy(), 0.0)


def answers(backend: Any, batches: Sequence[tuple[TrainRow, ...]]) -> dict[str, np.ndarray]:
    (found,) = backend.logprobs([list(batches)])
    return {
        row.id: values
        for batch, rows in zip(batches, found, strict=True)
        for row, values in zip(batch, rows, strict=True)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_a_plain_forward_over_raw_features(kind: str) -> None:
    model, rows = make_model(kind), make_media_rows(kind)
    backend = make_backend(kind, model=model)
    for batches in ([tuple(rows)], pack(rows, 300), [(row,) for row in rows]):
        found = answers(backend, batches)
        for row in rows:
            gap = np.abs(found[row.id][1:] - plain_logprobs(kind, model, row)).max()
            assert gap < 1e-5, f"{row.id} with {[medium.modality for medium in row.media]} is off by {gap}"


@pytest.mark.parametrize("kind", KINDS)
def test_media_matter_and_so_does_their_order(kind: str) -> None:
    backend = make_backend(kind)
    row = make_media_row(kind, 0, [("image", 3), ("image", 3)])
    # Two media of one size, so that either order fits the placeholders.
    other = replace(make_medium(kind, "image", 3), key="other", arrays=dict(make_medium(kind, "image", 3).arrays))
    other.arrays["pixel_values"] = frozen(-other.arrays["pixel_values"])
    one, two, three = (replace(row, media=media) for media in ((row.media[0], other), (other, row.media[0]), row.media))
    values = [answers(backend, [(chosen,)])[row.id] for chosen in (one, two, three)]
    assert all(np.abs(values[a] - values[b]).max() > 1e-6 for a, b in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("kind", [VL, OMNI])
def test_rule_mm1_a_row_with_too_few_or_too_many_placeholders_is_refused_by_name(kind: str) -> None:
    backend, row = make_backend(kind), make_media_row(kind, 2, [("image", 3)])
    placeholder = family_of(kind).placeholders["image"]
    first = int((row.token_ids == placeholder).argmax())
    fewer, more = row.token_ids.copy(), row.token_ids.copy()
    fewer[first], more[1] = 5, placeholder
    count = int((row.token_ids == placeholder).sum())
    for token_ids, found in ((fewer, count - 1), (more, count + 1)):
        broken = replace(row, token_ids=frozen(token_ids))
        expected = rf"\[MM1\] {row.id} has {found} placeholders for image, but its media have {count} features"
        with pytest.raises(InvariantError, match=expected):
            backend.logprobs([[(make_media_row(kind, 0), broken)]])
    with pytest.raises(InvariantError, match=rf"\[MM1\] {row.id} has {count} placeholders for image, .* 0 features"):
        backend.logprobs([[(replace(row, media=()),)]])


def test_rule_mm1_media_that_the_model_does_not_read_are_refused() -> None:
    sound = make_media_row(OMNI, 1, [("audio", 3)])
    with pytest.raises(InvariantError, match=rf"\[MM1\] {sound.id} holds media that this model does not read: audio"):
        make_backend(VL).logprobs([[(sound,)]])
    text_only = make_backend(VL, family=None)
    with pytest.raises(InvariantError, match=rf"\[MM1\] {sound.id} holds media that this model does not read: audio"):
        text_only.logprobs([[(sound,)]])


@pytest.mark.parametrize("kind", KINDS)
def test_rule_mm5_an_empty_micro_batch_and_rows_of_nothing_have_logprobs(kind: str) -> None:
    backend = make_backend(kind)
    nothing = TrainRow(
        make_media_row(kind, 9).id, *(frozen(np.zeros(0, dtype)) for dtype in (np.int32, bool, np.float32))
    )
    image = make_media_row(kind, 0, [("image", 1)])
    (found,) = backend.logprobs([[(), (nothing,), (nothing, image)]])
    assert [[len(values) for values in batch] for batch in found] == [[], [0], [0, len(image)]]
    assert np.array_equal(found[2][1], answers(backend, [(image,)])[image.id])
