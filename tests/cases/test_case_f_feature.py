"""Cases F11, F13 and F15: what a medium was made into arrives whole, the same for engine and trainer, whatever shares its batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.bus.row import Fetched
from relax.core.error import InvariantError
from relax.core.id import group_id, sample_id, trajectory_id
from relax.core.media import Medium
from relax.core.message import TextPart, prompt_from_json, prompt_to_json
from relax.core.trajectory import Segment, Trajectory
from relax.model.media import media_inputs, row_positions
from relax.services.media_row import FetchedMedia, group_media_put, turn_media_cells
from tests.cases.media_chain import OMNI, SIGHT, Chain, bits, features, model_of
from tests.data import media_sample as sample

PICTURE = sample.picture(40, 24)


def wave_file(samples: int = 8000) -> bytes:
    return sample.encode_sound(sample.tone(samples))


def film(fps: Any, frames: int = 12, samples: int = 0) -> bytes:
    sound = sample.tone(samples) if samples else None
    return sample.encode_video(sample.clip(frames, 32, 24), fps, sound=sound)


def array_film(frames: int = 4, fps: float = 2.0) -> dict[str, Any]:
    return {"array": sample.clip(frames, 32, 24), "fps": fps}


# --- F11 -------------------------------------------------------------------------------------------------------------


def carried(media: tuple[Medium, ...], turns: tuple[Medium, ...] = ()) -> tuple[Medium, ...]:
    """What the trainer finds on the bus of a trajectory whose prompt holds `media`, and whose later turns hold `turns`."""
    group, one = group_id(0), np.zeros(1, np.int32)
    trajectory = trajectory_id(group, 0)
    segment = Segment(one, np.ones(1, bool), np.zeros(1, np.float32), one, np.zeros(1, bool), (*media, *turns))
    cells = turn_media_cells(Trajectory((segment,), (), (), "done"), media)
    sample_name = sample_id(trajectory, 0)
    put = group_media_put(group, media)
    return FetchedMedia(Fetched((sample_name,), {group: put.cells, trajectory: cells})).of(sample_name)


@pytest.mark.parametrize(("fps", "options"), [(2, {}), (7.5, {}), (30, {}), (8, {"fps": 4.0}), (8, {"max_frames": 4})])
@pytest.mark.parametrize("hears", [False, True])
async def test_case_f11_engine_and_trainer_see_one_frame_rate_and_one_sound(
    tmp_path: Path, fps: float, options: dict[str, Any], hears: bool
) -> None:
    """Rate, time of a patch, and the sound of a video are decided once; prompts and media carry them to both sides."""
    frames = 12
    (tmp_path / "a.mkv").write_bytes(film(fps, frames, samples=16_000))
    record = {"prompt": "<video>?", "videos": [{"path": "a.mkv", **options}]}
    chain = Chain(tmp_path, video={"audio": hears}, cache=tmp_path / "cache")
    prompt, encoded, media = await chain.row(record)
    part = encoded.parts[0]
    assert part.facts["fps"] == pytest.approx(fps)
    assert part.options.get("audio", False) is hears
    target = chain.family.target(part)
    assert target["fps"] == pytest.approx(len(target["frames"]) / (frames / fps))
    assert [medium.modality for medium in media] == (["video", "audio"] if hears else ["video"])
    assert media[0].arrays["second_per_grid"].tolist() == [2 / target["fps"]]
    assert chain.counts(encoded.token_ids) == features(media)
    # Another process, which reads the prompt off the bus, and finds its features on disk.
    other = Chain(tmp_path, video={"audio": hears}, cache=tmp_path / "cache", pool=chain.pool)
    read = prompt_from_json(prompt_to_json(prompt))
    assert read == prompt
    again = other.renderer.encode((await other.preparer.prepare(read)).messages)
    assert again.token_ids.tolist() == encoded.token_ids.tolist()
    loaded = await other.preparer.load(again.parts)
    assert other.store.counts.get("decoded", 0) == 0
    for theirs in (carried(media), loaded):
        assert bits(theirs) == bits(media)
        np.testing.assert_array_equal(
            row_positions(chain.family, [(encoded.token_ids, theirs)]),
            row_positions(chain.family, [(encoded.token_ids, media)]),
        )


@pytest.mark.parametrize("seconds", [30.0, 29.99, 0.99995, 0.5])
async def test_case_f11_a_sound_is_as_long_for_its_placeholders_as_for_its_encoder(
    tmp_path: Path, seconds: float
) -> None:
    """Frames of 10 ms, 3000 of half a minute and not 3001; whole ones only."""
    samples = round(seconds * 16_000)
    chain = Chain(tmp_path)
    _, encoded, (medium,) = await chain.row({"prompt": "<audio>?", "audios": [wave_file(samples)]})
    assert medium.arrays["input_features"].shape == (128, samples // 160)
    (encoding,) = chain.family.encode(model_of(), [medium])
    assert chain.counts(encoded.token_ids)["audio"] == medium.num_tokens == len(encoding.embeds)


# --- F13, F15 --------------------------------------------------------------------------------------------------------


async def test_case_f13_every_array_of_a_medium_is_needed_and_arrives(tmp_path: Path) -> None:
    """One that were lost between the processor and the forward would be missed, not replaced by a default."""
    chain, model = Chain(tmp_path), model_of()
    record = {
        "prompt": "<image><audio><video>a<video>?", "images": [PICTURE], "audios": [wave_file()],
        "videos": [{"bytes": film(4, samples=16_000), "audio": True, "fps": 3.0}, {"bytes": film(8), "fps": 5.0}],
    }  # fmt: skip
    _, encoded, media = await chain.row(record)
    assert [sorted(medium.arrays) for medium in media] == [
        ["image_grid_thw", "pixel_values"],
        ["input_features"],
        ["pixel_values_videos", "second_per_grid", "sound_tokens", "video_grid_thw"],
        ["input_features"],
        ["pixel_values_videos", "second_per_grid", "video_grid_thw"],
    ]
    assert 1.0 not in [float(one.arrays["second_per_grid"][0]) for one in media if one.modality == "video"]
    assert bits(carried(media)) == bits(media)

    def forward(read: tuple[Medium, ...]) -> torch.Tensor:
        ids = torch.tensor(encoded.token_ids[None]).long()
        with torch.no_grad():
            inputs = media_inputs(model, chain.family, ids, [chain.family.encode(model, read)])
            positions = row_positions(chain.family, [(encoded.token_ids, read)])
            return model(**inputs, position_ids=positions, use_cache=False).logits  # type: ignore[no-any-return]

    whole = forward(media)
    assert torch.equal(forward(carried(media)), whole)
    for number, medium in enumerate(media):
        for name in medium.arrays:
            arrays = {other: array for other, array in medium.arrays.items() if other != name}
            lost = (*media[:number], replace(medium, arrays=arrays), *media[number + 1 :])
            with pytest.raises((KeyError, InvariantError)):
                forward(lost)


async def test_case_f13_what_is_no_tensor_survives_too(tmp_path: Path) -> None:
    """The type of words that numpy has no type for, the key, the counts."""
    chain = Chain(tmp_path, dtype="bfloat16")
    _, _, media = await chain.row({"prompt": "<image><audio>", "images": [PICTURE], "audios": [wave_file()]})
    found = carried(media)
    assert [one.dtypes for one in found] == [{"pixel_values": "bfloat16"}, {"input_features": "bfloat16"}]
    for ours, theirs in zip(media, found, strict=True):
        assert (theirs.key, theirs.modality, theirs.num_tokens, theirs.encoder_tokens) == (
            ours.key, ours.modality, ours.num_tokens, ours.encoder_tokens,
        )  # fmt: skip
        assert theirs.arrays.keys() == ours.arrays.keys()


@pytest.mark.parametrize("model", [OMNI, SIGHT])
async def test_case_f15_text_alone_in_a_run_that_reads_media(tmp_path: Path, model: str) -> None:
    chain = Chain(tmp_path, model=model)
    prompt, encoded, media = await chain.row({"prompt": "1+1=", "images": None, "videos": []})
    assert (encoded.parts, media, carried(media)) == ((), (), ())
    assert encoded.token_ids.dtype == np.int32
    assert encoded.token_ids.ndim == 1, "one row of ids, never a list of lists"
    assert prompt.messages[0].parts == (TextPart("1+1="),)
    ids = torch.tensor(encoded.token_ids[None]).long()
    text = model_of(model)
    inputs = media_inputs(text, chain.family, ids, [chain.family.encode(text, media)])
    assert set(inputs) == {"input_ids"}
    positions = row_positions(chain.family, [(encoded.token_ids, media)])
    with torch.no_grad():
        found = text(**inputs, position_ids=positions, use_cache=False).logits
        plain = text(input_ids=ids, use_cache=False).logits
    assert torch.equal(found, plain)


async def test_case_f15_rows_of_one_batch_do_not_depend_on_what_lies_beside_them(tmp_path: Path) -> None:
    chain, model = Chain(tmp_path), model_of()
    records = [
        {"prompt": "1+1="},
        {"prompt": "<image>?", "images": [PICTURE]},
        {"prompt": "<audio>?", "audios": [wave_file()]},
        {"prompt": "<video>?", "videos": [array_film()]},
    ]
    rows = [(await chain.row(record, name=f"s{n}"))[1:] for n, record in enumerate(records)]
    width = max(len(encoded.token_ids) for encoded, _ in rows)
    ids = torch.full((len(rows), width), chain.vocabulary.pad_id)
    seen = torch.zeros(len(rows), width, dtype=torch.long)
    for number, (encoded, _) in enumerate(rows):
        ids[number, : len(encoded.token_ids)] = torch.tensor(encoded.token_ids)
        seen[number, : len(encoded.token_ids)] = 1
    with torch.no_grad():
        encodings = [chain.family.encode(model, media) for _, media in rows]
        inputs = media_inputs(model, chain.family, ids, encodings)
        positions = row_positions(chain.family, [(encoded.token_ids, media) for encoded, media in rows])
        together = model(**inputs, position_ids=positions, attention_mask=seen, use_cache=False).logits
        for number, (encoded, media) in enumerate(rows):
            one = torch.tensor(encoded.token_ids[None]).long()
            inputs = media_inputs(model, chain.family, one, [encodings[number]])
            places = row_positions(chain.family, [(encoded.token_ids, media)])
            alone = model(**inputs, position_ids=places, use_cache=False).logits[0]
            torch.testing.assert_close(together[number, : len(alone)], alone, rtol=0, atol=2e-5)
