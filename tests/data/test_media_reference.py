"""What a record may hold where a medium belongs, and what is refused."""

import base64
import math
from pathlib import Path

import numpy as np
import pytest

from relax.core.message import MediaPart
from relax.data.config import JsonlConfig
from relax.data.dataset import Refusal
from relax.data.media.embedded import EmbeddedLimits, embedded_bytes
from relax.data.media.reference import Held, RecordMedia, raw_media, raw_medium
from tests.data.media_fake import picture, png, wav

PNG = png(picture(4, 6))
BASE64 = base64.b64encode(PNG).decode()
LIMITS = EmbeddedLimits(1 << 20, 1 << 20)


def reader(home=Path("/data/set")) -> RecordMedia:
    return RecordMedia("record:toy/3", home)


def config_of(**values) -> JsonlConfig:
    return JsonlConfig.model_validate({"name": "toy", "task": "sum", "path": "a.jsonl", **values})


def refusal_of(call, *args) -> Refusal:
    with pytest.raises(Refusal) as raised:
        call(*args)
    return raised.value


@pytest.mark.parametrize(
    ("value", "uri"),
    [
        ("cat.png", "file:///data/set/cat.png"),
        ("a b/cät#1?.png", "file:///data/set/a%20b/c%C3%A4t%231%3F.png"),
        ("../up.png", "file:///data/set/../up.png"),
        ("~/cat.png", "file:///data/set/~/cat.png"),
        ("C:\\cat.png", "file:///data/set/C%3A%5Ccat.png"),
        ("record:toy/0/0", "file:///data/set/record%3Atoy/0/0"),
        ("memory:00", "file:///data/set/memory%3A00"),
        ("/abs/cat.png", "file:///abs/cat.png"),
        ("//abs/cat.png", "file:///abs/cat.png"),
        (Path("/abs/cat.png"), "file:///abs/cat.png"),
        ("file:///abs/c%20at.png", "file:///abs/c%20at.png"),
        ("FILE://localhost/abs/cat.png", "file:///abs/cat.png"),
        ("file:///abs/%2e%2e/etc/passwd", "file:///abs/../etc/passwd"),
        ("file:cat.png", "file:///data/set/cat.png"),
        ("http://example.org/a.png?x=1", "http://example.org/a.png?x=1"),
        ("HTTPS://Example.org/A.png", "https://Example.org/A.png"),
        ({"path": "cat.png"}, "file:///data/set/cat.png"),
        ({"path": "cat.png", "bytes": None}, "file:///data/set/cat.png"),
        ({"url": "https://example.org/a.png", "detail": "auto"}, "https://example.org/a.png"),
        ({"image": {"path": "cat.png"}}, "file:///data/set/cat.png"),
        (np.str_("cat.png"), "file:///data/set/cat.png"),
    ],
)
def test_paths_and_urls(value, uri):
    part = reader().read("image", value)
    assert part == MediaPart("image", uri)
    assert not reader().held


def test_relative_paths_wait_for_the_roots_where_there_are_some():
    assert reader(None).read("image", "a b.png").uri == "file:a%20b.png"
    assert reader(None).read("image", "/a.png").uri == "file:///a.png"


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (PNG, "bytes"),
        (bytearray(PNG), "bytes"),
        (memoryview(PNG), "bytes"),
        ({"bytes": PNG, "path": None}, "bytes"),
        ({"bytes": PNG, "path": "only-a-name.png"}, "bytes"),
        ("data:image/png;base64," + BASE64, "data_uri"),
        ({"url": "data:image/png;base64," + BASE64}, "data_uri"),
        (BASE64, "base64"),
        (BASE64[:20] + "\n" + BASE64[20:], "base64"),
        ({"base64": BASE64}, "base64"),
        ({"data": BASE64, "format": "png"}, "base64"),
    ],
)
def test_case_f8_whatever_holds_the_bytes_they_are_the_same(value, form):
    read = reader()
    assert read.read("image", value) == MediaPart("image", "record:toy/3/0")
    assert [held.form for held in read.held] == [form]
    assert embedded_bytes(read.held[0], LIMITS) == (PNG, "file")


@pytest.mark.parametrize("kind", ["jpeg", "webp", "gif", "bmp", "tiff", "wav", "flac", "ogg", "mp4", "mkv"])
def test_bare_base64_of_every_usual_format_is_known(kind):
    import io

    from PIL import Image

    buffer = io.BytesIO()
    if kind in ("wav", "flac", "ogg"):
        import soundfile

        soundfile.write(buffer, np.zeros(800), 8000, format=kind.upper())
    elif kind in ("mp4", "mkv"):
        import av

        with av.open(buffer, "w", format={"mp4": "mp4", "mkv": "matroska"}[kind]) as container:
            stream = container.add_stream("mpeg4", rate=4)
            stream.width = stream.height = 16
            for _ in range(2):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(16, 16), format="rgb24")))
            container.mux(stream.encode())
    else:
        Image.fromarray(picture(8, 8)).save(buffer, kind)
    read = reader()
    read.read("video", base64.b64encode(buffer.getvalue()).decode())
    assert [held.form for held in read.held] == ["base64"]


def test_case_f8_pil_images_and_arrays():
    from PIL import Image

    array = picture(4, 6)
    read = reader()
    given = [Image.fromarray(array), array, array.tolist(), {"array": array}]
    assert [read.read("image", value).uri for value in given] == [f"record:toy/3/{number}" for number in range(4)]
    assert [held.form for held in read.held] == ["pil", "array", "array", "array"]
    content, kind = embedded_bytes(read.held[0], LIMITS)
    assert (content[:4], kind) == (b"\x89PNG", "file")
    from relax.core.media import unpack_arrays

    for held in read.held[1:]:
        content, kind = embedded_bytes(held, LIMITS)
        arrays, header = unpack_arrays(content)
        assert (kind, header) == ("array", {})
        assert np.array_equal(arrays["image"], array)


def test_sounds_and_videos_as_arrays_come_with_their_rate():
    from relax.core.media import unpack_arrays

    read = reader()
    read.read("audio", {"array": [0.0, 0.5, -0.5], "sampling_rate": 16000, "path": "x.wav"})
    read.read("audio", {"array": np.zeros((2, 100), np.float32), "sampling_rate": 8000})
    read.read("video", {"array": np.zeros((5, 4, 4, 3), np.uint8), "fps": 2.5})
    found = [unpack_arrays(embedded_bytes(held, LIMITS)[0]) for held in read.held]
    assert found[0][0]["audio"].tolist() == [0.0, 0.5, -0.5]
    assert [header for _, header in found] == [{"rate": 16000.0}, {"rate": 8000.0}, {"fps": 2.5}]
    assert found[1][0]["audio"].shape == (100, 2)
    assert found[2][0]["video"].shape == (5, 4, 4, 3)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK", "YCbCr", "LAB", "F", "I", "HSV"])
def test_pil_images_of_every_mode_become_a_file(mode):
    import io

    from PIL import Image

    content, _ = embedded_bytes(Held("image", "pil", Image.new(mode, (4, 3))), LIMITS)
    with Image.open(io.BytesIO(content)) as read:
        assert read.size == (4, 3)
        assert read.mode == ("RGB" if mode == "HSV" else mode)


def test_a_pil_image_keeps_the_rotation_of_its_file(tmp_path):
    import io

    from PIL import Image

    turned = Image.fromarray(picture(4, 6))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "a.jpg", exif=exif)
    with Image.open(tmp_path / "a.jpg") as opened:
        content, _ = embedded_bytes(Held("image", "pil", opened), LIMITS)
    with Image.open(io.BytesIO(content)) as read:
        assert read.getexif()[0x0112] == 6


def test_equal_media_of_a_record_are_one():
    read = reader()
    uris = [read.read("image", value).uri for value in (PNG, {"bytes": PNG}, png(picture(2, 2)), PNG)]
    assert uris == ["record:toy/3/0", "record:toy/3/0", "record:toy/3/1", "record:toy/3/0"]
    assert read.read("audio", PNG).uri == "record:toy/3/2"


@pytest.mark.parametrize(
    ("modality", "value", "reason"),
    [
        ("image", None, "missing medium"),
        ("image", "", "missing medium"),
        ("image", " \n", "missing medium"),
        ("image", {}, "missing medium"),
        ("image", {"bytes": None, "path": None}, "missing medium"),
        ("image", {"height": 3}, "missing medium"),
        ("image", "a\0b.png", "mistyped medium"),
        ("image", "file:///a%00b.png", "mistyped medium"),
        ("image", "half \ud83d.png", "unencodable text"),
        ("image", "x" * 5000, "mistyped medium"),
        ("image", 7, "mistyped medium"),
        ("image", True, "mistyped medium"),
        ("image", object(), "mistyped medium"),
        ("image", "s3://bucket/a.png", "unsupported URL"),
        ("image", "ftp://example.org/a.png", "unsupported URL"),
        ("image", "file://server/share/a.png", "unsupported URL"),
        ("image", {"bytes": "text"}, "mistyped medium"),
        ("image", {"path": b"bytes"}, "mistyped medium"),
        ("image", {"url": "http://a/b", "path": "c"}, "ambiguous medium"),
        ("image", {"bytes": PNG, "url": "http://a/b"}, "ambiguous medium"),
        ("image", {"image": "a.png", "image_url": "b.png"}, "ambiguous medium"),
        ("image", {"image": {"image": "a.png"}}, "mistyped medium"),
        ("image", {"path": "a.png", "colour": 1}, "unknown media option"),
        ("image", {"url": "http://a/b", "detail": "high"}, "unknown media option"),
        ("image", ["a.png", "b.png"], "mistyped medium"),
        ("audio", [0.5, 0.25], "mistyped medium"),
        ("audio", np.zeros(100, np.float32), "mistyped medium"),
        ("audio", {"array": [0.5], "sampling_rate": 0}, "mistyped medium"),
        ("audio", {"array": [0.5], "sampling_rate": math.nan}, "mistyped medium"),
        ("audio", {"array": [0.5], "sampling_rate": "16k"}, "mistyped medium"),
        ("video", ["frame0.png", "frame1.png"], "mistyped medium"),
        ("video", np.zeros((2, 4, 4, 3), np.uint8), "mistyped medium"),
    ],
)
def test_what_is_no_medium_is_refused(modality, value, reason):
    assert refusal_of(reader().read, modality, value).reason == reason


def test_what_holds_itself_is_refused():
    loop: list = []
    loop.append(loop)
    assert refusal_of(reader().read, "image", loop).reason == "mistyped medium"
    mapping: dict = {}
    mapping["image"] = mapping
    assert refusal_of(reader().read, "image", mapping).reason == "mistyped medium"


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (Held("image", "base64", "AAA\u20ac"), "broken base64"),
        (Held("image", "base64", "A"), "broken base64"),
        (Held("image", "base64", "!!!!"), "broken base64"),
        (Held("image", "data_uri", "data:image/png;base64"), "broken data URI"),
        (Held("image", "data_uri", "data:,"), "empty medium"),
        (Held("image", "bytes", b""), "empty medium"),
        (Held("image", "bytes", b"x" * (2 << 20)), "too large a medium"),
        (Held("image", "base64", "A" * (4 << 20)), "too large a medium"),
        (Held("image", "array", [[1, 2], [3]]), "mistyped medium"),
        (Held("image", "array", np.zeros((0, 3), np.uint8)), "empty medium"),
        (Held("image", "array", np.array([object()])), "mistyped medium"),
        (Held("image", "array", np.zeros((2000, 2000, 3), np.uint8)), "too large a medium"),
    ],
)
def test_content_that_is_none(held, reason):
    assert refusal_of(embedded_bytes, held, LIMITS).reason == reason


def test_a_large_pil_image_is_refused_before_its_pixels_are_read():
    from PIL import Image

    assert refusal_of(embedded_bytes, Held("image", "pil", Image.new("1", (2000, 2000))), LIMITS).reason == (
        "too many pixels"
    )


def test_a_pil_image_whose_pixels_cannot_be_had_is_damaged():
    """It was opened lazily: that half of its file is missing shows when it is saved."""
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(buffer, "PNG")
    half = Image.open(io.BytesIO(buffer.getvalue()[: len(buffer.getvalue()) // 2]))
    assert refusal_of(embedded_bytes, Held("image", "pil", half), LIMITS).reason == "damaged"


def test_data_uris_in_percents_and_url_safe_base64():
    assert embedded_bytes(Held("image", "data_uri", "data:text/plain,a%20b"), LIMITS)[0] == b"a b"
    assert embedded_bytes(Held("image", "base64", "-_-_"), LIMITS)[0] == base64.b64decode("+/+/")
    assert embedded_bytes(Held("image", "data_uri", "data:;base64,YQ%3D%3D"), LIMITS)[0] == b"a"


@pytest.mark.parametrize(
    ("modality", "options"),
    [
        ("image", {"max_pixels": 100}),
        ("audio", {"start": 0.0, "end": 2.5}),
        ("video", {"start": 1.0, "fps": 2.0, "min_frames": 4, "max_frames": 8, "max_pixels": 5000, "audio": True}),
    ],
)
def test_options_beside_the_medium_or_in_it(modality, options):
    expected = MediaPart(modality, "file:///data/set/a", options=options)
    message = [{"role": "user", "content": [{"type": modality, modality: "a", **options}]}]
    (lifted,) = reader().lift(message)
    assert lifted["content"] == [expected]
    assert reader().read(modality, {"path": "a", **options}) == expected
    assert reader().read(modality, {modality: "a", **options}) == expected


@pytest.mark.parametrize(
    ("modality", "options", "message"),
    [
        ("image", {"max_pixels": 0}, "max_pixels of the image is 0, expected a whole number above 0"),
        ("image", {"max_pixels": 2.5}, "max_pixels of the image is 2.5"),
        ("image", {"max_pixels": True}, "max_pixels of the image is True"),
        ("image", {"fps": 2}, "fps; options of an image are max_pixels"),
        ("audio", {"start": -1}, "start of the audio is -1, expected seconds from 0"),
        ("audio", {"end": math.inf}, "end of the audio is inf"),
        ("audio", {"start": 2, "end": 2}, "start 2 s is not before end 2 s"),
        ("video", {"audio": 1}, "audio of the video is 1, expected true or false"),
        ("video", {"min_frames": 9, "max_frames": 8}, "min_frames 9 is above max_frames 8"),
        ("video", {"fps": "2"}, "fps of the video is '2'"),
    ],
)
def test_bad_options_are_refused(modality, options, message):
    assert message in refusal_of(reader().read, modality, {"path": "a", **options}).detail


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image", "image": "a.png"}, ("image", "file:///data/set/a.png")),
        ({"type": "image", "path": "a.png"}, ("image", "file:///data/set/a.png")),
        ({"type": "image", "url": "https://x.org/a"}, ("image", "https://x.org/a")),
        ({"type": "image_url", "image_url": {"url": "https://x.org/a"}}, ("image", "https://x.org/a")),
        ({"type": "image_url", "image_url": "https://x.org/a"}, ("image", "https://x.org/a")),
        ({"type": "input_image", "image_url": "https://x.org/a", "detail": "auto"}, ("image", "https://x.org/a")),
        ({"type": "audio", "audio": {"path": "a.wav", "bytes": None}}, ("audio", "file:///data/set/a.wav")),
        ({"type": "audio_url", "audio_url": {"url": "https://x.org/a"}}, ("audio", "https://x.org/a")),
        ({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}, ("audio", "record:toy/3/0")),
        ({"type": "video", "video": "a.mp4"}, ("video", "file:///data/set/a.mp4")),
        ({"type": "video_url", "video_url": {"url": "https://x.org/a"}}, ("video", "https://x.org/a")),
        ({"type": "image", "image": "a.png", "text": None, "audio": None}, ("image", "file:///data/set/a.png")),
        ({"type": "image", "text": None}, ("image", "")),
        ({"type": "image", "image": {"bytes": None, "path": None}}, ("image", "")),
    ],
)
def test_typed_parts(part, expected):
    (message,) = reader().lift([{"role": "user", "content": [part]}])
    (found,) = message["content"]
    assert (found.type, found.uri) == expected
    assert found.options == {}


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image", "image": "a", "image_url": "b"}, "ambiguous medium"),
        ({"type": "image", "image": {"path": "a", "max_pixels": 1}, "max_pixels": 2}, "ambiguous medium"),
        ({"type": "image", "audio": "a.wav"}, "unknown media option"),
        ({"type": "image", "image": "a", "text": "caption"}, "unknown media option"),
    ],
)
def test_typed_parts_that_are_refused(part, reason):
    assert refusal_of(reader().lift, [{"role": "user", "content": [part]}]).reason == reason


def test_what_is_no_message_list_is_left_for_the_reader_of_messages():
    for value in ("text", 7, None, [1, "a", {"role": "user"}, {"content": "text"}, {"content": [1, "a", {"type": 3}]}]):
        assert reader().lift(value) == value


def test_text_parts_lose_the_empty_keys_that_columns_gave_them():
    part = {"type": "text", "text": "a", "image": {"bytes": None, "path": None}, "video": None}
    assert reader().lift([{"content": [part]}]) == [{"content": [{"type": "text", "text": "a"}]}]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, []),
        ([], []),
        (math.nan, []),
        ({"bytes": None, "path": None}, []),
        ("a.png", ["file:///data/set/a.png"]),
        ({"path": "a.png"}, ["file:///data/set/a.png"]),
        (PNG, ["record:toy/3/0"]),
        (["a.png", {"bytes": PNG}], ["file:///data/set/a.png", "record:toy/3/0"]),
        (("a.png",), ["file:///data/set/a.png"]),
        (np.array(["a.png", None], dtype=object)[:1], ["file:///data/set/a.png"]),
        (np.zeros((2, 2, 3), np.uint8), ["record:toy/3/0"]),
    ],
)
def test_lists_under_media_keys(value, expected):
    assert [part.uri for part in reader().read_list("image", "images", value)] == expected


def test_a_refusal_in_a_list_says_which():
    refusal = refusal_of(reader().read_list, "image", "images", ["a.png", None])
    assert str(refusal) == "missing medium: 'images'[1]: there is null in place of an image"


def test_raw_media_have_the_numbers_of_their_references():
    config = config_of(media_keys={"audio": "sounds", "image": "images"})
    sound = wav(np.zeros(10))
    value = {
        "images": [png(picture(2, 2)), "b.png", png(picture(3, 3))],
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": PNG}, {"type": "audio", "audio": {"bytes": sound}}]}
        ],
        "sounds": [{"array": [0.5], "sampling_rate": 8000}],
    }
    held = raw_media(value, config)
    assert [one.modality for one in held] == ["image", "audio", "audio", "image", "image"]
    assert raw_medium(value, config, 1) == Held("audio", "bytes", sound)
    assert raw_medium(value, config, 4).value == png(picture(3, 3))
    for number in (-1, 5):
        assert refusal_of(raw_medium, value, config, number).reason == "changed medium"
    assert refusal_of(raw_medium, "text", config, 0).reason == "not a record"
