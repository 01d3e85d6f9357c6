"""Videos: what FFmpeg reads, the chosen frames as RGB of 8 bits at the size that the model wants, and the sound beside them.

Called by `codec` inside a process of the pool. Frames are numbered in the order they are shown, counted in packets and not as the
header claims. Chosen ones are reached through keyframes; no more frames are held than were chosen, and two.
"""

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, BinaryIO

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import Interpolation, VideoReformatter

from relax.data.media import audio
from relax.data.media.content import BadMedium, blamed, check_end, open_container, read_packed
from relax.data.media.image import check_size, picture, resized, to_bytes

MAX_FPS = 1000.0
_EXACT = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.BITEXACT
"""Colours are converted the same on every processor."""
_SEEK_AHEAD_S = 1.0
"""A sound decoder is started this much early, so that it has settled where the wanted sound starts."""


@dataclass(frozen=True, slots=True)
class Index:
    """What the packets of a video say. `times` are the presentation times of its frames in units of `unit` seconds, ascending, and
    `keys` those of keyframes; both are empty where the container gives no usable times, and frames can only be counted. `sound_s` is
    when the first sound track starts and ends."""

    frames: int
    times: Sequence[int]
    keys: Sequence[int]
    unit: Fraction
    last_length: int
    sound_s: tuple[float, float] | None

    @property
    def start_s(self) -> float:
        return float(self.times[0] * self.unit) if self.times else 0.0


def look(stream: BinaryIO, limits: Mapping[str, Any], packed: bool) -> dict[str, Any]:
    """Size as shown, frames, frame rate, seconds, and the facts of the sound track (None without one). Raises BadMedium."""
    if packed:
        array, fps = _read_array(stream)
        frames, height, width = array.shape[:3]
        return _describe(width, height, frames, fps, frames / fps, None, limits)
    check_end(stream)
    with open_container(stream, "video") as container:
        track = _find_track(container, limits)
        with blamed("damaged", "its first frame cannot be decoded"):
            first = next(container.decode(track), None)
        if first is None:
            raise BadMedium("no frames", "not one frame can be decoded")
        width, height = (first.width, first.height) if _turns(first) % 2 == 0 else (first.height, first.width)
        rate = track.average_rate or track.guessed_rate
    with open_container(stream, "video") as container:
        index = _scan(container, _find_track(container, limits))
        fps, seconds = _pace(index, rate)
        sound = _sound_facts(container, index, limits)
    return _describe(width, height, index.frames, fps, seconds, sound, limits)


def _describe(
    width: int,
    height: int,
    frames: int,
    fps: float,
    seconds: float,
    sound: dict[str, Any] | None,
    limits: Mapping[str, Any],
) -> dict[str, Any]:
    check_size(width, height, limits)
    if not 0 < fps <= MAX_FPS:
        raise BadMedium("no frame rate", f"{fps:g} frames a second; more than 0 and at most {MAX_FPS:g} are read")
    start, end = limits.get("start") or 0.0, limits.get("end")
    taken = max(0.0, (seconds if end is None else min(seconds, end)) - start)
    if taken <= 0:
        raise BadMedium(
            "nothing left",
            f"the video has {seconds:.2f} s, start is {start:g} s{'' if end is None else f', end {end:g} s'}",
        )
    max_s = limits.get("max_s")
    if max_s is not None and taken > max_s:
        raise BadMedium("too long", f"{taken:.1f} s, at most {max_s:g} s are read")
    return {"width": width, "height": height, "frames": frames, "fps": fps, "seconds": seconds, "audio": sound}


def decode(
    stream: BinaryIO, options: Mapping[str, Any], target: Mapping[str, Any], limits: Mapping[str, Any], packed: bool
) -> dict[str, npt.NDArray[Any]]:
    """`video`: uint8 [F, H, W, 3], the target's frames at its size; `audio`: float32 [N] when the target has one. Raises BadMedium."""
    width, height, wanted = target["width"], target["height"], target["frames"]
    if not wanted or min(wanted) < 0:
        raise BadMedium("no frames", f"frames {wanted[:4]} were asked for")
    if packed:
        array, _ = _read_array(stream)
        _check_wanted(wanted, len(array))
        check_size(array.shape[2], array.shape[1], limits)
        scaled = to_bytes(array[wanted])
        return {"video": np.stack([resized(picture(frame), width, height) for frame in scaled])}
    check_end(stream)
    with open_container(stream, "video") as container:
        index = _scan(container, _find_track(container, limits))
    _check_wanted(wanted, index.frames)
    video = np.zeros((len(wanted), height, width, 3), np.uint8)
    places: dict[int, list[int]] = {}
    for place, number in enumerate(wanted):
        places.setdefault(number, []).append(place)
    convert = VideoReformatter()
    for number, frame in _frames(stream, index, sorted(places), limits):
        if frame.is_corrupt:
            raise BadMedium("damaged", f"frame {number} is decoded with errors")
        check_size(frame.width, frame.height, limits)
        with blamed("damaged", f"the colours of frame {number} cannot be converted"):
            rgb = convert.reformat(frame, format="rgb24", interpolation=_EXACT, threads=1).to_ndarray()
        video[places[number]] = resized(picture(np.rot90(rgb, _turns(frame))), width, height)
    sound = target.get("audio")
    return {"video": video} | ({"audio": _decode_sound(stream, index, options, sound)} if sound else {})


def _check_wanted(wanted: Sequence[int], frames: int) -> None:
    if max(wanted) >= frames:
        raise BadMedium("frames missing", f"frame {max(wanted)} is wanted, there are {frames}")


def _read_array(stream: BinaryIO) -> tuple[npt.NDArray[Any], float]:
    array, header = read_packed(stream, "video")
    if array.ndim != 4 or array.shape[3] not in (1, 2, 3, 4):
        raise BadMedium("wrong array", f"shape {list(array.shape)} is not [frames, height, width, 1 to 4]")
    fps = header.get("fps")
    if not isinstance(fps, int | float) or not 0 < fps <= MAX_FPS:
        raise BadMedium("no frame rate", f"an array of frames comes with an fps, found {fps!r}")
    return array, float(fps)


def _find_track(container: Any, limits: Mapping[str, Any]) -> Any:
    """The first video track that is no cover picture, its size checked before anything is decoded. Raises BadMedium."""
    cover = av.stream.Disposition.attached_pic
    tracks = [track for track in container.streams.video if not track.disposition & cover]
    if not tracks:
        raise BadMedium("no video", f"a file of format {container.format.name} without a video track")
    track = tracks[0]
    if track.codec_context is None:
        raise BadMedium("unknown codec", "nothing here decodes its video track")
    context = track.codec_context
    check_size(context.width, context.height, limits)
    context.thread_count = 1
    if limits.get("max_pixels") is not None:
        # For frames that grow within the stream; coded sizes are rounded up, so the exact limit is held on what comes out.
        context.options = {"max_pixels": str(2 * limits["max_pixels"] + (1 << 16))}
    return track


def _turns(frame: Any) -> int:
    """Quarter turns to the left that make the frame upright; other angles, and mirrors, are left as they are."""
    return (frame.rotation // 90) % 4 if frame.rotation % 90 == 0 else 0


# --- what the packets say --------------------------------------------------------------------------------------------


def _scan(container: Any, track: Any) -> Index:
    """Read every packet of the video and of the first sound track, decoding none. Raises BadMedium for a video without frames."""
    sounds = container.streams.audio[:1]
    shown: list[tuple[int | None, int, bool]] = []
    spans: list[tuple[float | None, float]] = []
    with blamed("damaged", "its packets cannot be read"):
        for packet in container.demux(track, *sounds):
            if packet.stream_index != track.index:
                spans.append(audio.packet_span(packet))
            elif packet.size > 0 and not packet.is_discard and (shown or packet.is_keyframe):
                shown.append((packet.pts, packet.duration or 0, packet.is_keyframe))
    if not shown:
        raise BadMedium("no frames", "there is not one keyframe")
    sound_s = audio.track_span(spans)
    times = [time for time, _, _ in shown if time is not None]
    if len(set(times)) != len(shown):
        return Index(len(shown), (), (), track.time_base, 0, sound_s)
    # Frames shown before the first keyframe lean on what is not there.
    timed = sorted((time, length, key) for time, length, key in shown if time is not None and time >= times[0])
    keys = [time for time, _, is_key in timed if is_key]
    return Index(len(timed), [time for time, _, _ in timed], keys, track.time_base, timed[-1][1], sound_s)


def _pace(index: Index, rate: Fraction | None) -> tuple[float, float]:
    """Frames a second, and seconds: by the header's rate where the times of the frames agree with it, else by the times."""
    span = index.times[-1] - index.times[0] if index.times else 0
    last = index.last_length or (span / (index.frames - 1) if index.frames > 1 else 0)
    measured = float((span + last) * index.unit)
    if rate and rate > 0:
        claimed = float(index.frames / rate)
        if measured <= 0 or abs(claimed - measured) <= max(1.5 / float(rate), 0.01 * measured):
            return float(rate), claimed
    if measured <= 0:
        raise BadMedium("no frame rate", "neither the header nor the times of its frames give one")
    return index.frames / measured, measured


def _sound_facts(container: Any, index: Index, limits: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of the first sound track, counted from the time of the first frame; None where it has none that lasts beyond that. A track
    that cannot be decoded is refused only when `limits` say that its `audio` is wanted."""
    if index.sound_s is None:
        return None
    try:
        rate = audio.find_track(container).codec_context.sample_rate
        samples = round((index.sound_s[1] - index.start_s) * rate)
        return audio.describe(rate, samples, {}) if samples > 0 else None
    except BadMedium:
        if limits.get("audio"):
            raise
        return None


# --- frames ----------------------------------------------------------------------------------------------------------


class _LostError(Exception):
    """Seeking did not lead where the index says; reading on from the start does."""


def _frames(
    stream: BinaryIO, index: Index, wanted: Sequence[int], limits: Mapping[str, Any]
) -> Iterator[tuple[int, Any]]:
    """The wanted frames (ascending numbers), each with its number. Raises BadMedium when one cannot be had."""
    if not index.times:
        yield from _counted(stream, wanted, limits)
        return
    done = 0
    try:
        for done, frame in enumerate(_timed(stream, index, wanted, limits, seek=True), 1):
            yield wanted[done - 1], frame
    except _LostError:
        rest = wanted[done:]
        try:
            yield from zip(rest, _timed(stream, index, rest, limits, seek=False), strict=True)
        except _LostError as error:
            raise BadMedium("frames missing", str(error)) from None


def _timed(
    stream: BinaryIO, index: Index, wanted: Sequence[int], limits: Mapping[str, Any], seek: bool
) -> Iterator[Any]:
    """For each wanted number the frame that is on show at its time: its own, or where a packet shows nothing of its own (a hidden
    reference, half of an interlaced frame) the one before it."""
    with open_container(stream, "video") as container:
        track = _find_track(container, limits)
        frames: Iterator[Any] = container.decode(track)
        before = current = None
        for number in wanted:
            time = index.times[number]
            key = index.keys[bisect.bisect_right(index.keys, time) - 1]
            if seek and (current is None or current.pts < key):
                before = current = None
                try:
                    container.seek(key, stream=track)
                except av.FFmpegError as error:
                    raise _LostError(f"no way to frame {number}: {error}") from error
                frames = container.decode(track)
            while current is None or current.pts < time:
                with blamed("damaged", f"decoding fails before frame {number}"):
                    following = next(frames, None)
                if following is None or following.pts is None:
                    raise _LostError(f"frame {number} of {index.frames} is promised, and decoding ends before it")
                before, current = current, following
            if current.pts > time and before is None:
                raise _LostError(f"frame {number} of {index.frames} is promised, and decoding starts behind it")
            yield current if current.pts == time else before


def _counted(stream: BinaryIO, wanted: Sequence[int], limits: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """For a video without times: decode from the start and count."""
    left = iter(wanted)
    number = next(left)
    with open_container(stream, "video") as container:
        frames = container.decode(_find_track(container, limits))
        for count in range(wanted[-1] + 1):
            with blamed("damaged", f"decoding fails at frame {count}"):
                frame = next(frames, None)
            if frame is None:
                raise BadMedium("frames missing", f"frame {number} is promised, decoding ends after {count}")
            if count == number:
                yield number, frame
                number = next(left, -1)


# --- the sound beside the frames -------------------------------------------------------------------------------------


def _decode_sound(stream: BinaryIO, index: Index, options: Mapping[str, Any], target: Mapping[str, Any]) -> audio.Wave:
    """float32 of the target's samples, second 0 being that of the first frame; before the track begins there is silence."""
    with open_container(stream, "video") as container:
        track = audio.find_track(container)
        rate = track.codec_context.sample_rate
        first, last = audio.trim_span(rate, options)
        last = min(last, first + math.ceil((target["samples"] / target["rate"] + 1) * rate))
        if first > 2 * _SEEK_AHEAD_S * rate:
            start_s = index.start_s + first / rate - _SEEK_AHEAD_S
            with blamed("damaged", f"no way to its sound {first / rate:.1f} s in"):
                container.seek(round(start_s / track.time_base), stream=track)
        kept: list[audio.Wave] = []
        where = None
        for time_s, block in audio.decode_track(container, track):
            if where is None:
                where = 0 if time_s is None else round((time_s - index.start_s) * rate)
                kept.append(np.zeros(max(0, min(where, last) - first), np.float32))
            kept.append(block[max(0, first - where) : max(0, last - where)])
            where += len(block)
            if where >= last:
                break
    wave = np.concatenate(kept) if kept else np.zeros(0, np.float32)
    if len(wave) == 0:
        raise BadMedium("nothing left", f"no sound from {first / rate:.2f} s on")
    return audio.fit(wave, rate, target, slack_s=audio.CODED_SLACK_S)
