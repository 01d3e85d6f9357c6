"""Where the media of records come from: the data sets they lie in, and the folders that their relative paths start from.

One for a run, filled when the sources are built; asked by `access` for what a record itself holds, and by `prepare` for the
place of a record. A record that was read a moment ago is not read again; any other is, and must be what it was.
"""

import glob
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from relax.data.config import SourceConfig
from relax.data.dataset import DataSet, Refusal
from relax.data.media.recent import Recent
from relax.data.media.reference import Held, RecordMedia, raw_medium

SCHEME = "record:"
_KEPT_BYTES = 64 << 20


@dataclass(frozen=True)
class _Origin:
    label: str
    config: SourceConfig
    dataset: DataSet

    @cached_property
    def home(self) -> Path:
        return source_home(self.config)


class Origins:
    """The sources of a run by name. `has_roots`: relative paths start at configured roots, not at the source's own folder."""

    def __init__(self, *, has_roots: bool = False, kept_bytes: int = _KEPT_BYTES) -> None:
        self._has_roots = has_roots
        self._kept_bytes = kept_bytes
        self._origins: dict[str, _Origin] = {}
        self._recent: Recent[list[Held]] = Recent(kept_bytes)

    def register(self, dataset: DataSet, config: SourceConfig) -> None:
        """Know a source before any of its records is read: a resumed run asks for media of prompts that it read before.

        Opens nothing.
        """
        self._origin(dataset, config)

    def reader(self, dataset: DataSet, config: SourceConfig, index: int) -> RecordMedia:
        """What makes the references of record `index` of a source; `keep` it when the record was read."""
        origin = self._origin(dataset, config)
        return RecordMedia(f"{SCHEME}{origin.label}/{index}", None if self._has_roots else origin.home)

    def keep(self, reader: RecordMedia) -> None:
        """Remember what a record holds, for the reader of its media who comes soon."""
        size = sum(_num_bytes(held) for held in reader.held)
        if reader.held and size <= self._kept_bytes and reader.origin not in self._recent:
            self._recent.put(reader.origin, reader.held, size)

    def medium(self, uri: str) -> Held:
        """The medium that `record:SOURCE/INDEX/N` names. Raises Refusal; DataError when its file changed under the run."""
        where, _, number = uri.rpartition("/")
        label, _, index = where.removeprefix(SCHEME).rpartition("/")
        origin = self._origins.get(label)
        if origin is None or not uri.startswith(SCHEME) or not (index.isdecimal() and number.isdecimal()):
            raise Refusal("missing medium", f"{uri!r} names no record of this run")
        recent = self._recent.get(where)
        if recent is not None and int(number) < len(recent):
            return recent[int(number)]
        if int(index) >= len(origin.dataset):
            raise Refusal("missing medium", f"source {label!r} has no record {index}")
        return raw_medium(origin.dataset.read(int(index)), origin.config, int(number))

    def homes(self, source: str | None = None) -> tuple[Path, ...]:
        """The folders of one source, or of all: those of their files, the working directory for a source that has none."""
        found = [origin.home for origin in self._origins.values() if source in (None, origin.config.name)]
        return tuple(dict.fromkeys(found)) or (Path.cwd(),)

    def location(self, source: str, index: int) -> str | None:
        """Where a person finds a record; None when that is not known."""
        named = [origin for origin in self._origins.values() if origin.config.name == source]
        return named[0].dataset.location(index) if len(named) == 1 else None

    def _origin(self, dataset: DataSet, config: SourceConfig) -> _Origin:
        """An evaluation may name its source as the training does: then a label tells them apart, unless they are the same."""
        number, label = 1, config.name
        while label in self._origins:
            if self._origins[label].dataset is dataset or self._origins[label].config == config:
                return self._origins[label]
            number += 1
            label = f"{config.name}~{number}"
        self._origins[label] = _Origin(label, config, dataset)
        return self._origins[label]


def source_home(config: SourceConfig) -> Path:
    """The absolute folder of a source's own files: of the file, the folder itself, or where a pattern begins."""
    given = getattr(config, "path", None)
    if not isinstance(given, str):
        return Path.cwd()
    path = Path(os.path.abspath(Path(given).expanduser()))
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    fixed = [part for part in path.parents if not glob.has_magic(str(part))]
    return fixed[0] if glob.has_magic(str(path)) and fixed else Path.cwd()


def _num_bytes(held: Held) -> int:
    if isinstance(held.value, bytes | str):
        return len(held.value)
    if held.form == "pil":
        width, height = held.value.size
        return int(width) * int(height) * 4
    return int(getattr(held.value, "nbytes", 0)) or 1 << 20
