"""What users hand in that no record would hold: parts that an environment made by hand, and what they read about their media."""

import base64

import numpy as np
import pytest

from relax.config.media import MediaSection
from relax.core.error import LimitError
from relax.core.media import pack_arrays
from relax.core.message import MediaPart
from relax.data.dataset import Refusal
from relax.data.media import codec
from relax.data.media.content import BadMedium
from relax.data.media.reference import shown_uri
from tests.data.media_fake import picture, png, store_of

URI = "data:image/png;base64," + base64.b64encode(png(picture(8, 12, 0))).decode()


@pytest.mark.parametrize(
    ("part", "reason", "detail"),
    [
        (MediaPart("image", None), "mistyped medium", "uri of the image is a NoneType, expected text"),
        (MediaPart("image", b"png"), "mistyped medium", "uri of the image is a bytes, expected text"),
        (MediaPart("image", ""), "missing medium", "the image is an empty text"),
        (MediaPart("image", "file:///a\0b"), "mistyped medium", "a NUL character"),
        (MediaPart("image", "file:///\ud800"), "unencodable text", "half of a surrogate pair"),
        (MediaPart("image", URI, digest=[]), "mistyped medium", "digest of the image is a list, expected text"),
        (MediaPart("smell", URI), "unsupported modality", "a part of type 'smell'; it is one of image, audio, video"),
        (MediaPart(["image"], URI), "unsupported modality", "a part of type ['image']"),
        (MediaPart("image", URI, options=None), "mistyped media option", "are a NoneType, expected a mapping"),
        (MediaPart("image", URI, options={"max_pixels": "many"}), "mistyped media option", "is 'many', expected a whole"),
        (MediaPart("image", URI, options={"crop": object()}), "unknown media option", "crop; options of an image are"),
        (MediaPart("video", URI, options={"start": 2, "end": 1}), "mistyped media option", "is not before end 1 s"),
    ],
)  # fmt: skip
async def test_a_part_that_an_environment_made_wrong_is_refused_like_a_records(part, reason, detail):
    store = store_of(MediaSection())
    with pytest.raises(Refusal) as raised:
        await store.look(part)
    assert raised.value.reason == reason
    assert detail in raised.value.detail
    assert store.refused == {reason: 1}


async def test_a_part_that_was_looked_at_may_be_looked_at_again():
    section = MediaSection.model_validate({"image": {"resize_max_pixels": 50}})
    store = store_of(section)
    looked = await store.look(MediaPart("image", URI))
    assert looked.options == {"max_pixels": 50}
    assert (await store.look(looked)).digest == looked.digest


async def test_the_content_of_a_data_uri_does_not_crowd_out_the_reason():
    store = store_of(MediaSection())
    with pytest.raises(Refusal) as raised:
        await store.look(MediaPart("image", URI, digest="0" * 32))
    assert raised.value.detail.startswith(f"image '{URI[:32]}...'") or raised.value.detail.startswith(
        f"'{URI[:32]}...'"
    )
    assert "do not change media" in raised.value.detail
    assert shown_uri("file:///" + "a" * 80) == "file:///" + "a" * 80


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("look ran longer than 1 s and was killed; raise its time limit if it is right to", "data.media.time_s"),
        ("decode needed more than 1 bytes of memory", "data.media.memory"),
    ],
)
def test_a_limit_names_its_setting(text, setting):
    assert setting in codec.as_refusal(LimitError(text)).detail


def test_a_reason_is_the_same_in_every_process():
    with pytest.raises(BadMedium) as raised:
        codec.look("image", b"no image at all", {})
    assert raised.value.detail.endswith(": cannot identify image file")


def test_a_trim_that_leaves_nothing_says_what_there_was():
    packed = pack_arrays({"video": np.zeros((4, 8, 8, 3), np.uint8)}, {"fps": 2.0})
    with pytest.raises(BadMedium) as raised:
        codec.look("video", packed, {"start": 5.0}, True)
    assert (raised.value.reason, raised.value.detail) == ("nothing left", "the video has 2.00 s, start is 5 s")
