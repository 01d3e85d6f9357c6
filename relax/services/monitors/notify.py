"""Messages to people (mail, chat, phone) when a role restarts, a run stalls, fails or ends, through the package `apprise`.

Built by the hub, and called on its own thread only, so a service that hangs holds up nothing but later messages (RR9). The URLs of
the services hold secrets: they come from environment variables, and no message, log or error of ours shows one (SE1).
"""

import importlib.util
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax.core.error import UserError
from relax.core.message import Json
from relax.services.directory import RunDirectory
from relax.services.monitors.config import NotifyConfig
from relax.services.outline import RunOutline

Send = Callable[[str, str, str], bool]
"""Sends a title and a text, with the kind of apprise (info, warning, failure, success); blocks. False: it was not taken."""

_KINDS = {"restart": "warning", "stall": "warning", "failure": "failure", "end": "success"}
_ALWAYS = frozenset({"failure", "end"})
"""Come once; they are never held back."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Quiet:
    """What was held back of one kind since its last message."""

    sent_at: float
    held: int = 0
    last: str = ""


class NotifyMonitor:
    """`open_send` turns a URL into Send (None: nobody knows such a URL); `clock` gives monotonic seconds. Both are for tests."""

    takes_metrics = False

    def __init__(
        self,
        config: NotifyConfig,
        *,
        directory: RunDirectory,
        outline: RunOutline,
        open_send: Callable[[str], Send | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._run, self._clock = config, outline.name, clock
        self._sends: dict[str, Send] = {}
        self._quiet: dict[str, _Quiet] = {}
        self._said: set[str] = set()
        for secret in config.urls:
            send = (open_send or open_apprise)(secret.reveal())
            if send is None:
                raise UserError(
                    f"monitor notify: {secret} holds no URL that apprise knows; see https://appriseit.com/services for the form "
                    "of each service"
                )
            self._sends[str(secret)] = send

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics are for other monitors."""

    async def log_samples(self, step: int, samples: Sequence[Mapping[str, Json]]) -> None:
        """Samples are for other monitors."""

    async def notice(self, kind: str, text: str) -> None:
        """Tell people, unless the last message of this kind is too fresh: then the next one says how many it stands for."""
        if kind not in self._config.on:
            return
        now, quiet = self._clock(), self._quiet.get(kind)
        if quiet is not None and kind not in _ALWAYS and now - quiet.sent_at < self._config.min_interval_s:
            quiet.held += 1
            quiet.last = text
            return
        more = f"\n({quiet.held} more of them since the last message)" if quiet is not None and quiet.held else ""
        self._quiet[kind] = _Quiet(now)
        self._tell(kind, text + more)

    async def close(self) -> None:
        """Send what was held back."""
        for kind, quiet in self._quiet.items():
            if quiet.held:
                self._tell(kind, f"{quiet.last}\n({quiet.held} of them since the last message)")
        self._quiet.clear()

    def _tell(self, kind: str, text: str) -> None:
        for name, send in self._sends.items():
            try:
                is_taken, why = send(f"relax {self._run}: {kind}", text, _KINDS.get(kind, "info")), "it was refused"
            except Exception as error:
                is_taken, why = False, type(error).__name__  # its text may hold the URL
            if not is_taken and name not in self._said:
                self._said.add(name)
                _log.warning("a message about a %s did not reach %s (%s); later ones are tried", kind, name, why)


def open_apprise(url: str) -> Send | None:
    """Of one service. Raises UserError when apprise is not installed."""
    if importlib.util.find_spec("apprise") is None:
        raise UserError(
            "monitor notify needs the package apprise: pip install 'relax[notify]', or take it out of `monitors`"
        )
    import apprise

    logging.getLogger("apprise").disabled = True  # it writes URLs; whether a message was taken it also returns
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of modules that its plug-ins import
        service: Any = apprise.Apprise.instantiate(url)
    if service is None:
        return None

    def send(title: str, text: str, kind: str) -> bool:
        # The service itself, not a group of them: groups send from threads that a hanging service keeps alive at exit.
        return bool(service.notify(title=title, body=text, notify_type=kind))

    return send
