"""Images: every mode by its exact pixels, upright, at the model's size, or refused with the reason."""

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from transformers.image_transforms import resize

from relax.core.media import pack_arrays, unpack_arrays
from relax.data.media.codec import BadMedium, decode, look
from tests.data import media_sample as sample

RGB = sample.picture(12, 8)
GREY = sample.picture(12, 8, channels=0)
ALPHA = np.concatenate([RGB, sample.picture(12, 8, channels=1, seed=1)], axis=2)


def read(content: bytes | str, packed: bool = False, **limits: Any) -> np.ndarray:
    """The image at its own size."""
    facts = look("image", content, limits, packed)
    arrays, _ = unpack_arrays(decode("image", content, {}, facts, limits, packed))
    assert set(arrays) == {"image"}
    assert arrays["image"].shape == (facts["height"], facts["width"], 3)
    assert arrays["image"].dtype == np.uint8
    return arrays["image"]


def refused(content: bytes | str, packed: bool = False, **limits: Any) -> BadMedium:
    with pytest.raises(BadMedium) as caught:
        read(content, packed, **limits)
    return caught.value


def grey(values: Any) -> np.ndarray:
    return np.repeat(np.asarray(values, np.uint8)[..., None], 3, axis=2)


def on_white(rgb: Any, alpha: Any) -> np.ndarray:
    """As exact as 8 bits are: PIL rounds each product."""
    share = np.asarray(alpha, np.float64)[..., None] / 255
    return np.rint(np.asarray(rgb) * share + 255 * (1 - share))


@pytest.mark.parametrize("format", ["PNG", "TIFF", "BMP", "PPM", "WEBP"])
def test_lossless_rgb_is_exact(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    assert np.array_equal(read(sample.encode_image(RGB, format, **options)), RGB)


@pytest.mark.parametrize("format", ["JPEG", "WEBP", "GIF", "AVIF", "JPEG2000"])
def test_lossy_formats_come_close(format: str) -> None:
    smooth = np.asarray(Image.fromarray(sample.picture(4, 4)).resize((64, 48), Image.Resampling.BICUBIC))
    assert np.abs(read(sample.encode_image(smooth, format)).astype(int) - smooth).mean() < 12


def mode_cases() -> dict[str, tuple[bytes, np.ndarray]]:
    bits = GREY > 127
    palette = Image.fromarray(RGB).quantize(16)
    wide = GREY.astype(np.uint16) * 257
    grey_alpha = np.stack([GREY, ALPHA[..., 3]], axis=2)
    floats = (GREY.astype(np.float32) / 255, GREY.astype(np.float32) - 0.25 * (GREY > 0))
    return {
        "1": (sample.encode_image(bits), grey(bits * 255)),
        "L": (sample.encode_image(GREY), grey(GREY)),
        "LA": (sample.encode_image(grey_alpha), on_white(grey(GREY), ALPHA[..., 3])),
        "P": (sample.encode_image(palette), np.asarray(palette.convert("RGB"))),
        "RGBA": (sample.encode_image(ALPHA), on_white(RGB, ALPHA[..., 3])),
        "CMYK": (
            sample.encode_image(Image.fromarray(RGB).convert("CMYK"), "TIFF"),
            np.asarray(Image.fromarray(RGB).convert("CMYK").convert("RGB")),
        ),
        "I;16": (sample.encode_image(wide), grey(GREY)),
        "I;16B": (
            sample.encode_image(Image.frombytes("I;16B", (12, 8), wide.astype(">u2").tobytes()), "TIFF"),
            grey(GREY),
        ),
        "I": (sample.encode_image(wide.astype(np.int32), "TIFF"), grey(GREY)),
        "I from PGM": (b"P5 12 8 65535\n" + wide.astype(">u2").tobytes(), grey(GREY)),
        "F of 0 to 1": (sample.encode_image(floats[0], "TIFF"), grey(GREY)),
        "F of 0 to 255": (sample.encode_image(floats[1], "TIFF"), grey(GREY)),
    }


@pytest.mark.parametrize("mode", mode_cases())
def test_case_f9_every_mode_is_read_by_its_own_scale(mode: str) -> None:
    content, expected = mode_cases()[mode]
    with Image.open(io.BytesIO(content)) as image:
        assert image.mode == mode.split()[0].replace("I;16B", image.mode)
    found = read(content)
    assert np.abs(found.astype(int) - expected).max() <= (1 if mode in ("RGBA", "LA") else 0)


def test_case_f9_other_colour_spaces_become_rgb() -> None:
    image = Image.fromarray(RGB).convert("YCbCr")
    assert np.array_equal(read(sample.encode_image(image, "TIFF")), np.asarray(image.convert("RGB")))
    lab = Image.merge("LAB", Image.fromarray(np.full((3, 4, 3), 128, np.uint8)).split())
    assert np.ptp(read(sample.encode_image(lab, "TIFF"))) < 8  # a grey


def test_what_a_palette_or_a_colour_makes_transparent_is_white() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert read(sample.encode_image(palette, transparency=0)).tolist() == [[[255] * 3, [40, 50, 60]]]
    two = np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)
    assert read(sample.encode_image(two, transparency=(1, 2, 3))).tolist() == [[[255] * 3, [4, 5, 6]]]
    wide = Image.fromarray(np.array([[300, 65535, 257]], np.uint16))
    assert read(sample.encode_image(wide, transparency=300))[0, :, 0].tolist() == [255, 255, 1]


def test_16_bits_are_rounded_not_cut() -> None:
    values = np.array([[0, 128, 129, 257, 65535, 65406]], np.uint16)
    assert read(sample.encode_image(values))[0, :, 0].tolist() == [0, 0, 1, 1, 255, 254]


@pytest.mark.parametrize(
    "values", [np.array([[70_000, 0]], np.int32), np.array([[-1, 5]], np.int32), np.array([[0, 300.0]], np.float32),
               np.array([[np.nan, 0]], np.float32), np.array([[-0.5, 0]], np.float32)]
)  # fmt: skip
def test_values_of_an_unknown_scale_are_refused(values: np.ndarray) -> None:
    assert refused(sample.encode_image(values, "TIFF")).reason == "unknown scale"


@pytest.mark.parametrize("format", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_case_f9_images_stand_upright_and_facts_are_of_that(format: str, orientation: int) -> None:
    quarters = np.zeros((32, 64, 3), np.uint8)  # only the top left is white
    quarters[:16, :32] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = read(sample.encode_image(quarters, format, exif=exif))
    assert found.shape == ((64, 32, 3) if orientation > 4 else (32, 64, 3))
    corners = {1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 0)}
    half = found.shape[0] // 2, found.shape[1] // 2
    means = [[found[y * half[0] :][: half[0], x * half[1] :][:, : half[1]].mean() for x in (0, 1)] for y in (0, 1)]
    assert np.unravel_index(np.argmax(means), (2, 2)) == corners[orientation]


def test_a_png_that_tells_its_orientation_behind_the_pixels_is_turned_too() -> None:
    content = sample.encode_image(RGB)
    tags = b"MM\x00*\x00\x00\x00\x08\x00\x01" + struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0) + bytes(4)
    end = content.rindex(b"IEND") - 4
    chunk = io.BytesIO()
    PngImagePlugin.putchunk(chunk, b"eXIf", tags)
    late = content[:end] + chunk.getvalue() + content[end:]
    assert look("image", late, {}) == {"width": 8, "height": 12}
    assert np.array_equal(read(late), np.rot90(RGB, -1))


def test_a_damaged_exif_turns_nothing() -> None:
    content = sample.encode_image(RGB, exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff\x01")
    assert np.array_equal(read(content), RGB)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(format: str) -> None:
    first, second = Image.new("RGB", (6, 4), (255, 0, 0)), Image.new("RGB", (6, 4), (0, 0, 255))
    options = {"lossless": True} if format == "WEBP" else {}
    content = sample.encode_image(first, format, save_all=True, append_images=[second], **options)
    with Image.open(io.BytesIO(content)) as image:
        assert image.n_frames == 2
    assert np.array_equal(read(content), np.asarray(first))


def test_pictures_of_a_phone_in_one_file_give_the_first() -> None:
    content = sample.encode_image(Image.fromarray(RGB), "MPO", save_all=True, append_images=[Image.new("RGB", (3, 3))])
    assert read(content).shape == RGB.shape


@pytest.mark.parametrize("size", [(5, 3), (24, 16), (1, 1), (28, 280), (12, 8)])
def test_resizing_is_what_transformers_does(size: tuple[int, int]) -> None:
    width, height = size
    target = {"width": width, "height": height}
    found = unpack_arrays(decode("image", sample.encode_image(RGB), {}, target))[0]["image"]
    assert np.array_equal(found, resize(RGB, (height, width), resample=Image.Resampling.BICUBIC))


def test_limits_apply_before_pixels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = sample.encode_image(np.zeros((30, 40), np.uint8))
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: pytest.fail("decoded"))
    for call in (
        lambda **limits: look("image", content, limits),
        lambda **limits: decode("image", content, {}, {"width": 1, "height": 1}, limits),
    ):
        with pytest.raises(BadMedium, match=r"too many pixels: .*1199"):
            call(max_pixels=1199)
        with pytest.raises(BadMedium, match="too large a medium"):
            call(max_bytes=len(content) - 1)
    assert look("image", content, {"max_pixels": 1200, "max_bytes": len(content)}) == {"width": 40, "height": 30}


def test_case_f9_shapes() -> None:
    assert read(sample.encode_image(np.full((1, 1, 3), 7, np.uint8)), max_aspect=200.0).tolist() == [[[7, 7, 7]]]
    long = sample.encode_image(np.zeros((30_000, 1), np.uint8))
    with pytest.raises(BadMedium, match="too long a shape: 1 x 30000, one side may be 200 times the other"):
        look("image", long, {"max_aspect": 200.0})
    assert refused(long, max_aspect=29_999.0).reason == "too long a shape"
    assert look("image", long, {"max_aspect": 30_000.0}) == {"width": 1, "height": 30_000}


def test_case_f9_a_bomb_is_refused_from_its_header() -> None:
    claims = bytearray(sample.encode_image(np.zeros((4, 4), np.uint8)))
    claims[16:24] = struct.pack(">II", 60_000, 60_000)
    claims[29:33] = struct.pack(">I", zlib.crc32(bytes(claims[12:29])))
    for limit in (64_000_000, 3_599_999_999):
        assert refused(bytes(claims), max_pixels=limit).reason == "too many pixels"
    gif = bytearray(sample.encode_image(np.zeros((4, 4), np.uint8), "GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    assert refused(bytes(gif), max_pixels=64_000_000).reason == "too many pixels"


@pytest.mark.parametrize("format", ["PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF", "PPM"])
def test_case_f9_an_image_that_ends_early_is_refused_never_filled(format: str) -> None:
    content = sample.encode_image(sample.picture(64, 48), format)
    for share in (0.3, 0.6, 0.9):
        assert refused(content[: int(len(content) * share)]).reason in ("truncated", "damaged")


def test_content_decides_whatever_a_file_is_called(tmp_path: Path) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(sample.encode_image(RGB))
    assert np.array_equal(read(str(path)), RGB)
    path = tmp_path / "picture.png"
    path.write_text("It says: <image>.")
    assert refused(str(path)).reason == "no image"
    assert "b'It says: <image>" in refused(str(path)).detail


def test_postscript_is_not_run() -> None:
    error = refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    assert error.reason == "no image"


def test_files_that_are_none(tmp_path: Path) -> None:
    assert refused(b"").reason == "empty medium"
    assert refused(str(tmp_path / "absent.png")).reason == "missing medium"
    assert refused(str(tmp_path)).reason == "not a file"
    assert refused("/dev/zero").reason == "not a file"
    assert refused("a\x00b").reason == "unreadable medium"
    os.mkfifo(tmp_path / "pipe")
    assert refused(str(tmp_path / "pipe")).reason == "not a file"


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (RGB, RGB),
        (GREY, grey(GREY)),
        (GREY[..., None], grey(GREY)),
        (GREY > 9, grey((GREY > 9) * 255)),
        (RGB.astype(np.uint16) * 257, RGB),
        (RGB.astype(np.int64), RGB),
        (RGB.astype(np.float64), RGB),
        (RGB.astype(np.float32) / 255, RGB),
    ],
)
def test_case_f8_arrays_are_read_by_their_type_and_range(array: np.ndarray, expected: np.ndarray) -> None:
    assert np.array_equal(read(pack_arrays({"image": array}), packed=True), expected)


def test_case_f8_arrays_that_are_no_image_are_refused() -> None:
    def reason(array: Any, name: str = "image", **limits: Any) -> str:
        return refused(pack_arrays({name: array}), packed=True, **limits).reason

    assert reason(np.zeros((3, 8, 12), np.uint8)) == "wrong array"  # channels first
    assert reason(np.zeros(5, np.uint8)) == "wrong array"
    assert reason(RGB, name="audio") == "wrong array"
    assert reason(np.zeros((4, 4), np.complex64)) == "wrong array"
    assert reason(np.zeros((0, 4), np.uint8)) == "empty medium"
    assert reason(RGB.astype(np.int32) + 1) == "unknown scale"
    assert reason(np.full((2, 2), np.nan)) == "unknown scale"
    assert reason(RGB, max_pixels=95) == "too many pixels"
    assert refused(b"no packed array", packed=True).reason == "damaged"
    assert np.abs(read(pack_arrays({"image": ALPHA}), packed=True) - on_white(RGB, ALPHA[..., 3])).max() <= 1
