"""This process's connection to Ray: a cluster of its own, or one that exists.

Opened by `ray` before the first host. An own cluster can be reached from this machine only, with a token, and dies with this process.
"""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray._private.ray_constants
import ray._private.worker

from relax.core.error import UserError
from relax.runtime.compute import ComputeThread
from relax.runtime.host import Home
from relax.runtime.place import VARIABLE, RunPlace

OBJECT_STORE_BYTES = 128 << 20
"""Of an own cluster: no bulk goes through it, and shared memory is wanted for weights."""

JOINED = {"RAY_USAGE_STATS_ENABLED": "0"}
"""Environment of this process while it is connected; how to authenticate is the user's to say (RAY_AUTH_MODE)."""
OWN = {
    **JOINED,
    # Any user of this machine can reach loopback.
    "RAY_AUTH_MODE": "token",
    # Ray 2.60 takes the machine's outer address for 127.0.0.1 and then listens on every interface, unless it is told that
    # there can be no cluster: then it listens on loopback alone (measured, SE1).
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Workers started before they are asked for lack the environment of a host, so none of them would be used.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}
"""The same for a cluster of its own; Ray's servers get it too."""


SERVERS = (ray._private.ray_constants.PROCESS_TYPE_GCS_SERVER, ray._private.ray_constants.PROCESS_TYPE_RAYLET)


class RayCluster:
    """This process's connection to Ray. Only one is open in a process at a time.

    Without an address it is a cluster of its own, on loopback, with a fresh token, its files in the run's folder; Ray's servers
    die with this process. Starting it takes a few seconds.
    """

    def __init__(self, place: RunPlace, address: str | None = None) -> None:
        self.place = place
        self.address = address
        self.node = ""
        self.home: Home | None = None
        """This node in a cluster that was joined; None where the cluster is its own, and on this machine."""
        self._thread: ComputeThread | None = None
        self._before: dict[str, str | None] = {}

    async def open(self, mark: str) -> "RayCluster":
        """Connect. `mark` is the value of RELAX_PLACE for the servers. Raises UserError when Ray cannot be reached or started."""
        if ray.is_initialized():
            raise UserError("this process is connected to a Ray cluster already; call ray.shutdown() first")
        self._set_environment({VARIABLE: mark, **(OWN if self.address is None else JOINED)})
        # The kernel kills Ray's servers when the thread that started them ends, so it must live as long as they are wanted.
        self._thread = ComputeThread("ray")
        try:
            await self._thread.run(self._connect)
        except Exception as error:
            await self.close()
            what = f"join the Ray cluster {self.address!r}" if self.address else "start a Ray cluster on this machine"
            raise UserError(f"cannot {what}: {error}; see runtime.address in the configuration") from error
        return self

    @property
    def dead_server(self) -> str:
        """Which of Ray's servers has ended without which no process can be started; empty while all live, or others see to them."""
        node = ray._private.worker._global_node
        dead = {name for name, _ in node.dead_processes()} if node is not None else set[str]()
        return next((name for name in SERVERS if name in dead), "")

    async def close(self) -> None:
        """Leave the cluster; an own one ends, with every actor. A second time does nothing."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        await thread.run(ray.shutdown)
        thread.close()
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    def _connect(self) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)
        # Ray prints what it thinks of each dead worker, whatever the log level; the supervisor says it better.
        ray._private.worker.print_to_stdstream = lambda *args, **kwargs: None
        # What Ray reads of the environment it read when it was imported.
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
        # A SIGTERM is the launcher's to handle (RR6): Ray would write stacks first.
        ray._private.ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
        own: dict[str, Any] = {}
        if self.address is None:
            own = {
                "num_cpus": os.cpu_count(),
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": str(self.place.ray_folder),
            }
        with _groups_of_their_own():
            ray.init(
                self.address or "local", log_to_driver=False, logging_level="error", configure_logging=False, **own
            )
        context = ray.get_runtime_context()
        joined = self.address is not None
        self.address, self.node = context.gcs_address, context.get_node_id()
        if joined:
            self.home = Home(self.node, _ip_of(self.node))

    def _set_environment(self, changes: dict[str, str]) -> None:
        if self.address is None and not os.environ.get("RAY_AUTH_TOKEN"):
            changes["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        self._before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)


@contextmanager
def _groups_of_their_own() -> Iterator[None]:
    """Servers that are started meanwhile are not in this process's group: what a terminal, `timeout` or a batch system sends to the
    whole group is the launcher's to handle, and it needs them until the run has stopped."""
    utils = ray._private.utils
    die_with_parent = utils.set_kill_on_parent_death_linux

    def leave_group() -> None:
        os.setpgid(0, 0)
        die_with_parent()

    utils.set_kill_on_parent_death_linux = leave_group  # called in the new process, before its program begins
    try:
        yield
    finally:
        utils.set_kill_on_parent_death_linux = die_with_parent


def _ip_of(node: str) -> str:
    return next(str(entry["NodeManagerAddress"]) for entry in ray.nodes() if entry["NodeID"] == node)
