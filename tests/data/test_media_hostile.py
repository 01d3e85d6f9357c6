"""Two hundred hostile media through a real pool: each is read as what it is, or refused with a true reason, and the pool lives on."""

import asyncio
import resource
import struct
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.core.error import LimitError, TaskError
from relax.core.media import unpack_arrays
from relax.core.protocol import Limits
from relax.data.dataset import Refusal
from relax.data.media import codec
from relax.runtime.pool import ProcessPool
from tests.data import media_sample as sample

MEMORY_BYTES = 512 << 20
LIMITS = Limits(time_s=10.0, memory_bytes=MEMORY_BYTES)
MEDIA = {
    "image": {"max_pixels": 1_000_000, "max_aspect": 200.0, "max_bytes": 4 << 20},
    "audio": {"max_s": 600.0, "max_bytes": 4 << 20},
    "video": {"max_s": 600.0, "max_pixels": 1_000_000, "max_bytes": 4 << 20},
}
SUFFIXES = (".png", ".jpg", ".wav", ".mp3", ".mp4", ".mkv", ".txt", "")
ENDS_EARLY = {
    "truncated",
    "damaged",
    "empty medium",
    "no image",
    "no sound",
    "no video",
    "no samples",
    "frames missing",
    "no frames",
}


@dataclass(frozen=True)
class Hostile:
    """`reasons` are those that would be true; with "read" among them it may also turn out to be readable."""

    name: str
    modality: str
    content: bytes
    reasons: frozenset[str]


@cache
def whole() -> dict[str, tuple[str, bytes]]:
    """Sound media, by name: modality and content."""
    smooth = np.kron(sample.picture(8, 6), np.ones((12, 12, 1), np.uint8))
    wave = sample.tone(24_000, 16_000)
    clip = sample.clip(20, 64, 48)
    images = {format: sample.encode_image(smooth, format) for format in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")}
    sounds = {format: sample.encode_sound(wave, 16_000, format) for format in ("WAV", "FLAC", "OGG", "MP3")}
    sounds["M4A"] = sample.encode_sound_by_ffmpeg(wave, 16_000, "mp4", "aac")
    h264 = {"codec": "libx264", "pixels": "yuv420p"}
    videos = {
        "MP4": sample.encode_video(clip, format="mp4", sound=wave, sound_codec="aac", **h264),
        "MKV": sample.encode_video(clip, format="matroska", sound=wave, **h264),
        "WEBM": sample.encode_video(clip, format="webm", codec="libvpx-vp9", pixels="yuv420p"),
        "AVI": sample.encode_video(clip, format="avi", codec="mpeg4", pixels="yuv420p"),
    }
    found = {name: ("image", content) for name, content in images.items()}
    found |= {name: ("audio", content) for name, content in sounds.items()}
    return found | {name: ("video", content) for name, content in videos.items()}


def truncated(count: int) -> Iterator[Hostile]:
    """Cut anywhere. MP3 has frames and no length, so a cut one may be a shorter sound; a WEBP or GIF may lose nothing it needs."""
    random = np.random.default_rng(0)
    for number in range(count):
        name = list(whole())[number % len(whole())]
        modality, content = whole()[name]
        end = int(random.integers(1, len(content)))
        lossless = {"read"} if name in ("MP3", "GIF") or len(content) - end < 16 else set()
        yield Hostile(f"{name} cut at {end}", modality, content[:end], frozenset(ENDS_EARLY | lossless))


def spoiled(count: int) -> Iterator[Hostile]:
    """Sixteen random bytes somewhere: some formats notice, some cannot."""
    random = np.random.default_rng(1)
    for number in range(count):
        name = list(whole())[number % len(whole())]
        modality, content = whole()[name]
        where = int(random.integers(0, len(content) - 16))
        changed = content[:where] + random.bytes(16) + content[where + 16 :]
        yield Hostile(f"{name} spoiled at {where}", modality, changed, frozenset(codec.REASONS | {"read"}))


def spoiled_index(count: int) -> Iterator[Hostile]:
    """An MP4 whose tables of where and when are not what they were."""
    random = np.random.default_rng(2)
    content = whole()["MP4"][1]
    tables = [content.index(kind) for kind in (b"stsz", b"stco", b"stts", b"stsc", b"stss", b"ctts", b"moov", b"mvhd")]
    for number in range(count):
        where = tables[number % len(tables)] + 4
        changed = content[:where] + random.bytes(24) + content[where + 24 :]
        yield Hostile(f"MP4 index {number}", "video", changed, frozenset(codec.REASONS | {"read"}))


def mislabelled() -> Iterator[Hostile]:
    """A medium of another modality, text, a list of files, bytes without meaning."""
    for modality, reason in (("image", "no image"), ("audio", "no sound"), ("video", "no video")):
        for name, (true, content) in whole().items():
            related = {true, modality} == {"audio", "video"} or name == "GIF"
            if true != modality and not related:
                yield Hostile(f"{name} as {modality}", modality, content, frozenset({reason, "damaged"}))
        texts = (
            b"<image> of a cat",
            b"#EXTM3U\n#EXTINF:9,\n/etc/passwd\n",
            b"ffconcat version 1.0\nfile /etc/passwd\n",
        )
        for text in (
            *texts,
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            b"%PDF-1.7\n",
            "ü".encode() * 9000,
            b"\x00" * 5000,
        ):
            yield Hostile(f"{text[:12]!r} as {modality}", modality, text, frozenset({reason}))
        for seed in range(6):
            junk = np.random.default_rng(seed).bytes(3000)
            yield Hostile(f"junk {seed} as {modality}", modality, junk, frozenset({reason, "no samples", "damaged"}))
        yield Hostile(f"nothing as {modality}", modality, b"", frozenset({"empty medium"}))


def absurd() -> Iterator[Hostile]:
    """Sizes and lengths that only a header has."""
    yield Hostile("1x1", "image", sample.encode_image(np.zeros((1, 1), np.uint8)), frozenset({"read"}))
    for size in ((30_000, 1), (1, 30_000)):
        yield Hostile(
            f"{size}", "image", sample.encode_image(np.zeros(size, np.uint8)), frozenset({"too long a shape"})
        )
    yield Hostile("PNG bomb", "image", png_claiming(60_000, 60_000), frozenset({"too many pixels"}))
    yield Hostile(
        "PNG of zeros", "image", sample.encode_image(np.zeros((4000, 4000), bool)), frozenset({"too many pixels"})
    )
    gif = bytearray(whole()["GIF"][1])
    gif[6:10] = b"\xff\xff\xff\xff"
    yield Hostile("GIF bomb", "image", bytes(gif), frozenset({"too many pixels"}))
    samples = 10 * 3600 * 16_000
    flac = bytearray(whole()["FLAC"][1])
    flac[21], flac[22:26] = flac[21] & 0xF0 | samples >> 32, struct.pack(">I", samples & 0xFFFFFFFF)
    yield Hostile("FLAC of 10 hours", "audio", bytes(flac), frozenset({"too long"}))
    wav = bytearray(whole()["WAV"][1])
    where = wav.index(b"data")
    wav[where + 4 : where + 8] = struct.pack("<I", samples * 2)
    yield Hostile("WAV of 10 hours", "audio", bytes(wav), frozenset({"truncated"}))
    yield Hostile(
        "not finite", "audio", sample.encode_sound(np.full(99, np.nan), subtype="FLOAT"), frozenset({"not finite"})
    )
    yield Hostile("no samples", "audio", sample.encode_sound(np.zeros(0, np.float32)), frozenset({"no samples"}))
    times = [0, 3_600_000]
    long = sample.encode_video(sample.clip(2), times=times)
    yield Hostile("two frames an hour apart", "video", long, frozenset({"too long"}))
    large = sample.encode_video(np.zeros((1, 1200, 1200, 3), np.uint8))
    yield Hostile("large frames", "video", large, frozenset({"too many pixels"}))
    still = sample.encode_video(sample.clip(1))
    yield Hostile("one frame", "video", still, frozenset({"read"}))
    mkv = whole()["MKV"][1]
    cluster = mkv.index(b"\x1f\x43\xb6\x75")  # a header that no frame follows
    yield Hostile("no frames", "video", unsized(mkv[:cluster]), frozenset({"no frames", "no video"}))


def png_claiming(width: int, height: int) -> bytes:
    content = bytearray(sample.encode_image(np.zeros((4, 4), np.uint8)))
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
    return bytes(content)


def unsized(matroska: bytes) -> bytes:
    """With the length of its segment unknown, as a recorder that was stopped leaves it."""
    where = matroska.index(b"\x18\x53\x80\x67") + 4
    return matroska[:where] + b"\x01" + b"\xff" * 7 + matroska[where + 8 :]


def hostile() -> list[Hostile]:
    return [*absurd(), *mislabelled(), *truncated(75), *spoiled(45), *spoiled_index(16)]


def target_of(modality: str, facts: dict[str, Any]) -> dict[str, Any]:
    if modality == "audio":
        return {"rate": 8000, "samples": round(facts["seconds"] * 8000)}
    if modality == "image":
        return {"width": 28, "height": 56}
    frames = sorted({round(place) for place in np.linspace(0, facts["frames"] - 1, 6)})
    return {"width": 28, "height": 56, "frames": frames, "fps": 2.0, "audio": None}


@pytest.fixture
async def pool() -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(2)
    yield pool
    await pool.close()


def reason_of(error: TaskError) -> str:
    refusal = codec.as_refusal(error)
    assert refusal.reason in codec.REASONS, str(error)
    assert len(refusal.detail) > 5, str(error)
    assert refusal.detail.isprintable(), str(error)
    return refusal.reason


async def outcome(pool: ProcessPool, case: Hostile, content: bytes | str) -> str:
    """ "read", or the reason of its refusal."""
    try:
        facts = await pool.run(codec.look, case.modality, content, MEDIA[case.modality], limits=LIMITS)
        target = target_of(case.modality, facts)
        limits = Limits(10.0, MEMORY_BYTES, result_bytes=codec.result_bytes(case.modality, target))
        packed = await pool.run(codec.decode, case.modality, content, {}, target, MEDIA[case.modality], limits=limits)
    except TaskError as error:
        return reason_of(error)
    arrays, _ = unpack_arrays(packed)
    assert (
        arrays[case.modality].shape
        == {
            "image": (56, 28, 3),
            "audio": (target.get("samples"),),
            "video": (len(target.get("frames", ())), 56, 28, 3),
        }[case.modality]
    )
    assert np.isfinite(arrays[case.modality]).all()
    return "read"


async def test_case_f9_two_hundred_hostile_media_end_as_facts_or_as_a_true_reason(
    pool: ProcessPool, tmp_path: Path
) -> None:
    cases = hostile()
    assert len(cases) >= 200
    before_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss

    async def check(number: int, case: Hostile) -> tuple[str, str]:
        content: bytes | str = case.content
        if number % 2:  # half of them as files, under a name of something else
            path = tmp_path / f"{number}{SUFFIXES[number // 2 % len(SUFFIXES)]}"
            path.write_bytes(case.content)
            content = str(path)
        return case.name, await outcome(pool, case, content)

    found = dict(await asyncio.gather(*(check(number, case) for number, case in enumerate(cases))))
    wrong = {case.name: found[case.name] for case in cases if found[case.name] not in case.reasons}
    assert not wrong
    assert "decoder failed" not in found.values(), [
        name for name, reason in found.items() if reason == "decoder failed"
    ]
    assert pool.crashed == 0
    assert Counter(found.values())["read"] < len(cases) / 3
    assert await pool.run(codec.look, "image", whole()["PNG"][1], {}, limits=LIMITS) == {"width": 96, "height": 72}
    await pool.close()
    after_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    own_kib = resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss  # what a process is as large as when it has just been forked
    assert after_kib <= max(
        before_kib, own_kib, (MEMORY_BYTES >> 10) + 300_000
    )  # beside the limit: libraries, which are shared


async def test_the_same_media_unspoiled_are_read(pool: ProcessPool) -> None:
    for name, (modality, content) in whole().items():
        assert await outcome(pool, Hostile(name, modality, content, frozenset()), content) == "read", name


async def test_importing_the_codecs_leaves_one_thread_and_no_model() -> None:
    """A worker forks only while it has one thread; what decodes untrusted bytes loads no torch."""
    pool = ProcessPool(1)
    try:
        facts = await pool.run(codec.look, "audio", whole()["WAV"][1], {}, limits=LIMITS)
        assert facts == {"samples": 24_000, "rate": 16_000, "seconds": 1.5}
        modules = set(await pool.run(eval, "list(__import__('sys').modules)", limits=LIMITS))
    finally:
        await pool.close()
    assert {"av", "soundfile", "PIL", "scipy", "numpy"} <= modules
    assert not {"torch", "transformers", "pydantic", "datasets"} & modules


async def test_a_refusal_is_found_again_in_the_error_of_the_pool(pool: ProcessPool, tmp_path: Path) -> None:
    """And isolation keeps the user's own files readable, private ones included."""
    private = tmp_path / "a: private.png"
    private.write_bytes(whole()["PNG"][1])
    private.chmod(0o600)
    assert await pool.run(codec.look, "image", str(private), {}, limits=LIMITS) == {"width": 96, "height": 72}
    for call, reason, detail in (
        (("image", b"", {}), "empty medium", "it has no bytes"),
        (("image", "/nowhere/a: b.png", {}), "missing medium", "there is no file /nowhere/a: b.png"),
        (("image", str(private), {"max_pixels": 5000}), "too many pixels", None),
        (("smell", b"x", {}), "decoder failed", "KeyError: 'smell'"),
    ):
        with pytest.raises(TaskError) as caught:
            await pool.run(codec.look, *call, limits=LIMITS)
        refusal = codec.as_refusal(caught.value)
        assert isinstance(refusal, Refusal)
        assert refusal.reason == reason
        assert detail is None or refusal.detail == detail


async def test_limits_of_the_process_are_reasons_too(pool: ProcessPool) -> None:
    large = sample.encode_image(np.zeros((6000, 6000, 3), np.uint8), compress_level=1)
    calls = {
        "takes too long": Limits(time_s=0.01, memory_bytes=1 << 30),
        "needs too much memory": Limits(time_s=20.0, memory_bytes=224 << 20),
        "decodes to too much": Limits(time_s=20.0, memory_bytes=1 << 30, result_bytes=1000),
    }
    for reason, limits in calls.items():
        with pytest.raises(LimitError) as caught:
            await pool.run(codec.decode, "image", large, {}, {"width": 100, "height": 100}, limits=limits)
        assert codec.as_refusal(caught.value).reason == reason
    assert pool.killed == 3


async def test_what_is_no_fault_of_a_medium_is_no_refusal() -> None:
    pool = ProcessPool()
    await pool.close()
    with pytest.raises(TaskError) as caught:
        await pool.run(codec.look, "image", b"", {}, limits=LIMITS)
    with pytest.raises(TaskError, match="pool is closed"):
        codec.as_refusal(caught.value)
    crash = TaskError("the process of look died without an answer (exit code -11; below 0: killed by that signal)")
    assert codec.as_refusal(crash).reason == "decoder crashed"
