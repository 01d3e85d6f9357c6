"""The HTTP server of a run's control API: bound, guarded, announced in `control.json`, and taken away at the end (SE1).

Run by the controller's process in its own loop; it installs no signal handlers. Invariant: nothing is served without a token,
and off loopback none that nobody chose.
"""

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import uvicorn
from fastapi import FastAPI

from relax.config.control import WILDCARDS, ControlSection
from relax.core.error import InvariantError, UserError
from relax.services.control.connection import MAX_CONNECTIONS, Connection
from relax.services.control.guard import Guard
from relax.services.directory import RunDirectory
from relax.services.file import written_aside

CLOSE_S = 2
"""Seconds that answers under way may take at the end."""


class _Server(uvicorn.Server):  # type: ignore[misc]  # the library is not looked into
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process (RR6)."""
        yield


class ControlServer:
    def __init__(self, app: FastAPI, section: ControlSection, directory: RunDirectory) -> None:
        self._app, self._section, self._directory = app, section, directory
        self._socket: socket.socket | None = None
        self._token = ""
        self.url = ""

    def open(self) -> str:
        """Bind, and write `control.json`; returns the URL. Raises UserError: no token where one is needed, or no such address.

        From here on clients may connect; they are answered once `serve` runs.
        """
        section = self._section
        if section.token is None and not section.is_loopback:
            raise UserError(
                f"run.control.host is {section.host!r}, which other machines can reach, and run.control.token is null (SE1); set "
                "the token to `env:NAME_OF_THE_VARIABLE`, or listen at 127.0.0.1"
            )
        self._token = secrets.token_urlsafe(32) if section.token is None else _checked(section.token.reveal())
        self._socket = _bind(section.host, section.port)
        port = self._socket.getsockname()[1]
        self.url = f"http://{_client_host(section.host)}:{port}"
        if section.token is None:
            _write_private(self._directory.control_token, self._token + "\n")
        told = {
            "url": self.url,
            "token": f"file:{self._directory.control_token.name}" if section.token is None else str(section.token),
            "process": os.getpid(),
            "started_at": time.time(),
        }
        _write_private(self._directory.control, json.dumps(told, indent=2) + "\n")
        return self.url

    async def serve(self) -> NoReturn:
        """Endless: answers requests. Cancelled, it lets answers under way end, and takes its two files away."""
        try:
            if self._socket is None:
                self.open()
            error = await self._answer()
        finally:
            self._close()
        raise InvariantError("RR7", f"the control server at {self.url} ended by itself: {error!r}")

    async def _answer(self) -> BaseException | None:
        """Until it is cancelled, or ends by itself: with what."""
        assert self._socket is not None
        server = _Server(self._config())
        serving: asyncio.Future[None] = asyncio.ensure_future(server.serve(sockets=[self._socket]))
        try:
            await asyncio.wait({serving})  # no deadline: it serves as long as the run goes on
        finally:
            server.should_exit = True
            try:
                await asyncio.wait({serving}, timeout=CLOSE_S + 3.0)
            finally:
                serving.cancel()
        return serving.exception()

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            Guard(self._app, self._token, (*self._section.hosts, self._section.host)),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS + 1,  # reached only when all of them are being answered
            timeout_graceful_shutdown=CLOSE_S,
        )

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        for path in (self._directory.control, self._directory.control_token):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _bind(host: str, port: int) -> socket.socket:
    host = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(MAX_CONNECTIONS)
            bound.setblocking(False)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise UserError(
            f"the control API cannot listen at {host} port {port} (run.control): {error.strerror or error}; choose another "
            "port, or 0 for any free one"
        ) from error
    return bound


def _checked(token: str) -> str:
    if len(token) < 16 or not token.isascii() or any(character.isspace() for character in token):
        raise UserError(
            "the token of run.control must have at least 16 ASCII characters without spaces; make one with "
            "`python -c 'import secrets; print(secrets.token_urlsafe(32))'`"
        )
    return token


def _client_host(host: str) -> str:
    """Where a client on this machine finds a server that listens at `host`."""
    if host in WILDCARDS:
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host.strip('[]')}]" if ":" in host else host


def _write_private(path: Path, text: str) -> None:
    """Whole or not at all, and readable by the owner only from the first byte on."""
    with written_aside(path) as aside:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
