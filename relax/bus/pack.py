"""What a process puts, checked and laid out for its segment (TQ1, TQ6).

Owned by `RemoteQueue`. The rows of a role are alike: what a layout may be written on is found out once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relax.bus.cell import check
from relax.bus.layout import Layout, PackedRows, lay
from relax.bus.row import RowPut
from relax.bus.write import check_columns
from relax.core.column import Column
from relax.core.id import Table, table_of

_ARRAYS = {np.ndarray}


class Packer:
    """Checks puts against the columns. Whether arrays are right depends on the form of their layout and the table alone, unless a column
    fixes the size of an axis."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = columns
        self._accepted: set[tuple[str, Table]] = set()

    def pack(self, puts: Sequence[RowPut]) -> PackedRows:
        """The rows of a put, in its order; one that comes twice has the cells that came last. Raises InvariantError (TQ1, TQ6)."""
        laid = {put.id: self._lay(put) for put in puts}
        packed = PackedRows([put.id for put in puts], [], [])
        for row in packed.ids:
            layout, payloads = laid[row]
            packed.layouts.append(layout)
            packed.payloads.extend(payloads)
        return packed

    def _lay(self, put: RowPut) -> tuple[Layout, list[Any]]:
        cells, table = put.cells, table_of(put.id)
        is_plain = set(map(type, cells.values())) <= _ARRAYS
        if is_plain:
            laid = lay(cells)
            if (laid[0].form, table) in self._accepted:
                return laid
        check_columns(self._columns, put.id, cells)
        laid = lay({name: check(self._columns[name], value) for name, value in cells.items()})
        if is_plain and not any(size.isdecimal() for name in cells for size in self._columns[name].shape):
            self._accepted.add((laid[0].form, table))
        return laid
