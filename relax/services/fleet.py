"""The rollout engines of a run with their router, each kept at the newest version by an updater of its own.

Started by each stage that samples. Restarting an engine and adding replicas belong to the runtime that can do it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from relax.config.base import ComponentConfig
from relax.core.error import EngineError
from relax.core.protocol import RolloutEngine
from relax.core.version import Version
from relax.engines.router import Router
from relax.runtime.task import TaskSet
from relax.weights.updater import EngineUpdater, Timeouts


@dataclass(slots=True)
class Fleet:
    """`engines` by name, in order; `live` is what the gate asks."""

    router: Router
    engines: dict[str, RolloutEngine]
    updaters: Sequence[EngineUpdater] = ()
    _listeners: list[Callable[[], None]] = field(default_factory=list)

    def live(self) -> int | None:
        """The highest version live on an engine that can take a request."""
        return self.router.highest_live()

    def notify(self, version: Version) -> None:
        """A version was published."""
        for updater in self.updaters:
            updater.notify(version)

    def start(self, tasks: TaskSet, on_change: Callable[[], None]) -> None:
        """Run the updaters as tasks of a stage; `on_change` is called after every load."""
        self._listeners = [on_change]
        for name, updater in zip(self.engines, self.updaters, strict=True):
            tasks.start(f"update {name}", updater.run(), endless=True)

    async def on_live(self, name: str, version: Version) -> None:
        self.router.set_live(name, version.number)
        self._changed()

    async def on_failed(self, name: str, reason: str, final: bool) -> None:
        """Nothing is sent to a failed engine. With its restart budget used up the run stops (RR6): no other engine can be had here."""
        self.router.set_failed(name)
        self._changed()
        if final:
            raise EngineError(
                f"engine {name} could not load new weights and is given up: {reason}; "
                "the run stops at its last checkpoint: mend the cause and --resume"
            )

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()


def update_timeouts(shares_device: bool, node: ComponentConfig) -> Timeouts:
    """Deadlines of the loads of an engine with this configuration, which may have one of its own for reading a version: twice that
    leaves time to write it too. On a shared device a load first waits for the turns of others, each of which ends by DT3."""
    usual = Timeouts()
    return replace(usual, load_s=3600.0 if shares_device else max(usual.load_s, 2 * getattr(node, "load_s", 0.0)))
