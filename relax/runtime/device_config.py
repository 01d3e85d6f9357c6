"""Which roles share a device: a part of every runtime's configuration. Loads without torch."""

from typing import Annotated, TypeAlias

from pydantic import Field, NonNegativeFloat, StringConstraints

from relax.config.base import ComponentConfig

DeviceName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class DeviceConfig(ComponentConfig):
    """What runtimes have in common."""

    devices: dict[str, DeviceName] = Field(default_factory=dict)
    """A name for the device of a role, such as `trainer: a, engine: a`; roles of one device take turns on it. `engine` stands for
    all engines of a device, `engine-1` for one of them. A role that is not named has a device of its own."""
    min_turn_s: NonNegativeFloat = 5.0
    """Seconds that a role keeps a shared device at most before another that waits for it has its turn; a call is never interrupted."""
