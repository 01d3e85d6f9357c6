"""References to the media of a record: what the record says, made into `MediaPart`s without touching a file.

Called by `record` while it reads a record, and again by whoever needs what the record itself holds. The media in a record are
numbered as they are met, so that `record:SOURCE/INDEX/N` always means the same one. A form that is not listed here is refused.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, unquote

from relax.core.media import Modality
from relax.core.message import Json, MediaPart
from relax.data.config import SourceConfig
from relax.data.dataset import Refusal

Form: TypeAlias = Literal["bytes", "data_uri", "base64", "pil", "array"]

PART_TYPES: Mapping[str, Modality] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}
"""Types of parts that are media, under the names that data sets and chat protocols have for them."""
_FORMS = ("bytes", "array", "base64", "data", "url", "path")
"""Keys of a mapping that hold a medium. A path beside bytes or an array is only a name, as in Hugging Face features."""
_WORDS: Mapping[Modality, str] = {"image": "an image", "audio": "a sound", "video": "a video"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_BASE64 = re.compile(
    r"(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR|SUkqA|TU0AK|Qk[0-3][A-Za-z0-9+/]{5}AAAA|T2dnUw|ZkxhQw|SUQz|//uQ|GkXfo|AAAA[A-Za-z0-9+/]GZ0eX)"
    r"[A-Za-z0-9+/\s]*={0,2}\s*"
)
"""Text without a scheme is base64 when it starts as PNG, JPEG, GIF, RIFF, TIFF, BMP, Ogg, FLAC, MP3, Matroska or MP4 do, and
holds nothing that base64 has not; any other is a path."""
_LONGEST_PATH = 4096
_SHOWN_URI, _SHOWN_DATA = 200, 32
_MAX_RATE = 10_000_000
_MAX_DIMENSIONS = 5


@dataclass(frozen=True, slots=True)
class Held:
    """A medium that lies in the record itself. `rate` belongs to an array: samples of a sound, frames of a video, in a second."""

    modality: Modality
    form: Form
    value: Any
    rate: float | None = None


@dataclass
class RecordMedia:
    """Reads the media of one record. `home` is where relative paths start; None leaves that to the configured roots."""

    origin: str
    home: Path | None = None
    held: list[Held] = field(default_factory=list)
    """What the record itself holds, by number."""

    def lift(self, content: Any) -> Any:
        """A message list with a `MediaPart` in place of each part that is a medium; anything else stays what it is."""
        if not isinstance(content, list | tuple):
            return content
        return [self._lift_message(message) for message in content]

    def _lift_message(self, message: Any) -> Any:
        parts = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(parts, list | tuple):
            return message
        return {**message, "content": [self._lift_part(part) for part in parts]}

    def _lift_part(self, part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        kind = part.get("type")
        if isinstance(kind, str) and kind in PART_TYPES:
            return self._read_part(PART_TYPES[kind], part)
        # Columns give a text part the keys of its neighbours; a null there, or a struct of nulls, says nothing (case G3).
        return {key: item for key, item in part.items() if key not in PART_TYPES or not _is_nothing(item)}

    def _read_part(self, modality: Modality, part: Mapping[str, Any]) -> MediaPart:
        """A typed part; one that holds no medium (`uri` "") waits for the next of the list under `media_keys`."""
        given = {key: item for key, item in part.items() if key != "type" and not _is_nothing(item)}
        holders = [key for key in given if PART_TYPES.get(key) == modality]
        if not holders and not any(key in given for key in _FORMS):
            return MediaPart(modality, "", options=_read_options(modality, given))
        if not holders:
            return self.read(modality, given)
        if len(holders) > 1:
            raise Refusal("ambiguous medium", f"a part of type {part['type']!r} has {', '.join(map(repr, holders))}")
        content = given.pop(holders[0])
        if isinstance(content, Mapping):
            if any(PART_TYPES.get(str(key)) == modality for key in content):
                raise Refusal("mistyped medium", f"{holders[0]!r} holds a part within a part")
            twice = sorted(set(given) & set(content))
            if twice:
                raise Refusal("ambiguous medium", f"{', '.join(twice)}: beside {holders[0]!r} and in it")
            inner = self.read(modality, content)
            return MediaPart(modality, inner.uri, options={**inner.options, **_read_options(modality, given)})
        return MediaPart(modality, self._refer(modality, content), options=_read_options(modality, given))

    def read_list(self, modality: Modality, key: str, value: Any) -> list[MediaPart]:
        """The media under a key of `media_keys`; what is not a list is one medium, an absent or empty one none."""
        if _is_nothing(value):
            return []
        if hasattr(value, "dtype") and value.dtype == object:
            value = list(value)
        items = value if isinstance(value, list | tuple) else [value]
        parts = []
        for number, item in enumerate(items):
            try:
                parts.append(self.read(modality, item))
            except Refusal as refusal:
                raise Refusal(refusal.reason, f"{key!r}[{number}]: {refusal.detail}") from refusal
        return parts

    def read(self, modality: Modality, value: Any) -> MediaPart:
        """One medium in any form that is accepted. Raises Refusal."""
        if not isinstance(value, Mapping):
            return MediaPart(modality, self._refer(modality, value))
        given = {str(key): item for key, item in value.items() if not _is_nothing(item)}
        if any(PART_TYPES.get(key) == modality for key in given):
            return self._read_part(modality, {"type": modality, **given})
        forms = [form for form in _FORMS if form in given]
        if not forms:
            raise Refusal("missing medium", f"the {modality} is a mapping without any of {', '.join(_FORMS)}")
        if len(forms) > 1 and forms not in (["bytes", "path"], ["array", "path"]):
            raise Refusal("ambiguous medium", f"{', '.join(forms)} are all set; give one")
        content, rate = given[forms[0]], None
        for form in forms:
            del given[form]
        if forms[0] == "array":
            rate = _take_rate(modality, given)
        elif forms[0] in ("base64", "data"):
            given.pop("format", None)  # of a chat protocol: what the content is shows in the content
        return MediaPart(
            modality, self._refer(modality, content, forms[0], rate), options=_read_options(modality, given)
        )

    def _refer(self, modality: Modality, value: Any, form: str = "", rate: float | None = None) -> str:
        """The uri of one medium, given in form `form` ("": whatever its type says)."""
        if isinstance(value, PurePath):
            value = str(value)
        if isinstance(value, str) and form in ("base64", "data"):
            return self._hold(Held(modality, "data_uri" if value[:5].lower() == "data:" else "base64", value))
        if isinstance(value, str) and form in ("", "url", "path"):
            return self._refer_text(modality, value)
        if isinstance(value, bytes | bytearray | memoryview) and form in ("", "bytes", "data"):
            return self._hold(Held(modality, "bytes", bytes(value)))
        if form not in ("", "array"):
            raise Refusal("mistyped medium", f"{form!r} of the {modality} is a {type(value).__name__}")
        if value is None:
            raise Refusal("missing medium", f"there is null in place of {_WORDS[modality]}")
        if _is_picture(value) and modality == "image" and form == "":
            return self._hold(Held(modality, "pil", value))
        if hasattr(value, "__array__") or (isinstance(value, list | tuple) and _is_number(_first_leaf(value))):
            return self._hold(_held_array(modality, value, rate))
        raise Refusal(
            "mistyped medium",
            f"a {type(value).__name__} is not {_WORDS[modality]}; expected a path, a URL, bytes, base64, {{bytes, path}},"
            " an array with its rate, or (for an image) a PIL image",
        )

    def _refer_text(self, modality: Modality, text: str) -> str:
        _check_text(modality, text)
        if text[:5].lower() == "data:":
            return self._hold(Held(modality, "data_uri", text))
        if text[:5].lower() == "file:":
            return self._refer_path(modality, _file_url_path(text))
        url = _URL.match(text)
        if url is None:
            if _BASE64.fullmatch(text):
                return self._hold(Held(modality, "base64", text))
            return self._refer_path(modality, text)
        if url[1].lower() not in ("http", "https"):
            raise Refusal("unsupported URL", f"{text[:80]!r}: the scheme is none of data, file, http, https")
        return url[1].lower() + text[len(url[1]) :]

    def _refer_path(self, modality: Modality, path: str) -> str:
        _check_text(modality, path)
        if len(path) > _LONGEST_PATH:
            raise Refusal(
                "mistyped medium", f"text of {len(path)} characters is neither a path nor base64: {path[:40]!r}"
            )
        if path.startswith("/"):
            return file_uri("/" + path.lstrip("/"))
        return "file:" + quote(path) if self.home is None else file_uri(f"{self.home}/{path}")

    def _hold(self, held: Held) -> str:
        """The uri of what the record holds; the same bytes or text again are the same medium."""
        for number, other in enumerate(self.held):
            if held.form == other.form and isinstance(held.value, bytes | str) and held == other:
                return f"{self.origin}/{number}"
        self.held.append(held)
        return f"{self.origin}/{len(self.held) - 1}"


def read_media_lists(
    reader: RecordMedia, value: Mapping[str, Any], config: SourceConfig
) -> dict[Modality, list[MediaPart]]:
    """The media under the keys of `media_keys`, by modality."""
    return {modality: reader.read_list(modality, key, value.get(key)) for modality, key in config.media_keys.items()}


def message_keys(config: SourceConfig) -> tuple[str, ...]:
    """The keys of a record under which messages, and so media, may lie."""
    return tuple(dict.fromkeys((config.prompt_key, config.messages_key, *(config.preference or ()))))


def raw_media(value: Any, config: SourceConfig) -> list[Held]:
    """What a raw record holds itself, by the numbers that its references have. Raises Refusal."""
    if not isinstance(value, Mapping):
        raise Refusal("not a record", f"a {type(value).__name__} holds no media")
    reader = RecordMedia("")
    for key in message_keys(config):
        reader.lift(value.get(key))
    read_media_lists(reader, value, config)
    return reader.held


def raw_medium(value: Any, config: SourceConfig, number: int) -> Held:
    """Medium `number` of a raw record. Raises Refusal when it has none: it is not the record that the reference was made from."""
    held = raw_media(value, config)
    if not 0 <= number < len(held):
        raise Refusal("changed medium", f"the record holds {len(held)} media of its own, not one with number {number}")
    return held[number]


def file_uri(path: str) -> str:
    """`path`, which is absolute, as a URL."""
    return "file://" + quote(path)


def given_part(part: MediaPart) -> MediaPart:
    """The part with its options read as those of a record are: an environment makes parts too. Raises Refusal."""
    kind, uri, digest, options = _as_made(part)
    if not isinstance(kind, str) or kind not in _OPTIONS:
        raise Refusal("unsupported modality", f"a part of type {kind!r:.40}; it is one of {', '.join(_OPTIONS)}")
    for name, value in (("uri", uri), ("digest", digest)):
        if not isinstance(value, str):
            raise Refusal("mistyped medium", f"{name} of the {kind} is a {type(value).__name__}, expected text")
    _check_text(part.type, part.uri)
    if not isinstance(options, Mapping):
        found = type(options).__name__
        raise Refusal("mistyped media option", f"options of the {kind} are a {found}, expected a mapping")
    return replace(part, options=_read_options(part.type, options))


def _as_made(part: MediaPart) -> tuple[Any, Any, Any, Any]:
    """What it says, of whatever type its maker gave."""
    return part.type, part.uri, part.digest, part.options


def shown_uri(uri: str) -> str:
    """As much of it as a message has room for; the content of a data URI says nothing to a reader."""
    most = _SHOWN_DATA if uri[:5].lower() == "data:" else _SHOWN_URI
    return uri if len(uri) <= most else uri[:most] + "..."


def _is_nothing(value: Any) -> bool:
    """Null, a mapping of nulls (a struct that columns gave to a row without one), NaN, or an empty list."""
    if isinstance(value, Mapping):
        return all(item is None for item in value.values())
    return (
        value is None
        or (isinstance(value, float) and math.isnan(value))
        or (isinstance(value, list | tuple) and not value)
    )


def _check_text(modality: Modality, text: str) -> None:
    if not text.strip():
        raise Refusal("missing medium", f"the {modality} is an empty text")
    if "\0" in text:
        raise Refusal("mistyped medium", f"a NUL character in the path of the {modality}: {text[:80]!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal("unencodable text", f"half of a surrogate pair in {text[:80]!r}") from error


def _file_url_path(text: str) -> str:
    rest = text[5:]
    if not rest.startswith("//"):
        return unquote(rest)
    host, _, path = rest[2:].partition("/")
    if host.lower() not in ("", "localhost"):
        raise Refusal("unsupported URL", f"{text[:80]!r} names the host {host!r}; a file URL is file:///path")
    return "/" + unquote(path)


def _is_picture(value: Any) -> bool:
    """Whether it is a PIL image; told by its class, so that PIL need not be loaded."""
    return any(cls.__module__ == "PIL.Image" and cls.__name__ == "Image" for cls in type(value).__mro__)


def _first_leaf(value: Any) -> Any:
    for _ in range(_MAX_DIMENSIONS):
        if not isinstance(value, list | tuple) or not value:
            break
        value = value[0]
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _held_array(modality: Modality, value: Any, rate: float | None) -> Held:
    needed = {"audio": "sampling_rate", "video": "fps"}.get(modality)
    if needed and rate is None:
        raise Refusal(
            "mistyped medium", f"an array is not {_WORDS[modality]} without its rate; give {{array, {needed}}}"
        )
    return Held(modality, "array", value, rate)


def _take_rate(modality: Modality, given: dict[str, Any]) -> float | None:
    """The rate beside an array, taken out of `given`."""
    name = {"audio": "sampling_rate", "video": "fps"}.get(modality)
    if name is None or name not in given:
        return None
    rate = given.pop(name)
    if not _is_number(rate) or not 0 < rate <= _MAX_RATE:
        raise Refusal("mistyped medium", f"{name} of the {modality} is {rate!r}, expected a number above 0")
    return float(rate)


def _seconds(value: Any) -> Json:
    return float(value) if _is_number(value) and math.isfinite(value) and value >= 0 else None


def _positive(value: Any) -> Json:
    return float(value) if _is_number(value) and math.isfinite(value) and value > 0 else None


def _count(value: Any) -> Json:
    return int(value) if _is_number(value) and 0 < value < 2**53 and value == int(value) else None


def _flag(value: Any) -> Json:
    return value if isinstance(value, bool) else None


_TRIM: dict[str, tuple[Callable[[Any], Json], str]] = {
    "start": (_seconds, "seconds from 0"),
    "end": (_positive, "seconds above 0"),
}
_PIXELS: dict[str, tuple[Callable[[Any], Json], str]] = {"max_pixels": (_count, "a whole number above 0")}
_OPTIONS: Mapping[Modality, Mapping[str, tuple[Callable[[Any], Json], str]]] = {
    "image": _PIXELS,
    "audio": _TRIM,
    "video": {
        **_TRIM,
        **_PIXELS,
        "fps": (_positive, "a number above 0"),
        "min_frames": (_count, "a whole number above 0"),
        "max_frames": (_count, "a whole number above 0"),
        "audio": (_flag, "true or false"),
    },
}
"""What a part may say about its own decoding: how each value is read, and what is expected of it."""


def _read_options(modality: Modality, given: Mapping[str, Any]) -> dict[str, Json]:
    known = _OPTIONS[modality]
    if given.get("detail") == "auto":  # of a chat protocol, on images; it asks for nothing
        given = {key: value for key, value in given.items() if key != "detail"}
    unknown = sorted(str(key) for key in given if key not in known)
    if unknown:
        raise Refusal(
            "unknown media option", f"{', '.join(unknown)}; options of {_WORDS[modality]} are {', '.join(known)}"
        )
    options = {}
    for key, value in given.items():
        read, expected = known[key]
        options[key] = read(value)
        if options[key] is None:
            raise Refusal("mistyped media option", f"{key} of the {modality} is {value!r}, expected {expected}")
    if options.get("start", 0.0) >= options.get("end", math.inf):
        raise Refusal("mistyped media option", f"start {options['start']:g} s is not before end {options['end']:g} s")
    if options.get("min_frames", 0) > options.get("max_frames", math.inf):
        raise Refusal(
            "mistyped media option", f"min_frames {options['min_frames']} is above max_frames {options['max_frames']}"
        )
    return options
