"""Media as features: computed once however many ask, kept in memory and on disk, refused with the reason."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from relax.config.media import MediaSection
from relax.core.error import InvariantError, LimitError, TaskError
from relax.core.media import unpack_media
from relax.core.message import MediaPart
from relax.data.dataset import Refusal
from relax.data.media.cache import FeatureCache
from relax.data.media.origin import Origins
from relax.data.media.reference import file_uri
from tests.data.media_fake import CellFamily, ThreadPool, bomb, held_parts, picture, png, store_of, wav, write


def image_part(tmp_path, name="a.png", height=8, width=12, seed=0, **options) -> MediaPart:
    path = write(tmp_path, name, png(picture(height, width, seed)))
    return MediaPart("image", file_uri(str(path)), options=options)


def section_of(tmp_path, **values) -> MediaSection:
    return MediaSection.model_validate({"roots": (str(tmp_path),), **values})


async def refusal_of(awaitable) -> Refusal:
    with pytest.raises(Refusal) as raised:
        await awaitable
    return raised.value


async def test_a_looked_at_part_has_digest_facts_and_options(tmp_path):
    section = section_of(tmp_path, image={"resize_max_pixels": 50})
    store = store_of(section)
    part = image_part(tmp_path)
    looked = await store.look(part)
    assert looked.uri == part.uri
    assert len(looked.digest) == 32
    assert looked.facts == {"width": 12, "height": 8}
    assert looked.options == {"max_pixels": 50}
    assert (await store.look(image_part(tmp_path, max_pixels=7))).options == {"max_pixels": 7}
    assert store.counts["looked_at"] == 1  # the same content: its facts are known


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"fps": 2.0, "min_frames": 8, "max_frames": 16, "audio": True}),
        ({"max_frames": 4}, {"fps": 2.0, "max_frames": 4, "audio": True}),
        ({"min_frames": 20, "audio": False}, {"fps": 2.0, "min_frames": 20, "audio": False}),
        ({"fps": 1.0, "min_frames": 2}, {"fps": 1.0, "min_frames": 2, "max_frames": 16, "audio": True}),
    ],
)
def test_a_parts_own_options_win(own, expected):
    section = MediaSection.model_validate({"video": {"fps": 2, "min_frames": 8, "max_frames": 16, "audio": True}})
    assert store_of(section)._merged(MediaPart("video", "file:a.mp4", options=own)) == expected


def test_sound_of_videos_is_for_models_that_hear():
    family = CellFamily()
    family.modalities = ("image", "video")
    store = store_of(MediaSection.model_validate({"video": {"audio": True}}), family=family)
    assert store._merged(MediaPart("video", "file:a.mp4")) == {"audio": False}


async def test_features_are_those_of_the_decoded_content(tmp_path):
    array = picture(8, 12)
    path = write(tmp_path, "a.png", png(array))
    store = store_of(section_of(tmp_path))
    looked = await store.look(MediaPart("image", file_uri(str(path))))
    (medium,) = await store.load([looked])
    assert (medium.modality, medium.num_tokens) == ("image", 6)
    assert medium.arrays["values"].dtype == np.float32
    assert np.array_equal(medium.arrays["values"], (array.astype(np.float32) * np.float32(1 / 255)).reshape(8, -1))
    assert medium.arrays["size"].tolist() == [8, 12, 3]
    assert not medium.arrays["values"].flags.writeable


async def test_rule_mm2_siblings_at_once_decode_once(tmp_path):
    pool = ThreadPool(delay_s=0.02)
    store = store_of(section_of(tmp_path), pool=pool)
    part = image_part(tmp_path)
    looked = await asyncio.gather(*(store.look(part) for _ in range(8)))
    media = await asyncio.gather(*(store.load([one, one]) for one in looked))
    assert pool.calls == {"look": 1, "decode": 1}
    assert store.family.featurised == 1
    assert {id(medium) for pair in media for medium in pair} == {id(media[0][0])}
    await store.load([looked[0]])
    assert store.counts == {"looked_at": 1, "decoded": 1, "memory_hits": 1, "shared": 7 + 15}


async def test_a_sibling_that_gives_up_does_not_take_the_work_from_the_others(tmp_path):
    pool = ThreadPool(delay_s=0.05)
    store = store_of(section_of(tmp_path), pool=pool)
    looked = await store.look(image_part(tmp_path))
    first = asyncio.create_task(store.load([looked]))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(store.load([looked]))
    await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    (medium,) = await second
    assert medium.num_tokens == 6
    assert pool.calls["decode"] == 1


async def test_keys_tell_content_options_target_and_dtype_apart(tmp_path):
    plain, half = store_of(section_of(tmp_path)), store_of(section_of(tmp_path, dtype="bfloat16"))
    path = write(tmp_path, "a.wav", wav(np.linspace(-1, 1, 800)))
    part = MediaPart("audio", file_uri(str(path)))
    parts = [
        part,
        *(MediaPart("audio", part.uri, options=trim) for trim in ({"end": 0.05}, {"start": 0.05, "end": 0.1})),
    ]
    media = [(await store.load([await store.look(one)]))[0] for one in parts for store in (plain, half)]
    assert len({medium.key for medium in media}) == 6
    first, second = media[2], media[4]  # as many samples of the same file, taken elsewhere
    assert first.num_tokens == second.num_tokens == 4
    assert not np.array_equal(first.arrays["values"], second.arrays["values"])
    copied = MediaPart("audio", file_uri(str(write(tmp_path, "b/other.wav", path.read_bytes()))))
    (same,) = await plain.load([await plain.look(copied)])
    assert same.key == media[0].key
    assert plain.counts["decoded"] == 3


async def test_a_video_with_sound_gives_two_media(tmp_path):
    origins = Origins()
    store = store_of(section_of(tmp_path), origins=origins)
    frames = np.stack([picture(8, 8, seed) for seed in range(6)])
    (part,) = held_parts(origins, "video", {"array": frames, "fps": 3.0})
    looked = await store.look(part)
    assert looked.facts == {"width": 8, "height": 8, "frames": 6, "fps": 3.0, "seconds": 2.0, "audio": None}
    assert [medium.modality for medium in await store.load([looked])] == ["video"]
    sound = {"rate": 8000, "samples": 250}

    async def decoded(part, target):
        from relax.core.media import pack_arrays

        return pack_arrays({"video": np.zeros((3, 8, 8, 3), np.uint8), "audio": np.ones(250, np.float32)})

    store._decode = decoded
    heard = MediaPart("video", "file:x", "d", {"audio": True}, {**looked.facts, "audio": sound})
    seen, listened = await store.load([heard])
    assert (seen.modality, listened.modality) == ("video", "audio")
    assert (seen.num_tokens, listened.num_tokens) == (3, 3)
    assert listened.key == f"{seen.key}-1"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_rule_tq6_features_are_rounded_to_the_configured_format(tmp_path, dtype):
    import torch

    array = picture(8, 12)
    store = store_of(section_of(tmp_path, dtype=dtype))
    path = write(tmp_path, "a.png", png(array))
    (medium,) = await store.load([await store.look(MediaPart("image", file_uri(str(path))))])
    exact = torch.from_numpy((array.astype(np.float32) * np.float32(1 / 255)).reshape(8, -1))
    expected = exact.to(getattr(torch, dtype))
    words = medium.arrays["values"]
    found = torch.from_numpy(words.copy()).view(getattr(torch, dtype))
    assert torch.equal(found, expected)
    assert medium.dtypes == ({"values": "bfloat16"} if dtype == "bfloat16" else {})
    assert medium.arrays["size"].dtype == np.int64


@pytest.mark.parametrize(
    ("scale", "dtype"), [(1e3, "float16"), (np.inf, "float32"), (1e37, "bfloat16"), (3.4e38 / 255, "bfloat16")]
)
async def test_features_that_the_format_cannot_hold_are_refused(tmp_path, scale, dtype):
    store = store_of(section_of(tmp_path, dtype=dtype), family=CellFamily(scale))
    refusal = await refusal_of(store.load([await store.look(image_part(tmp_path))]))
    assert refusal.reason == "features not finite"


async def test_the_cache_on_disk_serves_the_next_run(tmp_path):
    section = section_of(tmp_path)
    part = image_part(tmp_path)
    first = store_of(section, cache=FeatureCache(tmp_path / "cache", 1 << 20))
    (made,) = await first.load([await first.look(part)])
    pool = ThreadPool()
    second = store_of(section, pool=pool, cache=FeatureCache(tmp_path / "cache", 1 << 20))
    looked = await second.look(part)
    (recalled,) = await second.load([looked])
    assert pool.calls == {"look": 1}
    assert second.counts["disk_hits"] == 1
    assert (recalled.key, recalled.num_tokens) == (made.key, made.num_tokens)
    assert np.array_equal(recalled.arrays["values"], made.arrays["values"])
    other = store_of(section, family=CellFamily(0.5), cache=FeatureCache(tmp_path / "cache", 1 << 20))
    await other.load([await other.look(part)])
    assert other.counts["decoded"] == 1  # a family that computes something else does not meet the entry


async def test_a_damaged_cache_entry_is_computed_again(tmp_path):
    section, part = section_of(tmp_path), image_part(tmp_path)
    first = store_of(section, cache=FeatureCache(tmp_path / "cache", 1 << 20))
    (made,) = await first.load([await first.look(part)])
    (entry,) = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    entry.write_bytes(entry.read_bytes()[:-1])
    cache = FeatureCache(tmp_path / "cache", 1 << 20)
    second = store_of(section, cache=cache)
    (again,) = await second.load([await second.look(part)])
    assert second.counts["decoded"] == 1
    assert cache.counts["damaged"] == 1
    assert np.array_equal(again.arrays["values"], made.arrays["values"])
    assert unpack_media(FeatureCache(tmp_path / "cache", 1 << 20).get(made.key))[0].key == made.key


async def test_memory_is_bounded_and_keeps_what_was_used_last(tmp_path):
    size = 8 * 12 * 3 * 4 + 24
    store = store_of(section_of(tmp_path, held_bytes=2 * size))
    parts = [await store.look(image_part(tmp_path, f"{seed}.png", seed=seed)) for seed in range(3)]
    await store.load([parts[0]])
    await store.load([parts[1]])
    await store.load([parts[0]])
    await store.load([parts[2]])  # in place of 1
    assert store._held.num_bytes == 2 * size
    await store.load([parts[0]])
    assert store.counts["decoded"] == 3
    await store.load([parts[1]])
    assert store.counts["decoded"] == 4


async def test_rule_mm3_a_bad_medium_is_decoded_once_and_refused_to_all(tmp_path):
    content = png(picture(64, 64))
    path = write(tmp_path, "cut.png", content[: len(content) // 2])
    pool = ThreadPool(delay_s=0.01)
    store = store_of(section_of(tmp_path), pool=pool)
    part = MediaPart("image", file_uri(str(path)))
    looked = await asyncio.gather(*(store.look(part) for _ in range(4)))  # only decoding shows the damage
    found = [*await asyncio.gather(*(store.load([one]) for one in looked), return_exceptions=True)]
    found.append(await refusal_of(store.load([await store.look(part)])))
    assert pool.calls == {"look": 1, "decode": 1}
    assert {one.reason for one in found} == {"truncated"}
    assert store.refused["truncated"] == len(found)


async def test_a_refusal_is_forgotten_after_a_while(tmp_path):
    store = store_of(section_of(tmp_path))
    now = [0.0]
    store._looks._clock = lambda: now[0]
    part = MediaPart("image", "file:late.png")
    assert (await refusal_of(store.look(part))).reason == "missing medium"
    write(tmp_path, "late.png", png(picture(4, 4)))
    assert (await refusal_of(store.look(part))).reason == "missing medium"
    now[0] = 61.0
    assert (await store.look(part)).facts == {"width": 4, "height": 4}


async def test_a_file_that_changed_is_refused(tmp_path):
    store = store_of(section_of(tmp_path))
    looked = await store.look(image_part(tmp_path, seed=0))
    image_part(tmp_path, seed=1)
    assert (await refusal_of(store.load([looked]))).reason == "changed medium"
    assert (await refusal_of(store.look(looked))).reason == "changed medium"


async def test_a_file_that_changes_while_it_is_decoded_is_refused(tmp_path):
    class Meddler(ThreadPool):
        async def run(self, function, *args, limits):
            found = await super().run(function, *args, limits=limits)
            if function.__name__ == "decode":
                image_part(tmp_path, seed=1)
            return found

    store = store_of(section_of(tmp_path), pool=Meddler())
    looked = await store.look(image_part(tmp_path, seed=0))
    assert (await refusal_of(store.load([looked]))).reason == "changed medium"


async def test_looking_again_changes_nothing(tmp_path):
    store = store_of(section_of(tmp_path, image={"resize_max_pixels": 50}))
    looked = await store.look(image_part(tmp_path))
    assert await store.look(looked) == looked


@pytest.mark.parametrize(
    ("content", "values", "reason"),
    [
        (bomb(60_000, 60_000), {}, "too many pixels"),
        (b"", {}, "empty medium"),
        (b"not an image at all", {}, "no image"),
        (png(picture(4, 4)), {"max_bytes": 10}, "too large a medium"),
        (png(picture(4, 13)), {}, "refused by the model"),
        (png(picture(1, 300)), {}, "too long a shape"),
    ],
)
async def test_rule_mm3_refused_before_anything_is_decoded(tmp_path, content, values, reason):
    pool = ThreadPool()
    path = write(tmp_path, "a.png", content)
    store = store_of(section_of(tmp_path, **values), pool=pool)
    refusal = await refusal_of(store.look(MediaPart("image", file_uri(str(path)))))
    assert pool.calls["decode"] == 0
    assert refusal.reason == reason


async def test_a_pool_that_kills_is_a_refusal_and_one_that_is_closed_is_not(tmp_path):
    pool = ThreadPool()
    store = store_of(section_of(tmp_path), pool=pool)
    pool.error = LimitError("look ran longer than 30 s and was killed; raise its time limit if it is right to")
    assert (await refusal_of(store.look(image_part(tmp_path)))).reason == "takes too long"
    pool.error = TaskError("the process pool is closed; look was not called")
    with pytest.raises(TaskError, match="pool is closed"):
        await store.look(image_part(tmp_path, "b.png", seed=2))


async def test_what_would_decode_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("relax.data.media.store._MAX_RESULT_BYTES", 4096 + 3 * 8 * 12)
    pool = ThreadPool()
    store = store_of(section_of(tmp_path), pool=pool)
    assert len(await store.load([await store.look(image_part(tmp_path))])) == 1
    larger = await store.look(image_part(tmp_path, "b.png", height=16))
    assert (await refusal_of(store.load([larger]))).reason == "decodes to too much"
    assert pool.calls == {"look": 2, "decode": 1}


async def test_a_family_that_trips_over_a_medium_ends_no_run(tmp_path):
    array = picture(4, 4)
    array[0, 0, 0] = 77
    store = store_of(section_of(tmp_path))
    looked = await store.look(MediaPart("image", file_uri(str(write(tmp_path, "a.png", png(array))))))
    refusal = await refusal_of(store.load([looked]))
    assert str(refusal) == f"cannot be processed: image {looked.uri!r}: IndexError: a grid of no columns"


async def test_limits_of_a_prompt(tmp_path):
    store = store_of(section_of(tmp_path, max_per_prompt=2, max_feature_bytes=2000))
    one, two = [await store.look(image_part(tmp_path, f"{seed}.png", seed=seed)) for seed in range(2)]
    assert len(await store.load([one, one])) == 2  # 1176 bytes, carried once
    assert (await refusal_of(store.load([one, two]))).reason == "too large features"
    assert (await refusal_of(store.load([one] * 3))).reason == "too many media"


async def test_a_model_that_does_not_read_it(tmp_path):
    part = image_part(tmp_path)
    textual = store_of(section_of(tmp_path))
    textual.family = None
    assert (await refusal_of(textual.look(part))).reason == "text only"
    family = CellFamily()
    family.modalities = ("audio",)
    deaf = store_of(section_of(tmp_path), family=family)
    assert (await refusal_of(deaf.look(part))).reason == "unsupported modality"
    family.modalities = ("video",)
    asking = MediaPart("video", "file:a.mp4", options={"audio": True})
    assert (await refusal_of(deaf.look(asking))).reason == "unsupported modality"


async def test_loading_what_nobody_looked_at_is_our_bug(tmp_path):
    with pytest.raises(InvariantError, match="MM2"):
        await store_of(section_of(tmp_path)).load([image_part(tmp_path)])


async def test_one_picture_in_three_forms_that_a_record_may_hold(tmp_path):
    from PIL import Image

    array, origins = picture(8, 12), Origins()
    store = store_of(section_of(tmp_path), origins=origins)
    sound = {"array": np.linspace(-1, 1, 400, dtype=np.float32), "sampling_rate": 8000, "end": 0.025}
    parts = held_parts(origins, "image", png(array), Image.fromarray(array), array)
    media = [(await store.load([await store.look(part)]))[0] for part in parts]
    for medium in media:
        assert np.array_equal(medium.arrays["values"], media[0].arrays["values"])
    origins = Origins()
    (part,) = held_parts(origins, "audio", sound)
    store = store_of(section_of(tmp_path), origins=origins)
    (heard,) = await store.load([await store.look(part)])
    assert (heard.num_tokens, heard.arrays["values"].shape) == (2, (200, 1))


async def test_a_data_uri_is_carried_on_as_a_digest(tmp_path):
    import base64

    content = png(picture(40, 40))
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    store = store_of(section_of(tmp_path))
    looked = await store.look(MediaPart("image", uri))
    assert looked.uri == f"memory:{looked.digest}"
    assert (await store.load([looked]))[0].num_tokens == 100
    forgotten = MediaPart("image", "memory:" + "0" * 32)
    assert (await refusal_of(store.look(forgotten))).reason == "missing medium"


async def test_large_content_goes_to_the_decoder_through_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("relax.data.media.store._SPOOLED_BYTES", 100)
    pool = ThreadPool()
    origins = Origins()
    store = store_of(section_of(tmp_path), pool=pool, origins=origins)
    (part,) = held_parts(origins, "image", png(picture(40, 40)))
    await store.load([await store.look(part)])
    assert [type(place) for place in pool.places] == [str, str]
    assert not any(Path(place).exists() for place in pool.places)  # noqa: ASYNC240


async def test_closing_ends_what_is_in_the_air(tmp_path):
    store = store_of(section_of(tmp_path), pool=ThreadPool(delay_s=30))
    waiting = asyncio.create_task(store.look(image_part(tmp_path)))
    await asyncio.sleep(0.05)
    await store.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_the_real_pool_decodes_and_names_what_is_wrong(tmp_path):
    from relax.runtime.pool import ProcessPool

    pool = ProcessPool(2)
    try:
        origins = Origins()
        store = store_of(section_of(tmp_path), pool=pool, origins=origins)
        array = picture(8, 12)
        path = write(tmp_path, "a.png", png(array))
        (medium,) = await store.load([await store.look(MediaPart("image", file_uri(str(path))))])
        assert np.array_equal(medium.arrays["values"], (array.astype(np.float32) * np.float32(1 / 255)).reshape(8, -1))
        (kept,) = held_parts(origins, "image", array)
        (again,) = await store.load([await store.look(kept)])
        assert np.array_equal(again.arrays["values"], medium.arrays["values"])
        broken = write(tmp_path, "b.png", bomb(60_000, 60_000))
        assert (await refusal_of(store.look(MediaPart("image", file_uri(str(broken)))))).reason == "too many pixels"
    finally:
        await pool.close()
