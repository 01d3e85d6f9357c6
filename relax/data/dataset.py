"""A data set: a finite, ordered sequence of raw records that can be read by index.

The components of `relax.data.table` are data sets; `PromptStream` walks them. A data set knows nothing of prompts: it hands
out what lies in it, and `relax.data.record` judges that.
"""

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from relax.core.error import DataError
from relax.core.message import Json


class Refusal(DataError):
    """One record that cannot be used. `reason` is its kind, by which refusals are counted; `detail` says what was found."""

    def __init__(self, reason: str, detail: str, excerpt: str | None = None) -> None:
        self.reason = reason
        self.detail = detail
        self.excerpt = excerpt
        super().__init__(f"{reason}: {detail}")


class DataSet(Protocol):
    """Built as `component(config_node, seed=...)`; nothing is opened before the first use."""

    def __len__(self) -> int:
        """The number of records, usable or not. Raises DataError when the data set cannot be opened."""
        ...

    @property
    def digest(self) -> str:
        """A digest of the whole content: two data sets with one digest hold the same records in the same places."""
        ...

    def read(self, index: int) -> Json:
        """The record at `index`, normally a mapping. Raises Refusal when it cannot be read."""
        ...

    def location(self, index: int) -> str | None:
        """Where a person finds the record, e.g. `train.jsonl:17`; None when it lies nowhere."""
        ...


@runtime_checkable
class OrderedDataSet(Protocol):
    """A data set that is slow to read in any order, and so has an order of its own for shuffling."""

    def order(self, seed: int) -> npt.NDArray[np.int64]:
        """A permutation of the records that is quick to read; it depends on the content and the seed alone."""
        ...
