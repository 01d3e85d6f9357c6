"""Cases of section F (media), each through the whole chain from a record to tokens and features, with the recipes' omni model."""

import base64
import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from relax.core.completion import Completion, Sampling
from relax.core.error import EngineError, InvariantError
from relax.core.message import TextPart
from relax.core.trajectory import Trajectory
from relax.data.dataset import Refusal
from relax.data.media.recent import Recent
from relax.model.media import media_inputs
from relax.tasks.config import SingleTurnConfig
from relax.tasks.environments.single_turn import SingleTurn
from relax.tasks.episode import run_episode
from tests.cases.media_chain import Chain, bits, features, model_of
from tests.data import media_sample as sample
from tests.data.toy import write_parquet
from tests.tasks import toy

IMAGE = "<|image_pad|>"
PICTURE = sample.picture(40, 24)
"""Fifteen tokens: cells of 8 x 8 pixels."""
EXPANDED = f"<|vision_start|>{IMAGE * 15}<|vision_end|>"


def wave_file(samples: int = 8000) -> bytes:
    return sample.encode_sound(sample.tone(samples))


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
