"""Cases of section F (media), each through the whole chain from a record to tokens and features, with the recipes' omni model."""

import base64
import copy
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from relax.bus.row import Fetched
from relax.core.completion import Completion, Sampling
from relax.core.error import EngineError, InvariantError
from relax.core.id import group_id, sample_id, trajectory_id
from relax.core.media import Medium
from relax.core.message import TextPart, prompt_from_json, prompt_to_json
from relax.core.trajectory import Segment, Trajectory
from relax.data.dataset import Refusal
from relax.data.media.recent import Recent
from relax.model.media import media_inputs, row_positions
from relax.services.media_row import FetchedMedia, group_media_put, turn_media_cells
from relax.tasks.config import SingleTurnConfig
from relax.tasks.environments.single_turn import SingleTurn
from relax.tasks.episode import run_episode
from tests.cases.media_chain import OMNI, SIGHT, Chain, bits, features, model_of
from tests.data import media_sample as sample
from tests.data.toy import write_parquet
from tests.tasks import toy

IMAGE = "<|image_pad|>"
PICTURE = sample.picture(40, 24)
"""Fifteen tokens: cells of 8 x 8 pixels."""
EXPANDED = f"<|vision_start|>{IMAGE * 15}<|vision_end|>"


def wave_file(samples: int = 8000) -> bytes:
    return sample.encode_sound(sample.tone(samples))


def film(fps: Any, frames: int = 12, samples: int = 0) -> bytes:
    sound = sample.tone(samples) if samples else None
    return sample.encode_video(sample.clip(frames, 32, 24), fps, sound=sound)


def array_film(frames: int = 4, fps: float = 2.0) -> dict[str, Any]:
    return {"array": sample.clip(frames, 32, 24), "fps": fps}


# --- F1 --------------------------------------------------------------------------------------------------------------


async def test_case_f1_a_record_whose_text_is_already_expanded_is_refused_or_read_as_text(tmp_path: Path) -> None:
    """Some data sets hold the placeholders of one model's processor beside the raw picture."""
    chain = Chain(tmp_path)
    assert chain.prompts({"prompt": f"{EXPANDED}What?", "images": [PICTURE]}) == [None]
    assert chain.refused() == ["media and placeholders differ: the messages have 0 <image>, 'images' holds 1"]
    content = [{"type": "image", "image": PICTURE}, {"type": "text", "text": f"{EXPANDED}What?"}]
    _, encoded, media = await chain.row({"prompt": [{"role": "user", "content": content}]})
    assert chain.counts(encoded.token_ids) == features(media) == {"image": 15, "audio": 0, "video": 0}
    assert chain.tokenizer.decode(encoded.token_ids).count(IMAGE) == 30, "what the text spells is still said, as text"
    assert chain.renderer.counts["guarded"] > 0, "and it is counted"


async def test_case_f1_tokens_that_were_expanded_are_not_expanded_again(tmp_path: Path) -> None:
    """The tokens of a prompt go to the engine with its features; only `encode` ever expands, and `extend` adds nothing to a medium."""
    chain = Chain(tmp_path)
    prompt, encoded, media = await chain.row({"prompt": "<image>What?", "images": [PICTURE]})
    again = chain.renderer.encode(prompt.messages)
    assert again.token_ids.tolist() == encoded.token_ids.tolist()
    assert chain.counts(again.token_ids)["image"] == 15
    shown = chain.tokenizer.decode(encoded.token_ids)
    twice = np.array(chain.ids(shown.replace(EXPANDED, EXPANDED * 2)), np.int32)
    for check in (
        lambda: chain.family.positions(twice, media),
        lambda: media_inputs(
            model_of(), chain.family, torch.tensor(twice[None]), [chain.family.encode(model_of(), media)]
        ),
    ):
        with pytest.raises(InvariantError, match=r"\[MM1\].* 30 placeholders"):
            check()


# --- F3 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["<image>", "<video>", "<audio>", "<|image_pad|>", "<|vision_start|>"])
async def test_case_f3_prose_is_not_rewritten_beside_rows_with_media(tmp_path: Path, word: str) -> None:
    """Rows of text and rows with media of one model, each from its own source: one has keys for media, the other none."""
    chain = Chain(tmp_path)
    prose = f"In a page {word} is no tag: {word}\n"
    (text,) = chain.prompts({"prompt": prose}, media_keys={}, name="text")
    assert text is not None
    assert text.messages[0].parts == (TextPart(prose),)
    assert await chain.preparer.prepare(text) is text
    encoded = chain.renderer.encode(text.messages)
    assert set(chain.counts(encoded.token_ids).values()) == {0}
    assert encoded.parts == ()
    assert prose in chain.tokenizer.decode(encoded.token_ids)
    # What another modality's word means beside a picture: text, in a source that has no key for it.
    if word == "<image>":
        return
    _, mixed, media = await chain.row(
        {"prompt": f"{prose}<image>", "images": [PICTURE]}, media_keys={"image": "images"}, name="pictures"
    )
    assert chain.counts(mixed.token_ids) == features(media) == {"image": 15, "audio": 0, "video": 0}
    assert prose in chain.tokenizer.decode(mixed.token_ids)


# --- F4 --------------------------------------------------------------------------------------------------------------


def sampled(ids: list[int]) -> Completion:
    zeros = np.zeros(len(ids))
    return Completion(
        np.array(ids, np.int32), zeros.astype(np.float32), zeros.astype(np.int32), zeros.astype(bool), "stop"
    )


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "an id without a token"])
async def test_case_f4_a_completion_that_holds_a_placeholder_is_refused(tmp_path: Path, token: str) -> None:
    """An outside engine may sample one; trained or shown again, it would stand for features that nobody has."""
    chain = Chain(tmp_path)
    prompt, _, _ = await chain.row({"prompt": "<image>What?", "images": [PICTURE]})
    bad = len(chain.tokenizer) if token.startswith("an id") else chain.ids(token)[0]
    assert not chain.vocabulary.allowed[bad]
    stop = chain.renderer.stops[0]

    async def play(ids: list[int]) -> Trajectory:
        return await run_episode(
            prompt,
            SingleTurn(SingleTurnConfig()),
            chain.renderer,
            toy.Scripted(sampled(ids)),
            Sampling(max_tokens=8),
            toy.sessions(),
            max_context_tokens=500,
            allowed=chain.vocabulary.allowed,
            media=chain.preparer,
        )

    (segment,) = (await play([*chain.ids("a cat"), stop])).segments
    assert len(segment.media) == 1
    for ids in ([bad, stop], [*chain.ids("a"), bad, stop]):
        with pytest.raises(EngineError, match=f"token {bad} is a media placeholder or unknown; no policy may sample"):
            await play(ids)


# --- F7 --------------------------------------------------------------------------------------------------------------


async def test_case_f7_what_measures_a_record_takes_nothing_from_it(tmp_path: Path) -> None:
    """The length of a prompt is that with its media, and measuring it leaves the record, prompt and media as they were."""
    content = [{"type": "image", "image": PICTURE, "max_pixels": 2000}, {"type": "text", "text": "and <audio>?"}]
    record = {
        "prompt": [{"role": "user", "content": content}],
        "audios": [{"array": sample.tone(8000), "sampling_rate": 16_000}],
        "level": 3,
    }
    before = copy.deepcopy(record)
    wide = Chain(tmp_path)
    prompt, encoded, media = await wide.row(record)
    length = len(encoded.token_ids)
    assert features(media) == {"image": 15, "audio": 7, "video": 0}
    assert length > 22
    for _ in range(2):  # each pass over the data reads the same record again
        chain = Chain(tmp_path, max_prompt_tokens=length)
        again, tokens, read = await chain.row(record)
        assert again == prompt
        assert tokens.token_ids.tolist() == encoded.token_ids.tolist()
        assert bits(read) == bits(media)
    # Nor is anything taken by whoever comes for the media later, when the record has to be read again.
    chain = Chain(tmp_path)
    (waiting,) = chain.prompts(record)
    chain.origins._recent = Recent(1)
    assert waiting is not None
    assert await chain.preparer.prepare(waiting) == prompt
    np.testing.assert_equal(record, before)
    narrow = Chain(tmp_path, max_prompt_tokens=length - 1)
    (admitted,) = narrow.prompts(record)
    assert admitted is not None, "before its media are looked at nobody knows how long it is"
    with pytest.raises(Refusal, match=f"over-long prompt: {length} tokens"):
        await narrow.preparer.prepare(admitted)
    np.testing.assert_equal(record, before)
    assert list(record) == list(before)


# --- F8 --------------------------------------------------------------------------------------------------------------


async def test_case_f8_one_picture_in_every_form_is_the_same_tokens_and_features(tmp_path: Path) -> None:
    content = sample.encode_image(PICTURE)
    (tmp_path / "a.png").write_bytes(content)
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    opened = Image.open(io.BytesIO(content))
    forms: list[Any] = [
        "a.png", str(tmp_path / "a.png"), (tmp_path / "a.png").as_uri(), content, bytearray(content), uri,
        {"bytes": content, "path": None}, {"bytes": None, "path": "a.png"}, {"bytes": content, "path": "gone.png"},
        {"url": uri}, opened, PICTURE, PICTURE.tolist(),
    ]  # fmt: skip
    chain = Chain(tmp_path)
    rows = [await chain.row({"prompt": "<image>What?", "images": [form]}, name=f"s{n}") for n, form in enumerate(forms)]
    rows.append(await chain.row({"prompt": "<image>What?", "images": content}, name="alone"))
    typed = [{"role": "user", "content": [{"type": "image", "image": content}, {"type": "text", "text": "What?"}]}]
    rows.append(await chain.row({"prompt": typed}, name="typed"))
    for _, encoded, (medium,) in rows:
        assert encoded.token_ids.tolist() == rows[0][1].token_ids.tolist()
        assert medium.arrays["pixel_values"].tobytes() == rows[0][2][0].arrays["pixel_values"].tobytes()
        assert medium.arrays["image_grid_thw"].tolist() == [1, 6, 10]


async def test_case_f8_parquet_gives_a_path_of_null_and_rows_without_the_column(tmp_path: Path) -> None:
    content = sample.encode_image(PICTURE)
    records = [
        {"prompt": "<image>?", "images": [{"bytes": content, "path": None}]},
        {"prompt": "?", "images": []},
        {"prompt": "?"},
        {"prompt": "<image>?", "images": [{"bytes": None, "path": None}]},
        {"prompt": "<image>?"},
    ]
    import pyarrow.parquet as pq

    table = pq.read_table(write_parquet(tmp_path / "a.parquet", records)).to_pylist()
    assert table[0]["images"][0]["path"] is None
    assert table[2]["images"] is None
    chain = Chain(tmp_path)
    prompts = chain.prompts(*table)
    assert [prompt is None for prompt in prompts] == [False, False, False, True, True]
    assert chain.refused() == [
        "missing medium: 'images'[0]: the image is a mapping without any of bytes, array, base64, data, url, path",
        "media and placeholders differ: the messages have 1 <image>, 'images' is absent or empty",
    ]
    found = []
    for prompt in prompts:
        if prompt is not None:
            prepared = await chain.preparer.prepare(prompt)
            found.append(features(await chain.preparer.load(prepared.messages[0].media))["image"])
    assert found == [15, 0, 0]


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


# --- F12 ---------------------------------------------------------------------------------------------------------------


async def test_case_f12_contents_of_every_form_stand_beside_media(tmp_path: Path) -> None:
    """Text, lists, nothing at all; a null where columns have no tool calls; calls themselves are refused, never dropped."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "Look."}], "tool_calls": None},
        {"role": "user", "content": [{"type": "image", "image": PICTURE}, {"type": "text", "text": ""}]},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "tool", "content": [{"type": "text", "text": ""}, {"type": "audio", "audio": wave_file()}]},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": ""},
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
    ]
    chain = Chain(tmp_path)
    _, encoded, media = await chain.row({"messages": messages})
    sound = f"<|audio_start|>{'<|audio_pad|>' * 7}<|audio_end|>"
    said = ["system\nLook.", f"user\n{EXPANDED}", "assistant\n", f"tool\n{sound}", "assistant\n", "tool\n", "user\nab"]
    shown = "".join(f"<|im_start|>{one}<|im_end|>\n" for one in said) + "<|im_start|>assistant\n"
    assert chain.tokenizer.decode(encoded.token_ids) == shown
    assert chain.counts(encoded.token_ids) == features(media)
    messages[2]["tool_calls"] = [{"name": "crop", "arguments": "{}"}]
    assert chain.prompts({"messages": messages}, name="calls") == [None]
    assert chain.refused()[-1].startswith("unknown message key: tool_calls")


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
