"""Sample media made by code: images, sounds and videos as the bytes of files."""

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import soundfile
from PIL import Image

Frames = npt.NDArray[np.uint8]


def picture(width: int = 12, height: int = 8, channels: int = 3, seed: int = 0) -> Frames:
    """Noise, uint8 [height, width, channels], or [height, width] for no channels."""
    shape = (height, width, channels) if channels else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encode_image(image: Any, format: str = "PNG", **options: Any) -> bytes:
    """A PIL image or an array as a file."""
    buffer = io.BytesIO()
    made = image if isinstance(image, Image.Image) else Image.fromarray(image)
    made.save(buffer, format, **options)
    return buffer.getvalue()


def tone(samples: int, rate: int = 16_000, hertz: float = 440.0, channels: int = 1) -> npt.NDArray[np.float32]:
    """A sine of half scale, float32 [samples] or [samples, channels]; later channels are quieter."""
    wave = 0.5 * np.sin(2 * np.pi * hertz * np.arange(samples) / rate)
    if channels == 1:
        return wave.astype(np.float32)
    return np.stack([wave / (channel + 1) for channel in range(channels)], axis=1).astype(np.float32)


def encode_sound(wave: Any, rate: int = 16_000, format: str = "WAV", subtype: str | None = None) -> bytes:
    """Through libsndfile."""
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, rate, format=format, subtype=subtype)
    return buffer.getvalue()


def encode_sound_by_ffmpeg(wave: Any, rate: int, format: str, codec: str) -> bytes:
    """Through FFmpeg, for what libsndfile does not write, such as AAC in MP4; `wave` is float32 [samples]."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        _write_sound(container, stream, wave, rate)
    return buffer.getvalue()


def clip(frames: int = 10, width: int = 32, height: int = 16) -> Frames:
    """uint8 [frames, height, width, 3]: the first two channels of frame f are f * 5 throughout; the third is a ramp to the right."""
    video = np.zeros((frames, height, width, 3), np.uint8)
    video[..., 0] = video[..., 1] = (np.arange(frames) * 5 % 256)[:, None, None]
    video[..., 2] = (np.arange(width) * 255 // max(1, width - 1))[None, None, :]
    return video


def encode_video(
    frames: Frames,
    fps: Any = 10,
    *,
    format: str = "matroska",
    codec: str = "ffv1",
    pixels: str = "bgr0",
    gop: int = 5,
    rotation: int = 0,
    sound: Any = None,
    rate: int = 16_000,
    sound_codec: str = "pcm_s16le",
    times: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """A video file; FFV1 in Matroska gives the very pixels back. `rotation` in degrees counter-clockwise, `times` in milliseconds."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format) as container:
        stream = container.add_stream(codec, rate=Fraction(fps))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        stream.codec_context.gop_size = gop
        stream.codec_context.thread_count = 1
        stream.bit_rate = 4_000_000
        stream.options = options or {}
        if times is not None:
            stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        track = None
        if sound is not None:
            track = container.add_stream(sound_codec, rate=rate, layout="mono")
        for index, image in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[index], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if track is not None:
            _write_sound(container, track, sound, rate)
    return buffer.getvalue()


def _write_sound(container: Any, stream: Any, wave: Any, rate: int) -> None:
    size = stream.codec_context.frame_size or 1024
    resampler = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=rate)
    for start in range(0, len(wave), size):
        frame = av.AudioFrame.from_ndarray(wave[None, start : start + size], format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
        for converted in resampler.resample(frame):
            container.mux(stream.encode(converted))
    container.mux(stream.encode(None))
