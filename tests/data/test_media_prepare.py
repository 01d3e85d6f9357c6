"""Prompts with media, from the record to features that fit their placeholders, and into the quarantine when they do not."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from relax.config.media import MediaSection
from relax.core.error import DataError
from relax.core.message import (
    MediaPart,
    Message,
    Prompt,
    PromptKey,
    TextPart,
    prompt_from_json,
    prompt_to_json,
    text_message,
)
from relax.core.protocol import Encoded
from relax.data.dataset import Refusal
from relax.data.media.access import MediaAccess
from relax.data.media.origin import Origins
from relax.data.media.prepare import PromptPreparer, check_placeholders
from relax.data.media.store import MediaStore
from relax.data.quarantine import Quarantine
from relax.data.stream import PromptRules, build_reader, read_prompts
from tests.data.media_fake import CellFamily, ThreadPool, picture, png, wav, write
from tests.data.toy import source_config, write_lines, write_parquet


class SlotRenderer:
    """Every character is a token, every medium its slot, as a renderer with a family makes them."""

    def __init__(self, family: CellFamily) -> None:
        self.family = family
        self.lost = ""
        self.drops = 0
        self.adds = 0
        self.error: Exception | None = None

    def encode(self, messages, generate=True) -> Encoded:
        if self.error is not None:
            raise self.error
        ids, parts = [], []
        for message in messages:
            for part in message.parts:
                if isinstance(part, TextPart):
                    ids += [ord(character) for character in part.text]
                else:
                    ids += [self.family.placeholders[part.type]] * (self.family.count(part) + self.adds)
                    parts.append(part)
        return Encoded(np.array(ids, dtype=np.int32), tuple(parts[self.drops :]))

    def lost_characters(self, messages) -> str:
        return "".join(c for message in messages for c in message.text if c in self.lost)


class Kit:
    """A run's data room: sources, store and preparer around one folder."""

    def __init__(self, folder: Path, max_prompt_tokens: int = 200, **section) -> None:
        self.section = MediaSection.model_validate(section)
        self.origins = Origins(has_roots=bool(self.section.roots))
        self.rules = PromptRules(max_prompt_tokens, media=self.origins)
        self.quarantine = Quarantine(folder / "quarantine.jsonl")
        self.pool = ThreadPool()
        family = CellFamily()
        self.store = MediaStore(self.section, family, self.pool, MediaAccess(self.section, self.origins))
        self.renderer = SlotRenderer(family)
        self.preparer = PromptPreparer(self.store, self.renderer, self.rules, self.quarantine)

    def prompts(self, config, **options) -> list[Prompt]:
        return read_prompts(config, renderer=self.renderer, rules=self.rules, quarantine=self.quarantine, **options)

    def refused(self) -> list[dict]:
        return [json.loads(line) for line in (self.quarantine._path).read_text().splitlines()]


IMAGES = {"media_keys": {"image": "images"}, "reference_key": None}


async def refusal_of(awaitable) -> Refusal:
    with pytest.raises(Refusal) as raised:
        await awaitable
    return raised.value


async def test_from_a_file_of_records_to_features(tmp_path):
    kit = Kit(tmp_path)
    array = picture(8, 12)
    write(tmp_path, "data/images/a.png", png(array))
    record = {"prompt": "before <image> after", "images": ["images/a.png"], "level": 3}
    path = write_lines(write(tmp_path, "data/a.jsonl", b""), record)
    (prompt,) = kit.prompts(source_config(path=str(path), **IMAGES))
    assert prompt.metadata == {"level": 3}
    assert kit.pool.calls == {}
    prepared = await kit.preparer.prepare(prompt)
    (message,) = prepared.messages
    before, part, after = message.parts
    assert (before, after) == (TextPart("before "), TextPart(" after"))
    assert (part.type, part.facts, len(part.digest)) == ("image", {"width": 12, "height": 8}, 32)
    assert prompt_from_json(json.loads(json.dumps(prompt_to_json(prepared)))) == prepared
    (medium,) = await kit.preparer.load(kit.renderer.encode(prepared.messages).parts)
    assert np.array_equal(medium.arrays["values"], (array.astype(np.float32) * np.float32(1 / 255)).reshape(8, -1))
    assert kit.store.counts["decoded"] == 1
    assert await kit.preparer.prepare(prepared) == prepared


async def test_a_prompt_without_media_passes_through_as_it_is(tmp_path):
    kit = Kit(tmp_path)
    prompt = Prompt(PromptKey("toy", 0, 0), "sum", (text_message("user", "words like <image>"),))
    assert await kit.preparer.prepare(prompt) is prompt
    assert kit.pool.calls == {}


async def test_case_f8_one_picture_in_every_form_gives_the_same_features(tmp_path):
    from PIL import Image

    array = picture(8, 12)
    content = png(array)
    write(tmp_path, "a.png", content)
    forms = [
        "a.png",
        f"file://{tmp_path}/a.png",
        content,
        {"bytes": content, "path": None},
        {"bytes": None, "path": "a.png"},
        Image.fromarray(array),
        array,
    ]
    kit = Kit(tmp_path, roots=[str(tmp_path)])

    class Records:
        digest = "d"

        def __init__(self, config, seed):
            pass

        def __len__(self):
            return len(forms)

        def read(self, index):
            return {"prompt": "<image>", "images": [forms[index]]}

        def location(self, index):
            return None

    config = source_config(type="generator", function="a:b", **IMAGES)
    reader = build_reader(config, renderer=kit.renderer, rules=kit.rules, quarantine=kit.quarantine, seed=0)
    object.__setattr__(reader, "dataset", Records(config, 0))
    prompts = [reader.read(index, 0) for index in range(len(forms))]
    media = [await kit.preparer.load((await kit.preparer.prepare(one)).messages[0].media) for one in prompts]
    for (medium,) in media:
        assert medium.num_tokens == 6
        assert np.array_equal(medium.arrays["values"], media[0][0].arrays["values"])
    assert len({medium.key for (medium,) in media}) == 3  # the file's bytes, PIL's file, the array


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
async def test_case_f8_columns_of_bytes_and_null_paths(tmp_path, kind):
    contents = [png(picture(4, 4, seed)) for seed in range(3)]
    records = [
        {"prompt": "a <image>", "images": [{"bytes": contents[0], "path": None}], "reference": "0"},
        {"prompt": "no picture", "images": None, "reference": "1"},
        {
            "prompt": "<image><image>",
            "images": [{"bytes": one, "path": None} for one in contents[1:]],
            "reference": "2",
        },
        {"prompt": "none given <image>", "images": [], "reference": "3"},
    ]
    if kind == "parquet":
        path = write_parquet(tmp_path / "a.parquet", records)
    else:
        import datasets

        features = datasets.Features(
            {
                "prompt": datasets.Value("string"),
                "images": datasets.List(datasets.Image()),
                "reference": datasets.Value("string"),
            }
        )
        datasets.Dataset.from_list(records, features=features).save_to_disk(tmp_path / "saved")
        path = tmp_path / "saved"
    kit = Kit(tmp_path)
    options = {"media_keys": {"image": "images"}, "columns": ["reference"]}
    config = source_config(type=kind, path=str(path), **options)
    prompts = kit.prompts(config)
    assert [prompt.key.record for prompt in prompts] == [0, 1, 2]
    assert all(prompt.metadata == {} for prompt in prompts)
    prepared = [await kit.preparer.prepare(prompt) for prompt in prompts]
    assert [len(one.messages[0].media) for one in prepared] == [1, 0, 2]
    media = [await kit.preparer.load(one.messages[0].media) for one in prepared]
    found = [medium.arrays["values"] for one in media for medium in one]
    expected = [(picture(4, 4, seed).astype(np.float32) * np.float32(1 / 255)).reshape(4, -1) for seed in range(3)]
    assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))
    assert [line["reason"].partition(":")[0] for line in kit.refused()] == ["media and placeholders differ"]


async def test_records_that_are_read_again_give_the_same_media(tmp_path):
    """A prompt that was prepared long ago, or in the run before, still finds what its record holds."""
    records = [
        {"prompt": "<image>", "images": [{"bytes": png(picture(4, 4, seed))}], "reference": "0"} for seed in range(3)
    ]
    config = source_config(
        type="parquet", path=str(write_parquet(tmp_path / "a.parquet", records)), media_keys={"image": "images"}
    )
    kit = Kit(tmp_path)
    prepared = [await kit.preparer.prepare(prompt) for prompt in kit.prompts(config)]
    later = Kit(tmp_path)
    build_reader(config, renderer=later.renderer, rules=later.rules, quarantine=later.quarantine, seed=0)
    for before in prepared:
        assert await later.preparer.prepare(before) == before
    records[2]["images"] = [{"bytes": png(picture(4, 4, 9))}]
    config = source_config(
        type="parquet", path=str(write_parquet(tmp_path / "b.parquet", records)), media_keys={"image": "images"}
    )
    changed = Kit(tmp_path)
    changed.prompts(config)
    assert (await refusal_of(changed.preparer.prepare(prepared[2]))).reason == "changed medium"


async def test_rule_mm3_a_bad_medium_is_in_quarantine_with_its_record(tmp_path):
    kit = Kit(tmp_path)
    content = png(picture(64, 64))
    write(tmp_path, "data/good.png", content)
    write(tmp_path, "data/cut.png", content[:-3000])
    write(tmp_path, "data/text.png", b"this is not a picture")
    write(tmp_path, "secret.png", content)
    names = ["good.png", "cut.png", "text.png", "missing.png", "../secret.png", "http://10.0.0.1/a.png", "good.png"]
    path = write(tmp_path, "data/a.jsonl", b"")
    write_lines(path, *({"prompt": f"{name} <image>", "images": [name]} for name in names))
    prompts = kit.prompts(source_config(path=str(path), **IMAGES))
    kit.rules = PromptRules(2000, media=kit.origins)
    kit.preparer._rules = kit.rules
    found = await asyncio.gather(*map(kit.preparer.prepare, prompts), return_exceptions=True)
    assert [isinstance(one, Prompt) for one in found] == [True, False, False, False, False, False, True]
    lines = {line["index"]: line for line in kit.refused()}
    assert sorted(lines) == [1, 2, 3, 4, 5]
    reasons = {index: line["reason"].partition(":")[0] for index, line in lines.items()}
    assert reasons[1] == "truncated"
    assert reasons[3] == "missing medium"
    assert reasons[4] == reasons[5].replace("host", "path") == "forbidden path"
    assert lines[3]["line"] == "a.jsonl:4"
    assert lines[2]["source"] == "toy"
    assert "text.png" in lines[2]["reason"]
    assert "text.png <image>" not in lines[2]["excerpt"]
    assert "text.png " in lines[2]["excerpt"]


async def test_a_record_is_in_quarantine_once_for_all_its_siblings_and_passes(tmp_path):
    kit = Kit(tmp_path)
    config = source_config(
        path=str(write_lines(tmp_path / "a.jsonl", {"prompt": "<image>", "images": ["b.png"]})), **IMAGES
    )
    (prompt,) = kit.prompts(config)
    for _ in range(3):
        await refusal_of(kit.preparer.prepare(prompt))
    assert len(kit.refused()) == 1


async def test_tokens_of_media_count_against_the_limit(tmp_path):
    kit = Kit(tmp_path, max_prompt_tokens=10)
    write(tmp_path, "a.png", png(picture(8, 12)))  # six tokens
    path = write_lines(
        tmp_path / "a.jsonl", *({"prompt": "<image>" + "x" * extra, "images": ["a.png"]} for extra in (4, 5, 40))
    )
    first, *others = kit.prompts(source_config(path=str(path), **IMAGES))
    await kit.preparer.prepare(first)
    for prompt in others:
        assert (await refusal_of(kit.preparer.prepare(prompt))).reason == "over-long prompt"


async def test_rule_mm1_placeholders_and_features_are_as_many(tmp_path):
    kit = Kit(tmp_path)
    write(tmp_path, "a.png", png(picture(8, 12)))
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "<image>", "images": ["a.png"]})
    (prompt,) = kit.prompts(source_config(path=str(path), **IMAGES))
    kit.renderer.adds = 1
    refusal = await refusal_of(kit.preparer.prepare(prompt))
    assert str(refusal) == "placeholders and features differ: 7 tokens stand for image, its encoder gives 6 features"
    kit.renderer.adds, kit.renderer.drops = 0, 1
    assert (await refusal_of(kit.preparer.prepare(prompt))).reason == "media lost in the template"
    kit.renderer.drops, kit.renderer.error = 0, DataError("the template refuses")
    assert str(await refusal_of(kit.preparer.prepare(prompt))) == "cannot be rendered: the template refuses"


async def test_a_template_may_show_media_in_an_order_of_its_own(tmp_path):
    kit = Kit(tmp_path)
    for seed in range(2):
        write(tmp_path, f"{seed}.png", png(picture(4, 4 + 4 * seed, seed)))
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "<image><image>", "images": ["0.png", "1.png"]})
    (prompt,) = kit.prompts(source_config(path=str(path), **IMAGES))
    plain = kit.renderer.encode
    kit.renderer.encode = lambda messages: Encoded(plain(messages).token_ids, plain(messages).parts[::-1])
    assert len((await kit.preparer.prepare(prompt)).messages[0].media) == 2
    kit.renderer.encode = lambda messages: Encoded(plain(messages).token_ids, plain(messages).parts[:1] * 2)
    assert (await refusal_of(kit.preparer.prepare(prompt))).reason == "media lost in the template"


def test_placeholders_are_counted_by_modality():
    from relax.core.media import Medium

    placeholders = {"image": 7, "audio": 8}
    media = (Medium("a", "image", 2, 2, {}), Medium("b", "audio", 1, 1, {}), Medium("c", "image", 1, 1, {}))
    check_placeholders(np.array([7, 1, 7, 8, 7], dtype=np.int32), placeholders, media)
    with pytest.raises(Refusal, match="2 tokens stand for audio, its encoder gives 1 features"):
        check_placeholders(np.array([7, 1, 7, 8, 7, 8], dtype=np.int32), placeholders, media)


async def test_limits_on_the_number_of_media(tmp_path):
    kit = Kit(tmp_path, max_per_prompt=2)
    write(tmp_path, "a.png", png(picture(4, 4)))
    path = write_lines(
        tmp_path / "a.jsonl", *({"prompt": "<image>" * number, "images": ["a.png"] * number} for number in (2, 3))
    )
    fits, full = kit.prompts(source_config(path=str(path), **IMAGES))
    assert len((await kit.preparer.prepare(fits)).messages[0].media) == 2
    assert (await refusal_of(kit.preparer.prepare(full))).reason == "too many media"
    assert kit.pool.calls["look"] == 1


async def test_the_first_bad_medium_of_a_prompt_is_the_reason(tmp_path):
    kit = Kit(tmp_path)
    write(tmp_path, "slow.png", b"no picture")
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "<image><image>", "images": ["slow.png", "missing.png"]})
    (prompt,) = kit.prompts(source_config(path=str(path), **IMAGES))
    kit.pool.delay_s = 0.05
    assert "slow.png" in (await refusal_of(kit.preparer.prepare(prompt))).detail


async def test_media_of_an_environments_turn(tmp_path):
    import base64

    kit = Kit(tmp_path, roots=[str(tmp_path)])
    write(tmp_path, "a.png", png(picture(4, 4)))
    uri = "data:image/png;base64," + base64.b64encode(png(picture(8, 8))).decode()
    sound = MediaPart("audio", "data:audio/wav;base64," + base64.b64encode(wav(np.zeros(250))).decode())
    messages = (
        Message("tool", (TextPart("look"), MediaPart("image", "file:a.png"), MediaPart("image", uri))),
        Message("user", (sound,)),
    )
    looked = await kit.preparer.look(messages)
    parts = [part for message in looked for part in message.media]
    assert [part.facts.get("width") for part in parts] == [4, 8, None]
    assert [part.uri.partition(":")[0] for part in parts] == ["file", "memory", "memory"]
    assert [medium.num_tokens for medium in await kit.preparer.load(parts)] == [1, 4, 3]
    assert await kit.preparer.look(looked) == looked
    bad = (Message("tool", (MediaPart("image", "file:///etc/passwd"),)),)
    assert (await refusal_of(kit.preparer.look(bad))).reason == "forbidden path"
    assert not (tmp_path / "quarantine.jsonl").exists()


async def test_siblings_prepare_at_once_and_decode_once(tmp_path):
    kit = Kit(tmp_path)
    write(tmp_path, "a.png", png(picture(8, 12)))
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "<image>", "images": ["a.png"]})
    (prompt,) = kit.prompts(source_config(path=str(path), **IMAGES))
    prepared = await asyncio.gather(*(kit.preparer.prepare(prompt) for _ in range(8)))
    assert len(set(map(id, prepared))) == 8
    assert all(one == prepared[0] for one in prepared)
    assert kit.pool.calls == {"look": 1, "decode": 1}
