"""The table of weight transports: how versions travel from trainer to engines.

Called by services when a run is built. A transport is one file with a class that is WeightWriter and WeightReader.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from relax.config.table import load_object
from relax.core.error import UserError
from relax.core.protocol import Compute

if TYPE_CHECKING:
    from relax.weights.store import WeightStore

TRANSPORTS: Mapping[str, str] = {"memory": "relax.weights.store:WeightStore"}
"""Transport name -> class. `auto` chooses among them."""


def build_transport(
    name: str = "auto", keep: int = 2, dtype: str | None = None, compute: Compute | None = None
) -> "WeightStore":
    """The transport called `name`; `auto` is `memory`, the one that fits trainer and engines in one process.

    Raises UserError for an unknown name.
    """
    chosen = "memory" if name == "auto" else name
    if chosen not in TRANSPORTS:
        raise UserError(f"weights.transport {name!r} is not known; use auto or one of {', '.join(TRANSPORTS)}")
    store: WeightStore = load_object(TRANSPORTS[chosen])(keep=keep, dtype=dtype, compute=compute)
    return store
