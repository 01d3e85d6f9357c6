"""The table of weight transports, and which one fits where two processes are placed.

Called by services when a run is built. Each transport is a WeightWriter, a WeightReader, or one class that is both; the broadcast has
no writer of its own, it sends what another one published.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax.config.table import load_object
from relax.core.error import UserError
from relax.core.protocol import Compute

if TYPE_CHECKING:
    from relax.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class Transport:
    """Import paths, and how far it reaches: inside one process, one node, or anywhere."""

    writer: str | None
    reader: str
    reach: str


REACH = ("process", "node", "anywhere")
TRANSPORTS: Mapping[str, Transport] = {
    "memory": Transport("relax.weights.store:WeightStore", "relax.weights.store:WeightStore", "process"),
    "shared": Transport("relax.weights.shared:SharedWriter", "relax.weights.shared:SharedReader", "node"),
    "disk": Transport("relax.weights.disk:DiskWriter", "relax.weights.disk:DiskReader", "anywhere"),
    "broadcast": Transport(None, "relax.weights.broadcast:BroadcastReader", "anywhere"),
}
"""`auto` takes the first that reaches far enough: a broadcast, whose ports ask nobody for a secret (SE1), only when it is asked for."""


def choose_transport(name: str = "auto", *, same_process: bool, same_node: bool) -> str:
    """The transport between a trainer and an engine, by their placement. Raises UserError for one that does not reach."""
    needed = "process" if same_process else "node" if same_node else "anywhere"
    reaching = [key for key, value in TRANSPORTS.items() if REACH.index(value.reach) >= REACH.index(needed)]
    if name == "auto":
        return reaching[0]
    if name not in TRANSPORTS:
        raise UserError(f"weights.transport {name!r} is not known; use auto or one of {', '.join(TRANSPORTS)}")
    if name not in reaching:
        where = "in another process" if same_node else "on another node"
        raise UserError(
            f"weights.transport is {name}, but an engine is {where} than the trainer; use auto or {', '.join(reaching)}"
        )
    return name


def build_transport(
    name: str = "auto", keep: int = 2, dtype: str | None = None, compute: Compute | None = None
) -> "WeightStore":
    """The transport inside one process, writer and reader in one.

    Raises UserError for an unknown name, and for one that is of use between processes only.
    """
    chosen = choose_transport(name, same_process=True, same_node=True)
    if chosen != "memory":
        raise UserError(
            f"weights.transport is {chosen}, but trainer and engines share a process; use auto or memory, or runtime.type=ray"
        )
    store: WeightStore = load_object(TRANSPORTS[chosen].reader)(keep=keep, dtype=dtype, compute=compute)
    return store
