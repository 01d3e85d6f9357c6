"""An engine of a simulated schedule: requests, tokens and weights without a model.

Driven by `dispatch` (requests) and `loader` (weights). It samples only from weights that were proved, and stamps each token;
what it is told to do against that is a violation, not an accident.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from relax.core.id import GroupId
from relax.core.protocol import LoadMode
from relax.simulation.timeline import Timeline, Timer
from relax.simulation.violation import Violation

Outcome = Literal["done", "abort", "error"]


@dataclass(slots=True, eq=False)
class Request:
    """`left` tokens are still to be sampled, one every `pace_s`. `cached` names the weights of the key-values held."""

    group: GroupId
    base: int
    left: int
    pace_s: float
    fails: bool
    ended: Callable[["Request", Outcome], None]
    versions: list[int] = field(default_factory=list)
    mixed: list[bool] = field(default_factory=list)
    cached: int = -1
    since: float = 0.0
    timer: Timer | None = None


class Engine:
    """`holds` is the version it says it holds, `weights` what is really in its memory, `contents` what each version is."""

    def __init__(
        self, name: str, slots: int, timeline: Timeline, contents: Mapping[int, int], only_consequences: bool
    ) -> None:
        self.name, self._slots, self._timeline, self._contents = name, slots, timeline, contents
        self._only_consequences = only_consequences
        self.is_alive = True
        self.holds: int | None = None
        self.weights: int | None = None
        self.is_paused = False
        self.mode: LoadMode = "recompute"
        self._resumed: LoadMode = "recompute"
        self.running: dict[Request, None] = {}
        self.waiting: deque[Request] = deque()
        self.drained: Callable[[], None] | None = None

    # --- requests ----------------------------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """A request arrives. ST2: never below the base version of its group."""
        if not self.is_alive or self.holds is None:
            self._timeline.after(0.0, lambda: request.ended(request, "error"))
            return
        if self.holds < request.base and not self._only_consequences:
            raise Violation("ST2", f"{self.name} at version {self.holds} got a request of base {request.base}")
        self.waiting.append(request)
        self._admit()

    def cancel(self, request: Request) -> None:
        """The caller gave up."""
        if request.timer is not None:
            request.timer.cancel()
        if request in self.waiting:
            self.waiting.remove(request)
        self._leave(request)

    def _admit(self) -> None:
        while not self.is_paused and self.drained is None and self.waiting and len(self.running) < self._slots:
            request = self.waiting.popleft()
            request.cached = -1 if self.weights is None else self.weights
            self.running[request] = None
            self._run(request)

    def _run(self, request: Request) -> None:
        request.since = self._timeline.now
        tokens = request.left / 2 if request.fails else request.left
        request.timer = self._timeline.after(tokens * request.pace_s, lambda: self._finish(request))

    def _finish(self, request: Request) -> None:
        request.timer = None
        self._sample(request, request.left // 2 if request.fails else request.left)
        self._leave(request)
        request.ended(request, "error" if request.fails else "done")

    def _leave(self, request: Request) -> None:
        self.running.pop(request, None)
        if not self.running and self.drained is not None:
            drained, self.drained = self.drained, None
            drained()
        self._admit()

    def _sample(self, request: Request, count: int) -> None:
        """WS6: the stamp names the weights that are used; key-values of others are flagged."""
        if count == 0:
            return
        if self.is_paused or self.holds is None:
            raise Violation("WS2", f"{self.name} samples while it is paused")
        if self.weights != self._contents[self.holds]:
            raise Violation("WS6", f"{self.name} samples from other weights than version {self.holds}")
        is_mixed = request.cached != self.weights
        if is_mixed and self._resumed != "keep":
            raise Violation("WS6", f"{self.name} goes on with old key-values under {self._resumed}")
        request.versions += [self.holds] * count
        request.mixed += [is_mixed] * count
        request.left -= count

    # --- weights -----------------------------------------------------------------------------------------------------

    def pause(self, mode: LoadMode, done: Callable[[], None]) -> None:
        """Stand still at a token boundary; with `drain` once the running requests have ended."""
        self.mode, self.drained = mode, None
        if mode == "drain" and self.running and not self.is_paused:
            self.drained = lambda: self._stand(done)
            return
        self._stand(done)
        if mode == "abort":
            self.abort("abort")

    def _stand(self, done: Callable[[], None]) -> None:
        for request in list(self.running) if not self.is_paused else ():
            self._freeze(request)
        self.is_paused = True
        done()

    def _freeze(self, request: Request) -> None:
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
            limit = request.left // 2 if request.fails else request.left
            self._sample(request, min(limit, int((self._timeline.now - request.since) / request.pace_s)))

    def abort(self, outcome: Outcome) -> None:
        """Hand back every request with what it has."""
        requests = [*self.running, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        for request in requests:
            if request.timer is not None:
                request.timer.cancel()
            request.ended(request, outcome)

    def load(self, version: int, weights: int) -> None:
        """WS2: weights change only while nothing is sampled."""
        if not self.is_paused:
            raise Violation("WS2", f"{self.name} was told to load version {version} while it decodes")
        self.holds, self.weights = version, weights

    def resume(self) -> None:
        self.is_paused = False
        self.drained, self._resumed = None, self.mode
        for request in list(self.running):
            if self.mode != "keep" and self.weights is not None:
                request.cached = self.weights  # prefilled again
            if request.timer is None:
                self._run(request)
        self._admit()

    def die(self) -> None:
        """The process is gone with all that it held."""
        self.is_alive, self.holds, self.weights, self.is_paused, self.drained = False, None, None, False, None
        self.abort("error")

    def restart(self) -> None:
        self.is_alive = True
