"""Speaks to the control API of a run on behalf of the command line; finds it by `control.json` in the run directory.

Called by `relax scale`, `pause` and the like. Goes straight to the address: no proxy of the environment stands between. A token is
read when it is needed and never printed.
"""

import http.client
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from relax.config.secret import Secret
from relax.core.error import RelaxError, UserError
from relax.core.message import Json
from relax.services.directory import RunDirectory

TIMEOUT_S = 15.0
LOOK_S = 20.0
"""How long one look waits for the end of an operation; then the next look follows."""

_SELF_EXPLAINED = frozenset({"refused", "conflict", "crowded", "unknown"})
"""Codes whose message says what to do; the answer's next step names paths, which a person at a terminal does not use."""


class ControlClient:
    """One connection for each request: they are few."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def get(self, path: str, wait_s: float = 0.0) -> dict[str, Json]:
        query = f"?{urlencode({'wait_s': wait_s})}" if wait_s else ""
        return self._send("GET", path + query, None, TIMEOUT_S + wait_s)

    def post(self, path: str, body: Mapping[str, Json]) -> dict[str, Json]:
        return self._send("POST", path, body, TIMEOUT_S)

    def delete(self, path: str, **query: str) -> dict[str, Json]:
        return self._send("DELETE", f"{path}?{urlencode(query)}" if query else path, None, TIMEOUT_S)

    def follow(self, operation: Mapping[str, Json], say: Callable[[str], None]) -> dict[str, Json]:
        """The operation once it has ended; `say` gets each sentence of its progress once. It has a deadline of its own."""
        now, told = dict(operation), 0
        while True:
            progress = now["progress"]
            for line in progress[told:]:
                say(line)
            told = len(progress)
            if now["state"] not in ("pending", "running"):
                return now
            now = self.get(f"/v1/operations/{operation['id']}", 1.0 if told else LOOK_S)

    # --- parts ---

    def _send(self, method: str, path: str, body: Mapping[str, Json] | None, timeout_s: float) -> dict[str, Json]:
        url, token = self._address()
        parts = urlsplit(url)
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(url, error) from error
        finally:
            connection.close()
        return _read(status, text, url)

    def _address(self) -> tuple[str, str]:
        path = self._directory.control
        try:
            told = json.loads(path.read_text("utf-8"))
            url, token = told["url"], told["token"]
            kind, _, name = token.partition(":")
            if kind == "file":
                return url, (self._directory.root / name).read_text("utf-8").strip()
            return url, Secret(name).reveal()
        except FileNotFoundError as error:
            raise self._no_control() from error
        except PermissionError as error:
            raise UserError(f"{error.filename} belongs to another user; only the owner of a run controls it") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} cannot be read ({error!r}); is {self._directory.root} the folder of a run?"
            ) from error

    def _no_control(self) -> UserError:
        root = self._directory.root
        if self._directory.is_finished and self._directory.owner is None:
            return UserError(f"run {root} is finished: nothing of it can be changed any more")
        if self._directory.owner is None:
            return UserError(f"run {root} is not under way; go on with it by `relax train --resume {root}`")
        return UserError(
            f"run {root} has no control API: on runtime.type=local all of it is one process, whose parts cannot be changed; "
            "runtime.type=ray has one. If it has just begun, ask again in a moment"
        )

    def _no_answer(self, url: str, error: Exception) -> UserError | RelaxError:
        root = self._directory.root
        if self._directory.owner is None:
            return UserError(f"run {root} is not under way any more; go on with it by `relax train --resume {root}`")
        return RelaxError(
            f"the control API of run {root} does not answer at {url} ({error}); its controller may be restarting: ask again in "
            "some seconds, or look with `relax status`"
        )


def _read(status: int, text: bytes, url: str) -> dict[str, Json]:
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    if status < 400 and isinstance(found, dict):
        return found
    error = found.get("error") if isinstance(found, dict) else None
    if status == 503 and not isinstance(error, dict):
        raise RelaxError(f"{url} answers as many requests as it can at once (503); ask again in some seconds")
    if not isinstance(error, dict):
        raise RelaxError(f"{url} answered {status} and no JSON object; is it the control API of this run?")
    message = str(error.get("message"))
    if error.get("code") not in _SELF_EXPLAINED:
        message += f"; {error.get('next')}"
    raise RelaxError(message) if status >= 500 else UserError(message)
