"""Rows of Arrow tables as raw records, for the data sets that are stored as columns.

Used by `ParquetDataSet` and `HuggingFaceDataSet`. A table has one schema for all its rows: it gives every record the keys of
all records, with null where a record had none. Those nulls are taken out again, so that a record is what it was before it was
stored in columns (case G3).
"""

from collections.abc import Sequence

import pyarrow as pa

from relax.config.suggestion import closest
from relax.core.error import DataError
from relax.core.message import Json
from relax.data.config import ColumnarConfig
from relax.data.dataset import Refusal


def read_row(table: pa.Table, index: int) -> dict[str, Json]:
    """One row as a mapping without the nulls of its structs. Raises Refusal when a value has no Python form."""
    try:
        [row] = table.slice(index, 1).to_pylist(maps_as_pydicts="strict")
    except (ValueError, KeyError, OverflowError) as error:  # bytes that are no UTF-8, a map with one key twice, a date
        raise Refusal("unreadable value", f"{type(error).__name__}: {error}") from error
    return {key: _without_nulls(value) for key, value in row.items() if value is not None}


def _without_nulls(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def columns_to_read(config: ColumnarConfig, names: Sequence[str], where: str) -> list[str]:
    """Which columns of a table with these `names` the source reads, in the table's order.

    Raises DataError for a column that the source needs and the table has not; an empty table may have none at all.
    """
    prompts = (config.prompt_key, config.messages_key)
    needed = [*config.reference_columns, *(config.columns or ())]
    missing = [name for name in needed if name not in names]
    if not set(prompts) & set(names):
        missing.insert(0, prompts[0])
    if missing:
        hints = [near for name in missing if (near := closest(name, names)) is not None]
        raise DataError(
            f"source {config.name!r}: {where} has no column {', '.join(map(repr, missing))}; it has"
            f" {', '.join(names) or 'none'}{f' (did you mean {hints[0]!r}?)' if hints else ''};"
            " name its columns with prompt_key, messages_key, reference_key or fields"
        )
    if config.columns is None:
        return list(names)
    wanted = {*prompts, *needed, *config.media_keys.values(), config.metadata_key}
    return [name for name in names if name in wanted]
