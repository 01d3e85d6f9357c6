"""The `generator` data set: records made by a Python function `f(seed, **args)`.

The function is called once, with a seed derived from the run's seed and the source's name; what it yields is the data set, and
a record's index is its position. So every pass, and every resumed run, sees the same records (their order is the cursor's).
"""

import json
from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Any

from relax.config.table import load_object
from relax.core.error import DataError
from relax.core.message import Json
from relax.core.seed import derive_seed
from relax.data.config import GeneratorConfig

MAX_RECORDS = 10_000_000
"""An endless generator is reported instead of filling the memory."""


class GeneratorDataSet:
    """Built as `GeneratorDataSet(config, seed=...)`, `seed` being the run's."""

    def __init__(self, config: GeneratorConfig, *, seed: int = 0) -> None:
        self._config = config
        self._seed = derive_seed(seed, config.name, "generator")

    @cached_property
    def _records(self) -> list[Mapping[str, Json]]:
        config = self._config
        function = load_object(config.function)
        records: list[Mapping[str, Json]] = []
        try:
            for record in function(self._seed, **config.args):
                if len(records) == MAX_RECORDS:
                    raise DataError(f"yields more than {MAX_RECORDS} records; a generator must be finite")
                records.append(record)
        except Exception as error:  # the user's own code: whatever it raises is told with its source
            raise DataError(
                f"source {config.name!r}: {config.function}(seed, **{config.args!r}) failed:"
                f" {type(error).__name__}: {error}"
            ) from error
        return records

    def __len__(self) -> int:
        return len(self._records)

    @cached_property
    def digest(self) -> str:
        hasher = blake2b(digest_size=16)
        for record in self._records:
            hasher.update(json.dumps(record, default=_printed).encode() + b"\n")
        return hasher.hexdigest()

    def read(self, index: int) -> Json:
        return self._records[index]

    def location(self, index: int) -> str | None:
        return None


def _printed(value: Any) -> str:
    """What stands for a value that JSON has no form for: of bytes, arrays and images all of their content, and never an address."""
    name = type(value).__name__
    if isinstance(value, bytes | bytearray):
        return f"{name} {blake2b(value, digest_size=16).hexdigest()}"
    if hasattr(value, "tobytes") and (hasattr(value, "shape") or hasattr(value, "mode")):
        facts = (getattr(value, "mode", None) or str(value.dtype), getattr(value, "shape", None) or value.size)
        return f"{name} {facts} {blake2b(value.tobytes(), digest_size=16).hexdigest()}"
    return repr(value)
