"""The `datasets` data set: what the Hugging Face `datasets` library saved, or can load.

Rows are taken from its memory-mapped Arrow tables as they are: nothing is decoded, so media columns stay bytes and paths. The
digest is that of the rows, whatever files they came from.
"""

import re
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from relax.core.error import DataError
from relax.core.message import Json
from relax.data.arrow import columns_to_read, read_row
from relax.data.config import DatasetsConfig

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SAVED = ("state.json", "dataset_dict.json")
"""Either marks a folder that `save_to_disk` wrote."""
_DIGEST_ROWS = 1000


class HuggingFaceDataSet:
    """Built as `HuggingFaceDataSet(config, seed=...)`; the seed is not used."""

    def __init__(self, config: DatasetsConfig, *, seed: int = 0) -> None:
        self._config = config

    @cached_property
    def _rows(self) -> Any:
        """The `datasets.Dataset`, giving Arrow tables."""
        found = _choose_split(_load(self._config), self._config)
        columns = columns_to_read(self._config, found.column_names, repr(self._config.path))
        return found.select_columns(columns).with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def digest(self) -> str:
        hasher = blake2b(digest_size=16)
        for table in self._rows.iter(batch_size=_DIGEST_ROWS):
            # Taken anew, the rows lie alike in memory whatever they were cut from.
            rows = table.replace_schema_metadata(None).take(pa.array(range(len(table)))).combine_chunks()
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema) as writer:
                writer.write_table(rows)
            hasher.update(sink.getvalue())
        return hasher.hexdigest()

    def read(self, index: int) -> Json:
        return read_row(self._rows[index], 0)

    def location(self, index: int) -> str | None:
        return f"row {index}"


def _load(config: DatasetsConfig) -> Any:
    """A Dataset or DatasetDict. Raises DataError, whatever the library raises."""
    datasets.disable_progress_bars()  # the console has one writer
    path = Path(config.path).expanduser()
    if not path.exists() and not _HUB_NAME.fullmatch(config.path):
        raise DataError(
            f"source {config.name!r}: there is no file or folder {config.path!r}; check the source's `path` (it is relative"
            " to the working directory)"
        )
    try:
        return _read(path, config)
    except Exception as error:  # the library's readers raise anything, each in its own way
        cause = "" if error.__cause__ is None else f" ({error.__cause__})"
        next_action = (
            "mend it, or give a folder that `save_to_disk` wrote, or a folder or file that `datasets.load_dataset` reads"
            if path.exists()
            else "there is no such folder here, and the hub cannot be reached or has no such data set: check the name, or"
            " save it with `save_to_disk` where the hub can be reached, and give that folder"
        )
        raise DataError(
            f"source {config.name!r}: cannot load {config.path!r}: {type(error).__name__}: {error}{cause}; {next_action}"
        ) from error


def _read(path: Path, config: DatasetsConfig) -> Any:
    if any((path / name).is_file() for name in _SAVED):
        return datasets.load_from_disk(str(path))
    if path.is_file():
        return datasets.load_dataset(str(path.parent), data_files=[path.name])
    if path.is_dir():
        files = None if config.data_files is None else list(config.data_files)
        return datasets.load_dataset(str(path), config.subset, data_files=files)
    return datasets.load_dataset(config.path, config.subset, revision=config.revision)


def _choose_split(loaded: Any, config: DatasetsConfig) -> Any:
    if not isinstance(loaded, dict):
        if config.split is None or config.split == str(loaded.split):
            return loaded
        raise DataError(f"source {config.name!r}: {config.path!r} is one data set without splits; leave out `split`")
    names = [str(name) for name in loaded]
    if config.split is None and len(names) == 1:
        return loaded[names[0]]
    if config.split not in names:
        asked = "no `split` is given" if config.split is None else f"there is no split {config.split!r}"
        raise DataError(f"source {config.name!r}: {asked}; {config.path!r} has the splits {', '.join(names)}")
    return loaded[config.split]
