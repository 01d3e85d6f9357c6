"""Sounds: exact where lossless, mono, resampled, trimmed, of the model's length, or refused with the reason."""

import io
import struct
from typing import Any

import numpy as np
import pytest
from scipy.signal import resample_poly

from relax.core.media import pack_arrays, unpack_arrays
from relax.data.media.codec import BadMedium, decode, look
from tests.data import media_sample as sample

NOISE = np.random.default_rng(0).integers(-(2**15), 2**15, (5000, 2)).astype(np.int16)
MIX = (NOISE.astype(np.float32) / 2**15).mean(axis=1)


def read(
    content: bytes | str, options: dict[str, Any] | None = None, packed: bool = False, rate: int = 0, **limits: Any
) -> np.ndarray:
    """The sound at its own rate, or at `rate`; as a model family asks for it, from facts and trims alone."""
    facts = look("audio", content, limits, packed)
    options, rate = options or {}, rate or facts["rate"]
    start, end = options.get("start") or 0.0, options.get("end")
    seconds = (facts["seconds"] if end is None else min(end, facts["seconds"])) - start
    target = {"rate": rate, "samples": round(seconds * rate)}
    arrays, _ = unpack_arrays(decode("audio", content, options, target, limits, packed))
    assert set(arrays) == {"audio"}
    assert arrays["audio"].shape == (target["samples"],)
    assert arrays["audio"].dtype == np.float32
    return arrays["audio"]


def refused(
    content: bytes | str, options: dict[str, Any] | None = None, packed: bool = False, **limits: Any
) -> BadMedium:
    with pytest.raises(BadMedium) as caught:
        read(content, options, packed, **limits)
    return caught.value


def sweep(samples: int, rate: int) -> np.ndarray:
    time = np.arange(samples) / rate
    return (0.5 * np.sin(2 * np.pi * (200 * time + 300 * time * time))).astype(np.float32)


@pytest.mark.parametrize("format", ["WAV", "WAVEX", "FLAC", "AIFF", "AU", "CAF", "W64", "RF64"])
def test_lossless_formats_are_exact_and_mixed_by_the_mean(format: str) -> None:
    content = sample.encode_sound(NOISE, 44_100, format, "PCM_16")
    assert look("audio", content, {}) == {"samples": 5000, "rate": 44_100, "seconds": 5000 / 44_100}
    assert np.array_equal(read(content), MIX)


@pytest.mark.parametrize(
    ("subtype", "error"), [("PCM_U8", 1 / 128), ("PCM_24", 2**-22), ("PCM_32", 2**-22), ("FLOAT", 0), ("DOUBLE", 0)]
)
def test_every_sample_type_has_its_scale(subtype: str, error: float) -> None:
    wave = sweep(3000, 8000)
    assert np.abs(read(sample.encode_sound(wave, 8000, "WAV", subtype)) - wave).max() <= error


@pytest.mark.parametrize(("format", "subtype"), [("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")])
def test_lossy_formats_of_libsndfile_keep_their_place(format: str, subtype: str) -> None:
    wave = sweep(48_000, 16_000)
    found = read(sample.encode_sound(wave, 16_000, format, subtype))
    assert len(found) == 48_000
    assert np.abs(found - wave)[2000:-2000].mean() < 0.01  # ten samples off would give 0.4


@pytest.mark.parametrize(
    ("format", "codec", "rate"),
    [("mp4", "aac", 44_100), ("mp4", "alac", 44_100), ("matroska", "aac", 44_100), ("webm", "libopus", 48_000)],
)
def test_what_libsndfile_does_not_know_is_read_by_ffmpeg(format: str, codec: str, rate: int) -> None:
    wave = sweep(2 * rate, rate)
    content = sample.encode_sound_by_ffmpeg(wave, rate, format, codec)
    facts = look("audio", content, {})
    assert facts["rate"] == rate
    assert abs(facts["samples"] - len(wave)) <= (0 if format == "mp4" else 0.03 * rate)
    assert np.abs(read(content)[: len(wave)] - wave)[4000:-4000].mean() < (1e-6 if codec == "alac" else 0.02)


def test_the_length_of_a_long_track_does_not_drift_with_rounded_packets() -> None:
    """Matroska keeps milliseconds: 0.2 ms off in each packet would be 5 s in ten minutes."""
    content = sample.encode_sound_by_ffmpeg(np.zeros(44_100 * 120, np.float32), 44_100, "matroska", "aac")
    assert abs(look("audio", content, {})["seconds"] - 120) < 0.05


@pytest.mark.parametrize(
    ("rate", "up", "down"), [(16_000, 160, 441), (48_000, 160, 147), (24_000, 80, 147), (44_100, 1, 1)]
)
def test_resampling_is_the_polyphase_filter_of_scipy(rate: int, up: int, down: int) -> None:
    content = sample.encode_sound(NOISE, 44_100)
    found = read(content, rate=rate)
    assert np.array_equal(found, resample_poly(MIX, up, down)[: len(found)] if up != down else MIX)
    assert len(found) == round(5000 * rate / 44_100)
    assert np.array_equal(found, read(content, rate=rate))


def test_a_tone_stays_the_tone_at_another_rate() -> None:
    found = read(sample.encode_sound(sample.tone(44_100, 44_100), 44_100, subtype="FLOAT"), rate=16_000)
    assert np.abs(found - sample.tone(16_000, 16_000))[200:-200].max() < 2e-3


@pytest.mark.parametrize(
    ("options", "first", "last"),
    [({"start": 0.1}, 1600, 5000), ({"end": 0.2}, 0, 3200), ({"start": 0.1, "end": 0.2}, 1600, 3200), ({"end": 9.0}, 0, 5000),
     ({"start": None, "end": None}, 0, 5000)],
)  # fmt: skip
@pytest.mark.parametrize("format", ["WAV", "FLAC"])
def test_trims_are_exact(options: dict[str, Any], first: int, last: int, format: str) -> None:
    assert np.array_equal(read(sample.encode_sound(NOISE, 16_000, format), options), MIX[first:last])


@pytest.mark.parametrize(
    "options", [{"start": 1.0}, {"start": 0.2, "end": 0.2}, {"start": 0.2, "end": 0.1}, {"start": -1.0}]
)
def test_trims_that_leave_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadMedium, match="nothing left"):
        decode("audio", sample.encode_sound(NOISE, 16_000), options, {"rate": 16_000, "samples": 100})


@pytest.mark.parametrize(("samples", "fits"), [(4997, True), (5003, True), (4996, False), (5004, False), (0, False)])
def test_a_few_samples_of_rounding_are_cut_or_filled_and_no_more(samples: int, fits: bool) -> None:
    target = {"rate": 16_000, "samples": samples}
    content = sample.encode_sound(NOISE, 16_000)
    if not fits:
        with pytest.raises(BadMedium, match=rf"not as long as it says: decoding gives 5000 .* promises {samples}"):
            decode("audio", content, {}, target)
        return
    found = unpack_arrays(decode("audio", content, {}, target))[0]["audio"]
    assert np.array_equal(found, np.pad(MIX, (0, max(0, samples - 5000)))[:samples])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(value: float) -> None:
    wave = sample.tone(100)
    wave[50] = value
    content = sample.encode_sound(wave, subtype="FLOAT")
    assert refused(content).reason == "not finite"
    assert len(read(content, {"end": 0.003})) == 48  # what is trimmed away is not judged


def test_long_sounds_are_refused_from_the_header() -> None:
    content = sample.encode_sound(NOISE, 16_000)
    assert look("audio", content, {"max_s": 5000 / 16_000})["samples"] == 5000
    assert refused(content, max_s=0.31).reason == "too long"
    flac = bytearray(sample.encode_sound(NOISE, 16_000, "FLAC"))
    claim = 10 * 3600 * 16_000
    flac[21] = flac[21] & 0xF0 | claim >> 32
    flac[22:26] = struct.pack(">I", claim & 0xFFFFFFFF)
    assert str(refused(bytes(flac), max_s=600.0)) == "too long: 36000.0 s, at most 600 s are read"
    wav = bytearray(content)
    where = wav.index(b"data")
    wav[where + 4 : where + 8] = struct.pack("<I", claim * 2)
    assert refused(bytes(wav), max_s=600.0).reason == "truncated"


def test_a_header_of_unknown_length_is_what_follows_it() -> None:
    wav = bytearray(sample.encode_sound(NOISE, 16_000))
    where = wav.index(b"data")
    wav[4:8] = wav[where + 4 : where + 8] = b"\xff" * 4
    assert np.array_equal(read(bytes(wav)), MIX)
    flac = bytearray(sample.encode_sound(NOISE, 16_000, "FLAC"))
    flac[21] &= 0xF0
    flac[22:26] = bytes(4)
    assert np.array_equal(read(bytes(flac)), MIX)
    assert refused(bytes(flac), max_s=0.1).reason == "too long"


@pytest.mark.parametrize("format", ["WAV", "FLAC", "AIFF", "AU", "CAF", "W64", "RF64", "OGG", "MP3"])
@pytest.mark.parametrize("share", [0.4, 0.97])
def test_a_sound_that_ends_early_is_refused(format: str, share: float) -> None:
    content = sample.encode_sound(sweep(60_000, 16_000), 16_000, format)
    assert refused(content[: int(len(content) * share)]).reason in ("truncated", "damaged")


def test_an_mp4_that_ends_early_is_refused() -> None:
    content = sample.encode_sound_by_ffmpeg(sweep(44_100, 44_100), 44_100, "mp4", "aac")
    assert refused(content[:-50]).reason == "truncated"


def test_what_is_no_sound_is_refused() -> None:
    assert refused(b"It sounds like this.").reason == "no sound"
    assert refused(b"").reason == "empty medium"
    assert refused(sample.encode_video(sample.clip(3))).reason == "no sound"
    assert refused(sample.encode_sound(np.zeros(0, np.float32))).reason == "no samples"
    assert refused(sample.encode_sound(np.zeros((9, 65), np.int16))).reason == "too many channels"
    assert refused(sample.encode_sound(NOISE, 1_000_000)).reason == "no sample rate"


def test_the_sound_of_a_film_is_a_sound_too() -> None:
    wave = sweep(16_000, 16_000)
    content = sample.encode_video(sample.clip(10), sound=wave)
    assert np.abs(read(content) - wave).max() <= 2**-15


@pytest.mark.parametrize("text", ["#EXTM3U\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile '{}'\n"])
def test_rule_mm6_lists_that_name_other_files_are_not_followed(text: str, tmp_path: Any) -> None:
    other = tmp_path / "other.wav"
    other.write_bytes(sample.encode_sound(NOISE))
    (tmp_path / "list.m3u8").write_text(text.format(other))
    assert refused(str(tmp_path / "list.m3u8")).reason == "no sound"


@pytest.mark.parametrize(
    ("array", "expected"),
    [(MIX, MIX), (MIX.astype(np.float64), MIX), (NOISE, MIX), (NOISE[:, 0], NOISE[:, 0] / 2**15),
     (NOISE.astype(np.int32) << 16, MIX), (np.array([0, 128, 255], np.uint8), [-1, 0, 127 / 128])],
)  # fmt: skip
def test_arrays_are_read_by_their_type(array: np.ndarray, expected: Any) -> None:
    found = read(pack_arrays({"audio": array}, {"rate": 16_000}), packed=True)
    assert np.array_equal(found, np.asarray(expected, np.float32))


def test_arrays_are_resampled_and_trimmed_as_files_are() -> None:
    content = pack_arrays({"audio": NOISE}, {"rate": 44_100})
    assert np.array_equal(
        read(content, {"start": 0.02}, packed=True, rate=16_000),
        read(sample.encode_sound(NOISE, 44_100), {"start": 0.02}, rate=16_000),
    )


@pytest.mark.parametrize(
    ("array", "header", "reason"),
    [
        (MIX, {}, "no sample rate"),
        (MIX, {"rate": 0}, "no sample rate"),
        (MIX, {"rate": 16_000.5}, "no sample rate"),
        (MIX, {"rate": float("nan")}, "no sample rate"),
        (MIX[None], {"rate": 16_000}, "wrong array"),
        (NOISE.astype(np.int64), {"rate": 16_000}, "wrong array"),
        (MIX[:0], {"rate": 16_000}, "empty medium"),
        (np.array([1e300]), {"rate": 16_000}, "not finite"),
    ],
)
def test_arrays_that_are_no_sound_are_refused(array: np.ndarray, header: dict[str, Any], reason: str) -> None:
    assert refused(pack_arrays({"audio": array}, header), packed=True).reason == reason


def test_content_is_read_the_same_from_a_file(tmp_path: Any) -> None:
    for name, content in (("a.mp3", sample.encode_sound(NOISE)), ("b.wav", sample.encode_sound(NOISE, format="FLAC"))):
        (tmp_path / name).write_bytes(content)
        assert np.array_equal(read(str(tmp_path / name)), read(io.BytesIO(content).getvalue()))
