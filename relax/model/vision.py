"""Pixels as Qwen's vision encoders read them: which size, which frames of a video, and the patches they are cut into.

Called by the families. Numbers are those of transformers' own processors, from metadata alone where no pixels are needed, so that
what is counted before decoding is what comes out after it (MM1).
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from relax.core.error import DataError
from relax.core.message import Json, MediaPart
from relax.model.processor import FrameSettings, PixelSettings

MAX_ASPECT = 200
"""Longest side over shortest, beyond which the processors refuse a picture."""

Floats = npt.NDArray[np.float32]


def fit_size(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """Height and width, multiples of `factor`, of `frames` pictures that have `min_pixels` to `max_pixels` together.

    The aspect ratio is kept as nearly as possible. `counted` is the number of frames that is held against the bounds. Raises
    DataError for a picture without pixels or beyond `MAX_ASPECT`.
    """
    if min(height, width) < 1 or max(height, width) > MAX_ASPECT * min(height, width):
        raise DataError(
            f"a picture of {width}x{height} has a side more than {MAX_ASPECT} times the other; crop it first"
        )
    fitted = round(height / factor) * factor, round(width / factor) * factor
    pixels = counted * fitted[0] * fitted[1]
    if pixels > max_pixels:
        shrink = math.sqrt((frames * height * width) / max_pixels)
        fitted = tuple(math.floor(side / shrink / factor) * factor for side in (height, width))  # type: ignore[assignment]
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        fitted = tuple(math.ceil(side * grow / factor) * factor for side in (height, width))  # type: ignore[assignment]
    return max(factor, fitted[0]), max(factor, fitted[1])


def image_size(part: MediaPart, settings: PixelSettings) -> tuple[int, int]:
    """Height and width that an image is resized to; its option `max_pixels` goes before the processor's."""
    most = int(part.options.get("max_pixels") or settings.max_pixels)
    height, width = int(part.facts["height"]), int(part.facts["width"])
    return fit_size(height, width, settings.factor, min(settings.min_pixels, most), most)


def clip_frames(part: MediaPart) -> tuple[int, int]:
    """The first frame of a video that its options `start` and `end` leave, and how many there are.

    Raises DataError when they leave none.
    """
    total, fps = int(part.facts["frames"]), frame_rate(part)
    start, end = part.options.get("start"), part.options.get("end")
    first = 0 if start is None else max(0, math.ceil(round(float(start) * fps, 6)))
    stop = total if end is None else min(total, math.ceil(round(float(end) * fps, 6)))
    if stop <= first:
        raise DataError(
            f"no frame of {part.uri!r} lies between start {start} and end {end}: it has {total} frames at {fps:g} a second"
        )
    return first, stop - first


def frame_rate(part: MediaPart) -> float:
    """Frames a second of the file. Raises DataError when its metadata have none."""
    fps = float(part.facts["fps"] or 0.0)
    if not math.isfinite(fps) or fps <= 0:
        raise DataError(f"video {part.uri!r} does not say how many frames a second it has")
    return fps


def wanted_rate(part: MediaPart, settings: FrameSettings) -> tuple[float, int, int]:
    """Frames a second, fewest and most frames to take, from a part's options or the processor."""
    options: Mapping[str, Json] = part.options
    fps = float(options.get("fps") or settings.fps)
    least, most = options.get("min_frames"), options.get("max_frames")
    if least is not None and most is not None and least > most:
        raise DataError(f"video {part.uri!r} is asked for min_frames {least} and max_frames {most}; lower the first")
    # What the part asks for moves the processor's other bound along.
    least = min(settings.min_frames, most or settings.min_frames) if least is None else int(least)
    most = max(settings.max_frames, least) if most is None else int(most)
    return fps, least, most


def spread_even(total: int, file_fps: float, fps: float, least: int, most: int, step: int) -> list[int]:
    """Frames at equal distances from the first on, a multiple of `step` of them (Qwen2-VL's processor)."""
    bounded = min(most, total) // step * step
    count = int(min(max(total / file_fps * fps, least), bounded) // step * step)
    if count == 0:
        return list(range(min(total, 1)))  # one frame stands for both of its patch
    return [index * total // count for index in range(count)]


def spread_ends(total: int, file_fps: float, fps: float, least: int, most: int) -> list[int]:
    """Frames at equal distances, the first and the last among them (Qwen3-VL's processor)."""
    count = min(max(int(total / file_fps * fps), least), most, total)
    frames: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return frames


def patch_table(settings: PixelSettings) -> Floats:
    """[3, 256]: what each value of each channel becomes, in the order of operations of transformers' PIL processors."""
    values = (np.arange(256).astype(np.float64) * settings.rescale_factor).astype(np.float32)
    mean, std = np.array(settings.mean, np.float32), np.array(settings.std, np.float32)
    table: Floats = ((values[:, None] - mean) / std).T
    return np.ascontiguousarray(table)


def cut_patches(pictures: npt.NDArray[np.uint8], table: Floats, settings: PixelSettings) -> tuple[Floats, list[int]]:
    """Patches [t * h * w, 3 * temporal * patch * patch] of uint8[F, H, W, 3], and the grid [t, h, w].

    The last frame is repeated until frames fill their last patch. Patches that are merged to one token lie side by side.
    """
    size, merge, depth = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    missing = -len(pictures) % depth
    pictures = np.concatenate([pictures, np.repeat(pictures[-1:], missing, axis=0)]) if missing else pictures
    frames, height, width, _ = pictures.shape
    grid = [frames // depth, height // size, width // size]
    values = np.stack([table[channel][pictures[..., channel]] for channel in range(3)], axis=1)
    shape = (grid[0], depth, 3, grid[1] // merge, merge, size, grid[2] // merge, merge, size)
    patches: Floats = values.reshape(shape).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(math.prod(grid), -1)
    return np.ascontiguousarray(patches), grid


def grid_of(frames: int, height: int, width: int, settings: PixelSettings) -> list[int]:
    """The grid [t, h, w] of patches that `cut_patches` cuts pictures of that size into."""
    return [-(-frames // settings.temporal_patch_size), height // settings.patch_size, width // settings.patch_size]


def grid_tokens(grid: Sequence[int], settings: PixelSettings) -> int:
    """Placeholders that a grid of patches takes."""
    return math.prod(grid) // settings.merge_size**2
