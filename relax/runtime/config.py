"""Configuration of runtimes. Loads without torch."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, StringConstraints

from relax.config.base import Config, Violation, rule
from relax.runtime.device_config import DeviceConfig

HostName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=32)]
"""Letters, digits, `_` and `-`: it names a process, a log file and a socket."""


class LocalConfig(DeviceConfig):
    """Every role in this process."""

    type: Literal["local"] = "local"
    strict: bool = False
    """Copy and freeze every argument and result of a call, and deliver calls in a seeded order: for tests."""
    threads_per_role: int = Field(default=1, ge=1)
    """Intra-op threads of each compute thread."""
    pool_processes: int = Field(default=2, ge=1)
    """Processes for rewards and tools that run untrusted or heavy code; with two, one slow call does not hold up all others."""
    unsafe_pool_without_isolation: bool = False
    """Run such code without namespaces where the machine grants none: it can then reach the network and this user's processes."""


class HostConfig(Config):
    """Roles that share one process."""

    name: HostName
    """Name of the process in logs and on status pages."""
    roles: Annotated[tuple[str, ...], Field(min_length=1)]
    """The roles that it carries."""


class RoleResources(Config):
    """What the process of a role asks the cluster for."""

    cpus: NonNegativeFloat = 0.0
    """CPUs that Ray reserves on the node; 0 reserves none and does not limit what the process uses."""
    gpus: NonNegativeFloat = 0.0
    """GPUs that Ray reserves and shows to the process."""
    node: str = ""
    """Node that it must run on, by its Ray node id or its address; empty: any."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the process, set before it starts."""


class RestartSection(Config):
    """When a process that failed is started again, and when it is given up (RR6)."""

    budget: NonNegativeInt = 5
    """Failures that a process may have within the window; one more stops the run."""
    window_s: PositiveFloat = 300.0
    """Seconds of service, that is time in which the process was ready, after which a failure no longer counts."""
    backoff_s: NonNegativeFloat = 0.2
    """Wait before the first restart; each further failure in the window doubles it."""
    max_backoff_s: NonNegativeFloat = 30.0
    """Longest wait before a restart."""


class LivenessSection(Config):
    """When a process counts as hung (RR5)."""

    beat_s: PositiveFloat = 1.0
    """Seconds between two questions how it is doing."""
    silent_s: PositiveFloat = 20.0
    """Seconds without an answer after which it is looked at, and killed and restarted if it stays silent."""
    probe_s: PositiveFloat = 5.0
    """Seconds that it then has to answer."""
    progress_s: PositiveFloat = 300.0
    """Seconds that a busy role may go without progress before its stacks are reported; it is left alone while it answers."""
    start_s: PositiveFloat = 180.0
    """Seconds from its start until all its roles must be ready."""

    @rule
    def silence_is_longer_than_beats(self) -> Iterator[Violation]:
        if self.silent_s < 2 * self.beat_s:
            yield (
                ("silent_s",),
                f"is {self.silent_s:g}, less than two beats of {self.beat_s:g} s, so a healthy process would be killed;"
                " raise it, or lower beat_s",
            )


class RayConfig(DeviceConfig):
    """Every role in a process of its own, started by Ray.

    Without an address a cluster is started for this run, reachable from this machine only and with a token of its own. A cluster
    that exists already is joined as RAY_AUTH_MODE and RAY_AUTH_TOKEN say; whoever reaches its ports can run code in it.
    """

    type: Literal["ray"] = "ray"
    address: str | None = None
    """A cluster to join, as `host:port` or `auto`; null: start one for this run, on this machine."""
    threads_per_role: PositiveInt = 1
    """Intra-op threads of each process."""
    pool_processes: PositiveInt = 2
    """Processes for rewards and tools that run untrusted or heavy code, for each process that needs such a pool."""
    unsafe_pool_without_isolation: bool = False
    """Run such code without namespaces where the machine grants none: it can then reach the network and this user's processes."""
    hosts: tuple[HostConfig, ...] = ()
    """Roles to put together in one process; each role that is not named here gets its own."""
    resources: dict[str, RoleResources] = Field(default_factory=dict)
    """What each role asks the cluster for; a host can be named too, such as `engine-1`. In a cluster that was joined, who names no
    node and asks for nothing stays on the node of the launcher."""
    rewards: PositiveInt = 1
    """Replicas of the reward role."""
    restart: RestartSection = Field(default_factory=RestartSection)
    """When a process that failed is started again, and when it is given up."""
    liveness: LivenessSection = Field(default_factory=LivenessSection)
    """When a process counts as hung."""
    stop_s: PositiveFloat = 10.0
    """Seconds that a process has to end by itself before it is killed."""

    @rule
    def hosts_have_different_names(self) -> Iterator[Violation]:
        counts = Counter(host.name for host in self.hosts)
        for index, host in enumerate(self.hosts):
            if counts[host.name] > 1:
                yield ("hosts", index, "name"), f"{host.name!r} names {counts[host.name]} hosts; rename all but one"

    @rule
    def a_role_has_one_host(self) -> Iterator[Violation]:
        first: dict[str, str] = {}
        for index, host in enumerate(self.hosts):
            for place, role in enumerate(host.roles):
                if role in first:
                    yield (
                        ("hosts", index, "roles", place),
                        f"{role!r} is already in host {first[role]!r}; a role has one process, take it out of one",
                    )
                first.setdefault(role, host.name)

    @rule
    def a_host_has_one_node(self) -> Iterator[Violation]:
        for index, host in enumerate(self.hosts):
            nodes = {role: self.resources[role].node for role in host.roles if role in self.resources}
            if len({node for node in nodes.values() if node}) > 1:
                asked = ", ".join(f"{role} on {node}" for role, node in nodes.items() if node)
                yield ("hosts", index, "roles"), f"share a process, but resources ask for {asked}; name one node"

    @rule
    def replicas_are_not_hosted_together(self) -> Iterator[Violation]:
        for index, host in enumerate(self.hosts):
            if self.rewards > 1 and "reward" in host.roles:
                yield (
                    ("hosts", index, "roles"),
                    f"puts the reward role into one process, but rewards is {self.rewards}; set rewards: 1, or take it out of this host",
                )
