"""The ends of the weight transport that the processes of a run get, by where each is (`reach`) and by `weights.transport`.

A trainer on the controller's node writes into its memory, elsewhere to the disk. Engines there map what lies in memory; what others
ask for the controller copies to the disk, once.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from relax.config.table import load_object
from relax.core.error import UserError
from relax.core.protocol import WeightReader
from relax.runtime.place import RunPlace
from relax.services.directory import RunDirectory
from relax.services.remote.reach import ip_in
from relax.weights.broadcast import BroadcastReader, BroadcastSource
from relax.weights.catalog import Catalog
from relax.weights.mirror import Mirror, MirrorReader
from relax.weights.service import CatalogService
from relax.weights.transport import TRANSPORTS, choose_transport
from relax.weights.writer import FolderWriter

if TYPE_CHECKING:
    from relax.config.section import WeightsSection
    from relax.services.remote.host import Host

LOOPBACK = "127.0.0.1"


def shared_folder(place: RunPlace) -> Path:
    """Where versions lie in the memory of the controller's node."""
    return place.shm_folder / "weights"


class WeightDesk:
    """The controller's part: catalog, mirror, and the source of broadcasts. `targets` are to be served."""

    def __init__(self, section: "WeightsSection", place: RunPlace, directory: RunDirectory, control: str) -> None:
        near, far = shared_folder(place), directory.weights
        self.mirror = Mirror(near, far)
        self.catalog = CatalogService(Catalog(section.keep), self.mirror)
        reader = MirrorReader(near, far, self.catalog, self.mirror, "broadcast")
        self.source = BroadcastSource(reader, ip_in(control) or LOOPBACK, section.bucket_bytes)

    @property
    def targets(self) -> dict[str, object]:
        return {"mirror": self.mirror, "broadcast": self.source}

    async def close(self) -> None:
        await self.source.close()


def weight_writer(host: "Host") -> FolderWriter:
    """The trainer's end. Raises UserError for a transport that does not reach."""
    name = _chosen(host)
    if name == "broadcast":  # it sends what another one published
        name = "shared" if host.reach.is_near else "disk"
    folders = {"shared": shared_folder(host.place), "disk": host.directory.weights}
    make: Callable[..., FolderWriter] = load_object(str(TRANSPORTS[name].writer))
    catalog = host.client.proxy("weights")
    writer = make(folders[name], catalog, host.config.model.dtype, host.assembly.compute("weights"))
    host.transfers.append(writer.counters)
    return writer


def weight_reader(host: "Host") -> WeightReader:
    """An engine's end. Raises UserError for a transport that does not reach."""
    name, client = _chosen(host), host.client
    if name == "broadcast":
        return BroadcastReader(client.proxy("broadcast"), host.spec.host, host.reach.ip or LOOPBACK)
    near = shared_folder(host.place) if name == "shared" else None
    return MirrorReader(near, host.directory.weights, client.proxy("weights"), client.proxy("mirror"), host.spec.host)


def _chosen(host: "Host") -> str:
    try:
        return choose_transport(host.config.weights.transport, same_process=False, same_node=host.reach.is_near)
    except UserError as error:
        raise UserError(
            f"host {host.spec.host}, {'near' if host.reach.is_near else 'away from'} the controller: {error}"
        ) from error
