"""Videos: exact frames where lossless, reached by seeking, with their sound, or refused with the reason."""

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from relax.core.media import pack_arrays, unpack_arrays
from relax.data.media import codec, video
from relax.data.media.codec import BadMedium, decode, look
from tests.data import media_sample as sample

CLIP = sample.clip(30)
LOSSLESS = {"format": "matroska", "codec": "ffv1", "pixels": "bgr0"}
H264 = {"format": "mp4", "codec": "libx264rgb", "pixels": "rgb24", "options": {"crf": "0", "bf": "2"}}
FORMS = [
    ("mp4", "libx264", "yuv420p"),
    ("mp4", "mpeg4", "yuv420p"),
    ("mov", "mjpeg", "yuvj420p"),
    ("matroska", "libx264", "yuv420p"),
    ("webm", "libvpx", "yuv420p"),
    ("webm", "libvpx-vp9", "yuv420p"),
    ("avi", "mpeg4", "yuv420p"),
    ("avi", "libx264", "yuv420p"),
    ("mpegts", "libx264", "yuv420p"),
    ("mpeg", "mpeg2video", "yuv420p"),
    ("flv", "flv1", "yuv420p"),
    ("gif", "gif", "rgb8"),
]


def read(
    content: bytes | str, frames: Any = None, *, audio: Any = None, packed: bool = False, **options: Any
) -> dict[str, Any]:
    """The arrays of a video at its own size; every frame, or those given."""
    facts = look("video", content, {}, packed)
    frames = list(range(facts["frames"])) if frames is None else frames
    target = {"width": facts["width"], "height": facts["height"], "frames": frames, "fps": facts["fps"], "audio": audio}
    packed_arrays = decode("video", content, options, target, {}, packed)
    assert len(packed_arrays) <= codec.result_bytes("video", target)
    arrays, _ = unpack_arrays(packed_arrays)
    assert arrays["video"].shape == (len(frames), facts["height"], facts["width"], 3)
    assert arrays["video"].dtype == np.uint8
    assert ("audio" in arrays) == (audio is not None)
    return arrays


def refused(content: bytes | str, frames: Any = (0,), packed: bool = False, **limits: Any) -> BadMedium:
    target = {"width": 8, "height": 8, "frames": list(frames), "audio": None}
    with pytest.raises(BadMedium) as caught:
        _ = look("video", content, limits, packed), decode("video", content, {}, target, limits, packed)
    return caught.value


def levels(frames: np.ndarray) -> list[int]:
    """What tells the frames of `sample.clip` apart: 5 for each."""
    return [round(float(level)) for level in frames[..., 0].mean(axis=(1, 2))]


@pytest.mark.parametrize("form", [LOSSLESS, H264], ids=["ffv1", "h264"])
@pytest.mark.parametrize(
    "frames", [None, [0], [29], [7], [0, 29], [3, 3, 9, 17], [17, 3], [4, 5, 6], list(range(1, 30, 4)), [28, 29]]
)
def test_every_choice_of_frames_is_exact(form: dict[str, Any], frames: list[int] | None) -> None:
    content = sample.encode_video(CLIP, **form)
    facts = look("video", content, {})
    assert facts == {"width": 32, "height": 16, "frames": 30, "fps": 10.0, "seconds": 3.0, "audio": None}
    assert np.array_equal(read(content, frames)["video"], CLIP if frames is None else CLIP[frames])


@pytest.mark.parametrize(("format", "name", "pixels"), FORMS)
def test_usual_forms_give_the_right_frames(format: str, name: str, pixels: str) -> None:
    content = sample.encode_video(CLIP, format=format, codec=name, pixels=pixels)
    facts = look("video", content, {})
    assert (facts["frames"], facts["fps"], facts["seconds"]) == (30, 10.0, 3.0)
    found = read(content, [0, 13, 14, 29])["video"]
    assert np.abs(np.array(levels(found)) - [0, 65, 70, 145]).max() <= 10
    assert np.argsort(levels(found)).tolist() == [0, 1, 2, 3]
    assert np.abs(found[0, :, :, 2].mean(axis=0) - CLIP[0, 0, :, 2]).max() < 40


def test_far_frames_are_reached_without_decoding_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    content = sample.encode_video(sample.clip(300), gop=10, **LOSSLESS)
    opened: list[Any] = []

    class Counted:
        """A container that counts the frames decoded from it."""

        def __init__(self, container: Any) -> None:
            self.container, self.decoded = container, 0
            opened.append(self)

        def __enter__(self) -> "Counted":
            return self

        def __exit__(self, *problem: Any) -> None:
            self.container.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.container, name)

        def decode(self, track: Any) -> Any:
            for frame in self.container.decode(track):
                self.decoded += 1
                yield frame

    original = video.open_container
    monkeypatch.setattr(video, "open_container", lambda *a: Counted(original(*a)))
    found = read(content, [5, 155, 158, 299])["video"]
    assert np.array_equal(found, sample.clip(300)[[5, 155, 158, 299]])
    assert sum(one.decoded for one in opened) <= 1 + 6 + 9 + 10


@pytest.mark.parametrize("trouble", ["refuses", "lands late"])
def test_a_container_that_cannot_seek_is_read_from_its_start(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = sample.encode_video(CLIP, **LOSSLESS)
    original = video.open_container

    class Stubborn:
        def __init__(self, container: Any) -> None:
            self.container = container

        def __enter__(self) -> "Stubborn":
            return self

        def __exit__(self, *problem: Any) -> None:
            self.container.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.container, name)

        def seek(self, time: int, stream: Any) -> None:
            if trouble == "refuses" and time > 0:
                raise av.FFmpegError(1, "no index")
            self.container.seek(time + 1000 if time else 0, stream=stream)

    monkeypatch.setattr(video, "open_container", lambda *a: Stubborn(original(*a)))
    assert np.array_equal(read(content, [2, 11, 13, 27])["video"], CLIP[[2, 11, 13, 27]])


def test_times_decide_the_order_and_rate_of_frames() -> None:
    times = [0, 40, 90, 400, 430, 1000]
    content = sample.encode_video(CLIP[:6], 25, times=times, **LOSSLESS)
    facts = look("video", content, {})
    assert facts["frames"] == 6
    assert facts["seconds"] == pytest.approx(1.0, abs=0.25)
    assert facts["fps"] == pytest.approx(6 / facts["seconds"])
    assert np.array_equal(read(content)["video"], CLIP[:6])


def test_a_video_without_times_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = video._scan
    monkeypatch.setattr(
        video,
        "_scan",
        lambda *a: _without_times(original(*a)),
    )
    content = sample.encode_video(CLIP, **LOSSLESS)
    assert look("video", content, {})["seconds"] == 3.0
    assert np.array_equal(read(content, [29, 4])["video"], CLIP[[29, 4]])


def _without_times(index: video.Index) -> video.Index:
    return video.Index(index.frames, (), (), index.unit, 0, index.sound_s)


@pytest.mark.parametrize("rotation", [90, 180, 270, 0])
def test_videos_stand_upright_and_facts_are_of_that(rotation: int) -> None:
    content = sample.encode_video(CLIP[:3], rotation=rotation, **H264)
    facts = look("video", content, {})
    assert (facts["width"], facts["height"]) == ((16, 32) if rotation in (90, 270) else (32, 16))
    assert np.array_equal(read(content)["video"], np.rot90(CLIP[:3], rotation // 90, axes=(1, 2)))


def test_frames_are_resized_as_images_are() -> None:
    content = sample.encode_video(CLIP, **LOSSLESS)
    target = {"width": 20, "height": 28, "frames": [4, 9], "audio": None}
    found = unpack_arrays(decode("video", content, {}, target))[0]["video"]
    for number, frame in zip((4, 9), found, strict=True):
        assert np.array_equal(
            frame, np.asarray(Image.fromarray(CLIP[number]).resize((20, 28), Image.Resampling.BICUBIC))
        )


def test_limits_apply_before_frames_are_decoded() -> None:
    content = sample.encode_video(CLIP, **LOSSLESS)
    assert look("video", content, {"max_pixels": 512, "max_s": 3.0, "max_bytes": len(content)})["frames"] == 30
    assert refused(content, max_pixels=511).reason == "too many pixels"
    assert refused(content, max_bytes=len(content) - 1).reason == "too large a medium"
    assert refused(content, max_s=2.9).reason == "too long"
    assert look("video", content, {"max_s": 2.0, "start": 0.5, "end": 2.5})["seconds"] == 3.0
    assert look("video", content, {"max_s": 0.5, "start": 2.5})["seconds"] == 3.0
    assert refused(content, max_s=1.9, start=0.5, end=2.5).reason == "too long"
    assert refused(content, start=3.0).reason == "nothing left"
    assert refused(content, frames=[30]).reason == "frames missing"
    assert refused(content, frames=[]).reason == "no frames"
    assert refused(content, frames=[-1]).reason == "no frames"


def test_a_video_that_grows_beyond_the_limit_is_refused_where_it_does() -> None:
    small = sample.encode_video(CLIP[:5], format="mpegts", codec="libx264", pixels="yuv420p")
    large = sample.encode_video(sample.clip(5, 320, 160), format="mpegts", codec="libx264", pixels="yuv420p")
    assert refused(small + large, frames=range(9), max_pixels=512).reason in (
        "too many pixels",
        "damaged",
        "frames missing",
    )


@pytest.mark.parametrize(
    "form", [{"format": "mp4", "codec": "libx264", "pixels": "yuv420p", "sound_codec": "aac"}, LOSSLESS]
)
def test_the_sound_is_of_the_same_seconds_as_the_frames(form: dict[str, Any]) -> None:
    seconds = np.arange(48_000) / 16_000
    wave = (0.5 * np.sin(2 * np.pi * (200 * seconds + 100 * seconds**2))).astype(np.float32)
    content = sample.encode_video(CLIP, sound=wave, **form)
    facts = look("video", content, {})
    assert facts["audio"]["rate"] == 16_000
    assert abs(facts["audio"]["seconds"] - 3.0) < 0.07
    close = 0.02 if form.get("sound_codec") else 2**-15
    whole = read(content, [0], audio={"rate": 16_000, "samples": 48_000})["audio"]
    assert np.abs(whole - wave)[500:-1500].mean() < close
    part = read(content, [0], audio={"rate": 16_000, "samples": 8_000}, start=2.25, end=2.75)["audio"]
    assert np.abs(part - wave[36_000:44_000])[500:-500].mean() < close
    half = read(content, [0], audio={"rate": 8_000, "samples": 24_000})["audio"]
    assert np.abs(half - wave[::2])[500:-1500].mean() < max(close, 0.002)


def test_sound_that_begins_after_the_frames_follows_silence() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        pictures = container.add_stream("ffv1", rate=10)
        pictures.width, pictures.height, pictures.pix_fmt = 32, 16, "bgr0"
        track = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        for frame in CLIP[:20]:
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(pictures.encode(None))
        frame = av.AudioFrame.from_ndarray(np.full((1, 8000), 1000, np.int16), format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 8000, 4000, Fraction(1, 8000)
        container.mux(track.encode(frame))
        container.mux(track.encode(None))
    facts = look("video", buffer.getvalue(), {})
    assert facts["audio"] == {"samples": 12_000, "rate": 8000, "seconds": 1.5}
    found = read(buffer.getvalue(), [0], audio={"rate": 8000, "samples": 12_000})["audio"]
    assert np.array_equal(found, np.repeat(np.float32([0, 1000 / 2**15]), [4000, 8000]))


def test_sound_that_nobody_decodes_is_refused_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    content = sample.encode_video(CLIP[:3], sound=sample.tone(4000), **LOSSLESS)
    monkeypatch.setattr(codec.audio, "MAX_CHANNELS", 0)
    assert look("video", content, {})["audio"] is None
    assert refused(content, audio=True).reason == "too many channels"


def test_a_target_with_sound_needs_a_video_with_sound() -> None:
    content = sample.encode_video(CLIP[:3], **LOSSLESS)
    with pytest.raises(BadMedium, match="no sound"):
        read(content, [0], audio={"rate": 8000, "samples": 2400})


@pytest.mark.parametrize(
    "form", [("mp4", "libx264", "yuv420p"), ("matroska", "ffv1", "bgr0"), ("avi", "mpeg4", "yuv420p")]
)
@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_a_video_that_ends_early_is_refused(form: tuple[str, str, str], share: float) -> None:
    content = sample.encode_video(CLIP, format=form[0], codec=form[1], pixels=form[2])
    assert refused(content[: int(len(content) * share)]).reason == "truncated"


def test_a_stream_without_a_length_is_as_long_as_it_is() -> None:
    content = sample.encode_video(CLIP, format="mpegts", codec="libx264", pixels="yuv420p")
    cut = content[: len(content) // 376 * 188]
    facts = look("video", cut, {})
    assert 5 < facts["frames"] < 30
    assert levels(read(cut, [0, 4])["video"])[0] == 0


def test_what_is_no_video_is_refused() -> None:
    assert refused(b"A moving story.").reason == "no video"
    assert refused(sample.encode_sound(sample.tone(100))).reason == "no video"
    assert refused(sample.encode_image(CLIP[0])).reason == "no video"
    assert refused(b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>").reason == "no video"
    assert refused(b"").reason == "empty medium"
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height = 32, 16
        container.start_encoding()
    assert refused(buffer.getvalue()).reason in ("no frames", "no video", "no pixels")


def test_a_cover_picture_is_no_video() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mjpeg", rate=1)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuvj420p"
        stream.disposition = av.stream.Disposition.attached_pic
        container.mux(stream.encode(av.VideoFrame.from_ndarray(CLIP[0], format="rgb24")))
        container.mux(stream.encode(None))
    assert refused(buffer.getvalue()).reason == "no video"


def test_frames_that_no_packet_holds_are_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that promises more frames than decoding gives is refused; the last frame does not stand in."""
    content = sample.encode_video(CLIP, **LOSSLESS)
    original = video._scan

    def promising(*args: Any) -> video.Index:
        index = original(*args)
        return video.Index(index.frames + 1, (*index.times, index.times[-1] + 100), index.keys, index.unit, 100, None)

    monkeypatch.setattr(video, "_scan", promising)
    error = refused(content, frames=[0, 30])
    assert error.reason == "frames missing"
    assert "frame 30 of 31 is promised" in error.detail


def test_a_packet_that_shows_nothing_stands_for_the_frame_on_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a hidden reference frame of VP8 does: it has a time and is counted, and decoding gives nothing for it."""
    content = sample.encode_video(CLIP, **LOSSLESS)
    original = video._scan

    def counting_one_more(*args: Any) -> video.Index:
        index = original(*args)
        times = sorted([*index.times, index.times[12] + 40])
        return video.Index(index.frames + 1, times, index.keys, index.unit, 100, None)

    monkeypatch.setattr(video, "_scan", counting_one_more)
    target = {"width": 32, "height": 16, "audio": None}
    for wanted, shown in (([12, 13, 14], [12, 12, 13]), ([13], [12]), ([13, 30], [12, 29])):
        found = unpack_arrays(decode("video", content, {}, {**target, "frames": wanted}))[0]["video"]
        assert np.array_equal(found, CLIP[shown])


def test_a_frame_that_decodes_with_errors_is_refused() -> None:
    content = bytearray(sample.encode_video(sample.clip(30, 128, 96) ^ np.random.default_rng(0).integers(0, 64, (30, 96, 128, 3), np.uint8),
                                            format="mp4", codec="libx264", pixels="yuv420p", gop=30))  # fmt: skip
    where = content.index(b"mdat")
    half = (where + content.index(b"moov")) // 2
    content[half : half + 400] = np.random.default_rng(1).bytes(400)
    assert refused(bytes(content), frames=range(30)).reason == "damaged"


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_arrays_of_frames_are_taken_by_number(channels: int) -> None:
    array = np.concatenate([CLIP, np.full((30, 16, 32, 1), 255, np.uint8)], axis=3)[..., :channels]
    content = pack_arrays({"video": array}, {"fps": 5})
    assert look("video", content, {}, True) == {
        "width": 32, "height": 16, "frames": 30, "fps": 5.0, "seconds": 6.0, "audio": None
    }  # fmt: skip
    expected = np.repeat(array, 3, axis=3) if channels == 1 else CLIP
    assert np.array_equal(read(content, [29, 3, 3], packed=True)["video"], expected[[29, 3, 3]])


def test_arrays_that_are_no_video_are_refused() -> None:
    def reason(array: Any, header: Any, **limits: Any) -> str:
        return refused(pack_arrays({"video": array}, header), packed=True, **limits).reason

    assert reason(CLIP, {}) == "no frame rate"
    assert reason(CLIP, {"fps": 0}) == "no frame rate"
    assert reason(CLIP, {"fps": float("nan")}) == "no frame rate"
    assert reason(CLIP[0], {"fps": 1}) == "wrong array"
    assert reason(CLIP.transpose(0, 3, 1, 2), {"fps": 1}) == "wrong array"
    assert reason(CLIP, {"fps": 10}, max_s=2.0) == "too long"
    assert reason(CLIP, {"fps": 10}, max_pixels=500) == "too many pixels"


def test_content_decides_whatever_a_file_is_called(tmp_path: Any) -> None:
    path = tmp_path / "clip.mp3"
    path.write_bytes(sample.encode_video(CLIP, **LOSSLESS))
    assert np.array_equal(read(str(path), [0, 9])["video"], CLIP[[0, 9]])
