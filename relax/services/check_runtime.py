"""What the runtime's node says of roles, checked against the roles that there are; and what needs roles in processes of their own.

Part of `check`. Loads no torch and no Ray.
"""

import re
from collections.abc import Collection, Iterator

from relax.config.suggestion import suggestion
from relax.config.tree import RunConfig
from relax.engines.config import SglangEngineConfig
from relax.runtime.config import RayConfig

DEVICE_ROLES = ("trainer", "engine", "evaluation", "reference", "critic", "teacher", "judge")
"""Roles that own a model; each of them may be named in `runtime.devices`, `engine-0` for one of several."""
HOST_ROLES = (*DEVICE_ROLES, "rollout", "demonstration", "reward", "verdict", "advantage")
"""Roles that may be put together in a host. The controller has a process of its own."""
REPLICATED_ROLES = ("engine", "reward")
"""Roles whose hosts come and go while the run goes on."""
RESERVED = ("launcher", "evaluations")
"""No host has one of these names: versions are held under them, and the controller knows a caller by them."""
_REPLICA = re.compile(f"({'|'.join(REPLICATED_ROLES)})-[0-9]+")
_DEVICE_NAME = re.compile("engine-[0-9]+|judge-.+")


def runtime_problems(config: RunConfig) -> list[str]:
    """One sentence for each thing that cannot work, with its key path first."""
    return [
        *_devices(config),
        *_server(config),
        *(_hosts(config) if isinstance(config.runtime, RayConfig) else _one_process(config)),
    ]


def _devices(config: RunConfig) -> Iterator[str]:
    devices: dict[str, str] = getattr(config.runtime, "devices", {})
    for name in devices:
        if name not in DEVICE_ROLES and not _DEVICE_NAME.fullmatch(name):
            yield (
                f"runtime.devices.{name}: no role of that name has a device; there are {', '.join(DEVICE_ROLES)} and engine-0, "
                "engine-1, ..."
            )


def _server(config: RunConfig) -> Iterator[str]:
    """An engine elsewhere serves one node of the configuration, and can do less than one of our own."""
    engine = config.rollout.engine
    if not isinstance(engine, SglangEngineConfig):
        return
    wrong = {
        "rollout.on_load: is keep, which": config.rollout.on_load == "keep",
        "run.deterministic: is true, which": config.run.deterministic,
        "data.media: is set, which": config.data.media is not None,
        "rollout.replicas: is above 1, which": config.rollout.replicas > 1,
        "eval.sets: need an engine of their own, which": bool(config.eval.sets),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            yield (
                f"{what} one server with rollout.engine.type sglang cannot be or do; change it, or keep an engine of the run's own"
                " and attach the server with `relax engine attach`"
            )


def _one_process(config: RunConfig) -> Iterator[str]:
    if config.rollout.autoscale is not None:
        yield (
            "rollout.autoscale: is set, but engines cannot be added to one process; set runtime.type: ray, or leave it out"
        )


def _hosts(config: RunConfig) -> Iterator[str]:
    runtime = config.runtime
    assert isinstance(runtime, RayConfig)
    if not config.bus.journal:
        yield (
            f"bus.journal: is false, but with runtime.type {runtime.type} rows travel through the journal's files (TQ8); set it to true"
        )
    known = (*HOST_ROLES, "controller")
    for index, host in enumerate(runtime.hosts):
        for role in host.roles:
            if role not in known:
                yield f"runtime.hosts.{index}.roles: there is no role {role!r}; {suggestion(role, known)}"
    names = {host.name for host in runtime.hosts}
    for name in runtime.resources:
        if name not in known and name not in names and not _REPLICA.fullmatch(name):
            yield f"runtime.resources: there is no role or host {name!r}; {suggestion(name, (*known, *names))}"
    for index, host in enumerate(runtime.hosts):
        taken = host.name in RESERVED or _REPLICA.fullmatch(host.name)
        if taken or (host.name in known and host.name not in host.roles):
            yield f"runtime.hosts.{index}.name: {host.name!r} is the name of another role's process; choose another name"
        yield from (f"runtime.hosts.{index}.roles: {problem}" for problem in _apart(config, host.roles))


def _apart(config: RunConfig, roles: Collection[str]) -> Iterator[str]:
    """What cannot be put into one host."""
    if "controller" in roles:
        yield "'controller' has a process of its own in any case; take it out of this host"
    if "engine" in roles and len(roles) > 1:
        yield "'engine' must have a process of its own; take it out of this host"
    elif "engine" in roles and config.rollout.replicas > 1:
        yield f"'engine' has {config.rollout.replicas} processes (rollout.replicas); take it out of this host"
