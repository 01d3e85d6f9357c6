"""Where an engine stands: open, pausing, paused or closed, the version that it holds, whether it loads, and why it has failed.

Each engine owns one. What all engines refuse in one state or another is refused here.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from relax.core.error import EngineError, RelaxError, TransportError
from relax.core.protocol import EngineStatus, LoadMode, WeightReader
from relax.core.version import Version
from relax.core.weight import WeightSet


class Standing:
    """`mode` is what the next load does with running requests. `failed` is why the engine serves nothing until its next load."""

    def __init__(self, name: str, capacity: int) -> None:
        self.state: Literal["open", "pausing", "paused", "closed"] = "open"
        self.mode: LoadMode = "recompute"
        self.version: Version | None = None
        self.failed: str | None = None
        self._name, self._capacity = name, capacity
        self._loading = False

    @property
    def is_open(self) -> bool:
        return self.state == "open"

    @property
    def is_closed(self) -> bool:
        return self.state == "closed"

    @property
    def is_loading(self) -> bool:
        return self._loading

    def serving(self) -> Version:
        """The version that a request would be answered by. Raises EngineError when none would."""
        if self.is_closed:
            raise EngineError(f"engine {self._name} is closed")
        if self.failed is not None:
            raise EngineError(f"engine {self._name} has failed ({self.failed}); load a version to restart it")
        if self.version is None:
            raise EngineError(f"engine {self._name} has no version yet; load one before generate")
        return self.version

    def check_free(self, verb: str) -> None:
        """Raises EngineError where the engine cannot be paused or resumed now."""
        if self.state in ("pausing", "closed") or self._loading:
            found = "loading" if self._loading else self.state
            raise EngineError(f"engine {self._name} is {found}; {verb} has to wait")

    def paused(self) -> None:
        """No request moves any more. Raises EngineError when the engine was closed meanwhile."""
        if self.is_closed:
            raise EngineError(f"engine {self._name} was closed while it paused")
        self.state = "paused"

    @asynccontextmanager
    async def loading(self, version: Version, reader: WeightReader) -> AsyncIterator[WeightSet]:
        """Fetch `version` and let the block take it over; meanwhile nothing else loads, pauses or resumes.

        Raises EngineError where the engine may not load now, or cannot; what the block raises, as that if it is no RelaxError.
        """
        if self._loading:
            raise EngineError(f"engine {self._name} is already loading; wait for that load to end")
        if self.is_closed:
            raise EngineError(f"engine {self._name} is closed")
        if self.state != "paused" and self.version is not None and self.failed is None:
            raise EngineError(f"engine {self._name} is running; pause it before load({version})")
        self._loading = True
        try:
            weights = await reader.fetch(version)
            if weights.manifest.version != version:
                raise TransportError(f"asked for {version}, got {weights.manifest.version}; the old version stays")
            yield weights
        except RelaxError:
            raise
        except Exception as error:
            keeps = self.version or "nothing"
            raise EngineError(f"engine {self._name} could not load {version} and keeps {keeps}: {error}") from error
        finally:
            self._loading = False

    def status(self, running: int, waiting: int, sampled_tokens: int, busy_s: float) -> EngineStatus:
        """With what only the engine knows: requests that have a slot, those that wait for one, and its counters."""
        return EngineStatus(
            name=self._name,
            version=self.version,
            accepting=self.is_open and self.version is not None and self.failed is None,
            running=running,
            waiting=waiting,
            capacity=self._capacity,
            failed=self.failed,
            sampled_tokens=sampled_tokens,
            busy_s=busy_s,
        )
