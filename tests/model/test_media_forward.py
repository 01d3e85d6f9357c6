"""Media in the forward: what `media_inputs` and `row_positions` give equals the model's own forward with raw features (MM1, MM5)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.error import InvariantError
from relax.core.media import Medium, Modality
from relax.model.media import media_inputs, row_positions
from tests.model.media_setting import AUDIO, IMAGE, MODELS, OMNI, PAD, StandIn, build, dice, model_of, raw_inputs

SEEN: tuple[Modality, ...] = ("image", "video")
ALL: tuple[Modality, ...] = ("image", "video", "audio")


def read(name: str) -> tuple[Modality, ...]:
    return ALL if name in OMNI else SEEN


def forward(model: Any, family: StandIn, rows: Sequence[tuple[Any, Sequence[Medium]]]) -> torch.Tensor:
    """Logits [B, T, V] by the functions under test, media of all rows encoded in one call."""
    raw = raw_inputs(family.name, rows)
    encodings = iter(family.encode(model, [one for _, media in rows for one in media]))
    taken = [[next(encodings) for _ in media] for _, media in rows]
    inputs = media_inputs(model, family, raw["input_ids"], taken)
    positions = row_positions(family, rows)
    logits: torch.Tensor = model(
        **inputs, attention_mask=raw["attention_mask"], position_ids=positions, use_cache=False
    ).logits
    return logits


def assert_same(name: str, rows: Sequence[tuple[Any, Sequence[Medium]]]) -> None:
    model = model_of(name)
    with torch.no_grad():
        expected = model(**raw_inputs(name, rows), use_cache=False).logits
        given = forward(model, StandIn(name), rows)
    for row, (token_ids, _) in enumerate(rows):
        valid = slice(0, len(token_ids))
        torch.testing.assert_close(given[row, valid], expected[row, valid], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_each_modality_alone_gives_the_logits_of_the_raw_forward(name: str) -> None:
    for number, modality in enumerate(read(name)):
        rows = [dice(name, number).row(modality), dice(name, 10 + number).row(*[modality] * 3)]
        assert_same(name, rows)


@pytest.mark.parametrize("name", MODELS)
def test_rule_mm5_text_and_every_mixture_share_a_batch(name: str) -> None:
    random = dice(name, 5)
    mixed = read(name)
    rows = [random.row(), random.row(*mixed), random.row("image"), random.row(*reversed(mixed), "image"), random.row()]
    rows += [random.row(modality) for modality in mixed]
    assert_same(name, rows)


@pytest.mark.parametrize("name", MODELS)
def test_case_f5_rows_of_text_alone_need_no_media(name: str) -> None:
    random, family = dice(name, 6), StandIn(name)
    rows = [random.row() for _ in range(3)]
    assert_same(name, rows)
    assert set(media_inputs(model_of(name), family, raw_inputs(name, rows)["input_ids"], [()] * 3)) == {"input_ids"}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_the_towers_and_no_other_row(name: str) -> None:
    model, family, random = build(name), StandIn(name), dice(name, 7)
    rows = [random.row(*read(name)), random.row()]
    logits = forward(model, family, rows)
    logits[1, : len(rows[1][0])].square().sum().backward()
    towers = [part for part in ("visual", "audio_tower") if hasattr(model.model, part)]
    assert len(towers) == len(read(name)) - 1
    for part in towers:
        silent = [parameter.grad for parameter in getattr(model.model, part).parameters()]
        assert all(grad is None or not grad.abs().max() for grad in silent), part
    model.zero_grad()
    forward(model, family, rows)[0, : len(rows[0][0])].square().sum().backward()
    expected, reference = build(name), raw_inputs(name, rows)
    expected(**reference, use_cache=False).logits[0, : len(rows[0][0])].square().sum().backward()
    for (part, own), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        if other.grad is not None:
            assert own.grad is not None, part
            scale = float(other.grad.abs().max()) or 1.0
            assert float((own.grad - other.grad).abs().max()) <= 1e-5 * scale, part


@pytest.mark.parametrize("name", OMNI)
def test_the_policy_can_move_a_row_of_the_embeddings_without_moving_media(name: str) -> None:
    """Ids decide where media go: transformers alone compares embeddings, and two ids can have equal ones."""
    model = build(name)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[10] = weight[IMAGE]
    random = dice(name, 8)
    token_ids, media = random.row("image", "audio")
    token_ids = np.concatenate([[10, 10], token_ids]).astype(np.int32)
    with torch.no_grad():
        given = forward(model, StandIn(name), [(token_ids, media)])
        expected = model(**raw_inputs(name, [(token_ids, media)]), use_cache=False).logits
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


def test_rule_mm1_rows_whose_placeholders_and_features_differ_are_refused() -> None:
    family, random, model = StandIn("qwen3_omni"), dice("qwen3_omni", 9), model_of("qwen3_omni")
    first, second = random.row("image"), random.row("audio")
    ids = raw_inputs(family.name, [first, second])["input_ids"]
    image, sound = family.encode(model, [*first[1], *second[1]])
    media_inputs(model, family, ids, [[image], [sound]])
    count = first[1][0].num_tokens
    with pytest.raises(InvariantError, match=rf"\[MM1\] row 0 has {count} placeholders for image and 0 features"):
        media_inputs(model, family, ids, [[], [sound]])
    with pytest.raises(InvariantError, match="row 0 has"):
        media_inputs(model, family, ids, [[sound], [image]])
    with pytest.raises(InvariantError, match=f"row 1 has 0 placeholders for image and {count} features"):
        media_inputs(model, family, ids, [[image], [sound, image]])
    with pytest.raises(InvariantError, match="2 rows of tokens came with the media of 1"):
        media_inputs(model, family, ids, [[image]])
    more = ids.clone()
    more[1, 0] = AUDIO
    with pytest.raises(InvariantError, match="row 1 has"):
        media_inputs(model, family, more, [[image], [sound]])


def test_a_model_without_a_family_takes_text_and_refuses_media() -> None:
    ids = torch.tensor([[4, 5, IMAGE]])
    assert media_inputs(None, None, ids, [()]) == {"input_ids": ids}
    image = StandIn("qwen3_vl").encode(model_of("qwen3_vl"), [dice("qwen3_vl").medium("image")])
    with pytest.raises(InvariantError, match="no placeholder for image"):
        media_inputs(None, None, ids, [image])
    sound = StandIn("qwen3_omni").encode(model_of("qwen3_omni"), [dice("qwen3_omni").medium("audio")])
    with pytest.raises(InvariantError, match="no placeholder for audio"):
        media_inputs(None, StandIn("qwen3_vl"), ids, [sound])


def test_positions_of_rows_are_padded_on_the_right() -> None:
    name = "qwen3_omni"
    random, family = dice(name, 11), StandIn(name)
    rows = [random.row("image", "audio"), random.row(), random.row("video")]
    positions = row_positions(family, rows, 200)
    assert positions.shape == (3, 3, 200)
    assert positions.dtype == torch.float32
    for row, (token_ids, media) in enumerate(rows):
        np.testing.assert_array_equal(positions[:, row, : len(token_ids)].numpy(), family.positions(token_ids, media))
        assert not positions[:, row, len(token_ids) :].any()
    np.testing.assert_array_equal(positions[0, 1, : len(rows[1][0])].numpy(), np.arange(len(rows[1][0])))
    text = row_positions(None, [(row[0], ()) for row in rows])
    assert text.shape == (3, max(len(row[0]) for row in rows))
    assert text[2].tolist() == list(range(text.shape[1]))
    assert PAD not in family.placeholders.values()
