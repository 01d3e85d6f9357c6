"""Cases of section G (data) with media: sources of every kind, from their files to features, with the recipes' omni model."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from relax.core.message import Prompt
from relax.data.dataset import Refusal
from relax.data.stream import PromptStream, build_reader, read_prompts
from tests.cases.media_chain import KEYS, Chain, bits, features
from tests.data import media_sample as sample
from tests.data.toy import source_config, write_lines, write_parquet


def picture(number: int) -> bytes:
    """Of 8 x 8 pixels times number + 1, so that its tokens tell which it is."""
    return sample.encode_image(sample.picture(8 * (number + 1), 8, seed=number))


def read(chain: Chain, config: Any) -> list[Prompt]:
    return read_prompts(config, renderer=chain.renderer, rules=chain.rules, quarantine=chain.quarantine)


async def tokens(chain: Chain, prompt: Prompt) -> int:
    """How many tokens the pictures of a prompt take, once their features are made."""
    prepared = await chain.preparer.prepare(prompt)
    encoded = chain.renderer.encode(prepared.messages)
    media = await chain.preparer.load(encoded.parts)
    assert chain.counts(encoded.token_ids) == features(media)
    return features(media)["image"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
async def test_case_g1_rows_of_text_and_of_pictures_keep_their_order_through_both_filters(
    tmp_path: Path, kind: str
) -> None:
    """Reading refuses some, looking at the media refuses others; what is left comes in the order of the data, each with its own."""
    records: list[dict[str, Any]] = []
    for number in range(9):
        record: dict[str, Any] = {"prompt": f"{number}?", "reference": str(number), "images": []}
        if number % 3:
            path = tmp_path / f"{number}.png"
            path.write_bytes(picture(number)[: 30 if number == 5 else None])
            record |= {"prompt": f"{number}? <image>", "images": [path.name] * (2 if number == 7 else 1)}
        records.append(record)
    write = {"jsonl": lambda path: write_lines(path, *records), "parquet": lambda path: write_parquet(path, records)}
    path = write[kind](tmp_path / f"a.{kind}")
    config = source_config(type=kind, path=str(path), media_keys={"image": "images"}, shuffle=False)
    chain = Chain(tmp_path)
    prompts = read(chain, config)
    assert [prompt.key.record for prompt in prompts] == [0, 1, 2, 3, 4, 5, 6, 8]
    found: dict[int, int] = {}
    for prompt in prompts:
        if prompt.key.record == 5:
            with pytest.raises(Refusal):
                await tokens(chain, prompt)
        else:
            assert prompt.messages[0].text.startswith(f"{prompt.key.record}?")
            found[prompt.key.record] = await tokens(chain, prompt)
    assert found == {0: 0, 1: 2, 2: 3, 3: 0, 4: 5, 6: 0, 8: 9}
    assert len(chain.refused()) == 2
    reader = build_reader(config, renderer=chain.renderer, rules=chain.rules, quarantine=chain.quarantine, seed=0)
    stream = PromptStream(reader, seed=0)
    assert [next(stream).key.record for _ in range(9)] == [0, 1, 2, 3, 4, 5, 6, 8, 0]


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
async def test_case_g3_keys_that_columns_add_to_parts_are_no_media(tmp_path: Path, kind: str) -> None:
    """A struct of columns gives every part the keys of all: a text with `image: null` holds none, and options stay where they were."""

    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words, "image": None, "audio": None, "max_pixels": None}

    def shown(number: int, most: int | None) -> dict[str, Any]:
        image = {"bytes": picture(number), "path": None}
        return {"type": "image", "text": None, "image": image, "audio": None, "max_pixels": most}

    sound = {"bytes": sample.encode_sound(sample.tone(4000)), "path": None}
    heard = {"type": "audio", "text": None, "image": None, "audio": sound, "max_pixels": None}
    contents = [
        [text("1?")],
        [shown(3, None), text("2?")],
        [heard, text("3?")],
        [shown(3, 128), shown(1, None), text("4?")],
    ]
    records = [
        {"messages": [{"role": "user", "content": content}], "reference": str(number), "extra_info": None}
        for number, content in enumerate(contents)
    ]
    if kind == "parquet":
        path = write_parquet(tmp_path / "a.parquet", records)
    else:
        import datasets

        datasets.Dataset.from_list(records).save_to_disk(tmp_path / "saved")
        path = tmp_path / "saved"
    chain = Chain(tmp_path)
    prompts = read(chain, source_config(type=kind, path=str(path)))
    assert [prompt.messages[0].text for prompt in prompts] == ["1?", "2?", "3?", "4?"]
    assert [[part.type for part in prompt.messages[0].media] for prompt in prompts] == [
        [],
        ["image"],
        ["audio"],
        ["image"] * 2,
    ]
    assert [dict(part.options) for part in prompts[3].messages[0].media] == [{"max_pixels": 128}, {}]
    assert [prompt.metadata for prompt in prompts] == [{}] * 4
    assert [await tokens(chain, prompt) for prompt in prompts] == [0, 4, 0, 2 + 2]


@pytest.mark.parametrize("given", ["set", "set/*.jsonl", "set/a.jsonl", "**/*.jsonl"])
async def test_case_g5_paths_start_at_the_folder_of_the_source(
    tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is a file, a folder or a pattern, and wherever the run was started from."""
    pictures = tmp_path / "set" / "images"
    pictures.mkdir(parents=True)
    (pictures / "x.png").write_bytes(picture(2))
    inside = "images/x.png" if given.startswith("set") else "set/images/x.png"
    write_lines(tmp_path / "set" / "a.jsonl", {"prompt": "<image>", "images": [inside], "reference": "1"})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    chain = Chain(tmp_path, roots=None)
    assert not chain.section.roots
    [prompt] = read(chain, source_config(path=str(tmp_path / given), media_keys={"image": "images"}))
    assert await tokens(chain, prompt) == 3


async def test_case_g6_a_data_set_smaller_than_a_batch_decodes_each_medium_once(tmp_path: Path) -> None:
    """Passes over three records: other prompts, the same media."""
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    lines = [{"prompt": "<image>", "images": [f"{number}.png"], "reference": "1"} for number in range(3)]
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *lines)), media_keys={"image": "images"})
    chain = Chain(tmp_path)
    reader = build_reader(config, renderer=chain.renderer, rules=chain.rules, quarantine=chain.quarantine, seed=0)
    stream = PromptStream(reader, seed=0)
    batch = [next(stream) for _ in range(8)]
    assert len({prompt.key for prompt in batch}) == 8
    assert [await tokens(chain, prompt) for prompt in batch] == [prompt.key.record + 1 for prompt in batch]
    assert (chain.store.counts["decoded"], chain.store.counts["looked_at"]) == (3, 3)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image", "image": "a.png", "max_pixel": 9}, "unknown media option: .*max_pixel; options of an image are"),
        ({"type": "audio", "audio": "a.wav", "begin": 1}, "unknown media option: .*begin; options of .* are start, end"),
        ({"type": "video", "video": "a.mp4", "fps": "2"}, "mistyped media option: .*fps of the video is '2', expected"),
        ({"type": "picture", "image": "a.png"}, "unsupported part: part type 'picture' is not one of text, .*image"),
        ({"type": "text", "text": "a", "image": "a.png"}, "mistyped field"),
    ],
)  # fmt: skip
def test_case_g8_no_key_of_a_part_is_ignored(tmp_path: Path, part: dict[str, Any], reason: str) -> None:
    chain = Chain(tmp_path)
    assert chain.prompts({"messages": [{"role": "user", "content": [part]}]}) == [None]
    (found,) = chain.refused()
    assert re.match(reason, found), found


def test_case_g8_media_keys_name_modalities_that_there_are() -> None:
    with pytest.raises(ValidationError, match="picture"):
        source_config(path="a.jsonl", media_keys={"picture": "images"})
    with pytest.raises(ValidationError, match="at least 1 character"):
        source_config(path="a.jsonl", media_keys={"image": ""})


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"images": ["a.png"]}, "missing field"),
        ({"prompt": None, "images": ["a.png"]}, "missing field"),
        ({"prompt": "<image>", "images": 7}, "mistyped medium: 'images'[0]: a int is not an image"),
        ({"prompt": "<image>", "images": [{"width": 3}]}, "missing medium: 'images'[0]: the image is a mapping"),
        ({"prompt": "<image>", "images": [None]}, "missing medium: 'images'[0]: there is null"),
        ({"prompt": "<image>", "images": [""]}, "missing medium: 'images'[0]: the image is an empty text"),
        ({"prompt": "<audio>", "audios": [[0.1, 0.2]]}, "mistyped medium: 'audios'[0]: an array is not a sound without"),
        ({"prompt": "", "images": ["a.png"]}, "empty prompt"),
    ],
)  # fmt: skip
def test_case_g9_a_missing_prompt_or_medium_is_told_by_its_place(tmp_path: Path, record: Any, reason: str) -> None:
    chain = Chain(tmp_path)
    assert chain.prompts(record) == [None]
    (found,) = chain.refused()
    assert found.startswith(reason), found


async def test_case_g9_a_prompt_may_be_a_picture_alone_and_a_number_its_label(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    (prompt,) = chain.prompts({"prompt": "<image>", "images": [picture(1)], "answer": 7}, reference_key="answer")
    assert prompt is not None
    assert prompt.reference == "7"
    assert prompt.metadata == {}, "neither the label nor the media are metadata"
    assert await tokens(chain, prompt) == 2
    typed = [{"role": "user", "content": [{"type": "image", "image": picture(2)}]}]
    (prompt,) = chain.prompts({"prompt": typed}, media_keys={}, name="typed")
    assert prompt is not None
    assert await tokens(chain, prompt) == 3


async def test_columns_of_every_modality_are_the_features_of_the_same_records_as_lines(tmp_path: Path) -> None:
    """Parquet with structs of bytes, and lines that name files."""
    files = {
        "image": picture(3),
        "audio": sample.encode_sound(sample.tone(4000)),
        "video": sample.encode_video(sample.clip(4, 16, 16), 2),
    }
    for modality, content in files.items():
        (tmp_path / modality).write_bytes(content)
    text = "<image>, <audio> and <video>"
    names = {KEYS[modality]: [modality] for modality in files}
    structs = {KEYS[modality]: [{"bytes": content, "path": None}] for modality, content in files.items()}
    lines = write_lines(tmp_path / "a.jsonl", json.dumps({"prompt": text, "reference": "1", **names}))
    columns = write_parquet(tmp_path / "a.parquet", [{"prompt": text, "reference": "1", **structs}])
    rows = []
    for kind, path in (("jsonl", lines), ("parquet", columns)):
        chain = Chain(tmp_path)
        [prompt] = read(chain, source_config(type=kind, path=str(path), media_keys=KEYS))
        prepared = await chain.preparer.prepare(prompt)
        encoded = chain.renderer.encode(prepared.messages)
        rows.append((encoded.token_ids, bits(await chain.preparer.load(encoded.parts))))
    np.testing.assert_array_equal(rows[0][0], rows[1][0])
    assert rows[0][1] == rows[1][1]
