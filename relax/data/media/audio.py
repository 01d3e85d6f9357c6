"""Sounds: what libsndfile reads, else FFmpeg, mixed to one channel, at the rate and of the length that the model wants.

Called by `codec` inside a process of the pool, and by `video` for the track of a film. Lengths are known from headers and packets
before anything is decoded; a sound whose decoding does not keep to its header is refused.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import av
import numpy as np
import numpy.typing as npt
import soundfile
from scipy.signal import resample_poly

from relax.data.media.content import BadMedium, blamed, check_end, open_container, read_packed

Wave = npt.NDArray[np.float32]

MAX_RATE = 768_000
MAX_CHANNELS = 64
_BLOCK_VALUES = 1 << 20
_UNKNOWN_SAMPLES = 1 << 62
CODED_SLACK_S = 0.1
"""How far the length of a sound that FFmpeg decodes may lie from what its packets say: encoders pad at both ends."""
_SHORTFALL = re.compile(r"^\s*(.*?)\s*: (\d+) \(should be (\d+)\)", re.MULTILINE)
"""How libsndfile notes in its log that a chunk is shorter than it says: name, declared bytes, bytes that are there."""


def look(stream: BinaryIO, limits: Mapping[str, Any], packed: bool) -> dict[str, Any]:
    """Rate, samples and seconds, from header or packets. Raises BadMedium."""
    if packed:
        wave, rate = _read_array(stream)
        return describe(rate, len(wave), limits)
    check_end(stream)
    sound = _open_sound(stream)
    if sound is not None:
        with sound:
            return describe(sound.samplerate, sound.frames, limits)
    with open_container(stream, "sound") as container:
        track = find_track(container)
        rate = track.codec_context.sample_rate
        with blamed("damaged", "its packets cannot be read"):
            spans = [packet_span(packet) for packet in container.demux(track)]
        return describe(rate, _samples(spans, rate), limits)


def describe(rate: int, samples: int, limits: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a sound. Raises BadMedium for one that is empty, too long, or has no sensible rate."""
    if not 1 <= rate <= MAX_RATE:
        raise BadMedium("no sample rate", f"{rate} samples a second; 1 to {MAX_RATE} are read")
    if samples < 1:
        raise BadMedium("no samples", "the sound has no samples, or only the beginning of a block of them")
    seconds = samples / rate
    max_s = limits.get("max_s")
    if max_s is not None and seconds > max_s:
        raise BadMedium("too long", f"{seconds:.1f} s, at most {max_s:g} s are read")
    return {"samples": samples, "rate": rate, "seconds": seconds}


def decode(
    stream: BinaryIO, options: Mapping[str, Any], target: Mapping[str, Any], limits: Mapping[str, Any], packed: bool
) -> dict[str, Wave]:
    """`audio`: float32 of the target's samples, at its rate; `options` may trim it by `start` and `end` (s). Raises BadMedium."""
    if packed:
        wave, rate = _read_array(stream)
        describe(rate, len(wave), limits)
        return {"audio": fit(_trim([wave], rate, options), rate, target, slack_s=0.0)}
    check_end(stream)
    sound = _open_sound(stream)
    if sound is not None:
        with sound:
            describe(sound.samplerate, sound.frames, limits)
            wave = _trim(_blocks(sound), sound.samplerate, options)
            return {"audio": fit(wave, sound.samplerate, target, slack_s=0.0)}
    with open_container(stream, "sound") as container:
        track = find_track(container)
        rate = track.codec_context.sample_rate
        wave = _trim((block for _, block in decode_track(container, track)), rate, options)
        return {"audio": fit(wave, rate, target, slack_s=CODED_SLACK_S)}


def _read_array(stream: BinaryIO) -> tuple[Wave, int]:
    array, header = read_packed(stream, "audio")
    rate = header.get("rate")
    if not isinstance(rate, int | float) or not float(rate).is_integer():
        raise BadMedium("no sample rate", f"an array of samples comes with a whole rate, found {rate!r}")
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] > MAX_CHANNELS):
        raise BadMedium(
            "wrong array", f"shape {list(array.shape)} is not [samples] or [samples, 1 to {MAX_CHANNELS} channels]"
        )
    if array.dtype in (np.int16, np.int32):
        array = array / np.float64(-np.iinfo(array.dtype).min)
    elif array.dtype == np.uint8:
        array = (array.astype(np.float64) - 128) / 128
    elif array.dtype.kind != "f":
        raise BadMedium(
            "wrong array", f"samples of type {array.dtype}; floats, int16, int32 and uint8 have a known scale"
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused for it
        return _mono(array.astype(np.float32)), int(rate)


def _open_sound(stream: BinaryIO) -> "soundfile.SoundFile | None":
    """The sound, if libsndfile knows its format and its length. Raises BadMedium when a chunk is shorter than it says."""
    stream.seek(0)
    try:
        sound = soundfile.SoundFile(stream)
    except (soundfile.LibsndfileError, TypeError):
        return None
    if sound.frames >= _UNKNOWN_SAMPLES:  # a FLAC stream whose writer could not seek back; FFmpeg counts its packets
        sound.close()
        return None
    for name, declared, there in _SHORTFALL.findall(sound.extra_info):
        slack = (
            1 if name.lower() in ("data", "ssnd", "data size") else 9
        )  # a pad byte; writers that count their own header
        if int(there) + slack < int(declared) < 0x7FFFFF00:  # above: a writer that could not know
            raise BadMedium("truncated", f"its {name} chunk has {there} bytes, and its header says {declared}")
    if sound.channels > MAX_CHANNELS:
        raise BadMedium("too many channels", f"{sound.channels}, at most {MAX_CHANNELS} are mixed")
    return sound


def _blocks(sound: "soundfile.SoundFile") -> Iterator[Wave]:
    """The samples as float32 [N]. Raises BadMedium where they end before the header says, or cannot be decoded."""
    count = 0
    while True:
        with blamed("damaged", f"its samples cannot be decoded after {count}"):
            block = sound.read(_BLOCK_VALUES // sound.channels, dtype="float32", always_2d=True)
        if len(block) == 0:
            break
        count += len(block)
        yield _mono(block)
    if count < sound.frames:
        raise BadMedium("truncated", f"its header says {sound.frames} samples, {count} are there")


def _mono(block: Wave) -> Wave:
    return block if block.ndim == 1 else block.mean(axis=1, dtype=np.float32)


def _trim(blocks: Iterable[Wave], rate: int, options: Mapping[str, Any]) -> Wave:
    """The samples from `start` to before `end` (seconds), decoding no further."""
    first, last = trim_span(rate, options)
    kept, where = [], 0
    for block in blocks:
        if where + len(block) > first:
            kept.append(block[max(0, first - where) : max(0, last - where)])
        where += len(block)
        if where >= last:
            break
    wave = np.concatenate(kept) if kept else np.zeros(0, np.float32)
    if len(wave) == 0:
        raise BadMedium("nothing left", f"{where / rate:.2f} s of sound, trimmed to start {first / rate:.2f} s in")
    return wave


def trim_span(rate: int, options: Mapping[str, Any]) -> tuple[int, int]:
    """First sample and the one behind the last, of a part's `start` and `end`."""
    start, end = options.get("start") or 0.0, options.get("end")
    if start < 0 or (end is not None and end <= start):
        raise BadMedium("nothing left", f"trimmed from {start} s to {end} s")
    return round(start * rate), (_UNKNOWN_SAMPLES if end is None else round(end * rate))


def fit(wave: Wave, rate: int, target: Mapping[str, Any], slack_s: float) -> Wave:
    """At the target's rate, of the target's samples. Rounding of times makes a sound a few samples longer or shorter than the
    target: those are cut, or filled with silence; a larger difference, or a sample that is no number, raises BadMedium."""
    if not np.isfinite(wave).all():
        raise BadMedium("not finite", f"{np.count_nonzero(~np.isfinite(wave))} samples are NaN or infinite")
    wanted_rate, samples = target["rate"], target["samples"]
    if rate != wanted_rate:
        common = math.gcd(rate, wanted_rate)
        wave = resample_poly(wave, wanted_rate // common, rate // common).astype(np.float32, copy=False)
    slack = 2 + math.ceil(wanted_rate / rate) + math.ceil(slack_s * wanted_rate)
    if abs(len(wave) - samples) > slack:
        raise BadMedium(
            "not as long as it says",
            f"decoding gives {len(wave)} samples at {wanted_rate} Hz, its header promises {samples}",
        )
    if len(wave) < samples:
        wave = np.pad(wave, (0, samples - len(wave)))
    return np.ascontiguousarray(wave[:samples])


# --- tracks of FFmpeg containers -------------------------------------------------------------------------------------


def find_track(container: Any) -> Any:
    """The first sound track. Raises BadMedium where there is none that can be decoded."""
    if not container.streams.audio:
        raise BadMedium("no sound", f"a file of format {container.format.name} without a sound track")
    track = container.streams.audio[0]
    if track.codec_context is None:
        raise BadMedium("unknown codec", "nothing here decodes its sound track")
    if not 1 <= track.codec_context.channels <= MAX_CHANNELS:
        raise BadMedium("too many channels", f"{track.codec_context.channels}; 1 to {MAX_CHANNELS} are mixed")
    return track


def packet_span(packet: Any) -> tuple[float | None, float]:
    """Start (None where it has none) and length of what a packet shows, in seconds; what is marked as discarded has no length."""
    if packet.size == 0 or packet.is_discard:
        return None, 0.0
    unit = packet.time_base
    return None if packet.pts is None else float(packet.pts * unit), float((packet.duration or 0) * unit)


def track_span(spans: list[tuple[float | None, float]]) -> tuple[float, float] | None:
    """First and last moment (s) of a track's packets; None where they have no times. What lies before 0 is an encoder's run-up,
    which decoders drop. Packets without lengths last as long as they lie apart."""
    starts = [start for start, _ in spans if start is not None]
    if not starts:
        return None
    end = max(start + length for start, length in spans if start is not None)
    if end == max(starts) and len(starts) > 1:
        end += (end - min(starts)) / (len(starts) - 1)
    return max(0.0, min(starts)), end


def _samples(spans: list[tuple[float | None, float]], rate: int) -> int:
    """By the times of packets where they have some: their lengths may each be rounded."""
    span = track_span(spans)
    return round((sum(length for _, length in spans) if span is None else span[1] - span[0]) * rate)


def decode_track(container: Any, track: Any) -> Iterator[tuple[float | None, Wave]]:
    """The time (s) and mono samples of each decoded frame. Raises BadMedium."""
    planar = av.AudioResampler(format="fltp")
    track.codec_context.thread_count = 1
    frames = container.decode(track)
    while True:
        with blamed("damaged", "its sound cannot be decoded"):
            frame = next(frames, None)
            converted = planar.resample(frame) if frame is not None else []
            blocks = [one.to_ndarray().mean(axis=0, dtype=np.float32) for one in converted]
        if frame is None:
            return
        if frame.sample_rate != track.codec_context.sample_rate:
            raise BadMedium("damaged", f"its rate changes to {frame.sample_rate} within the sound")
        yield (None if frame.pts is None else float(frame.pts * frame.time_base)), np.concatenate(blocks)
