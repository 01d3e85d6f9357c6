"""Runs that are killed: `python -m tests.e2e.killer` reads jobs as JSON lines and forks one child for each.

A job is {"recipe": path, "resume": bool, "kill_at": event number or null, "torn": bool}. The child sends itself SIGKILL while it
writes that event, half of its line written if `torn`; nothing is cleaned up. Prints one line per job: "killed" or "ended", or
the exit code. Forking a process that has imported everything makes a run start in milliseconds.
"""

import asyncio
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from relax.bus import journal
from relax.bus.event_file import write_all
from relax.config.load import load_config
from relax.core.event import Event
from relax.services.directory import RunDirectory
from relax.services.monitors.hub import MonitorHub
from relax.services.run import Run


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _run(job)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print({0: "ended", signal.SIGKILL: "killed"}.get(status, f"status {status}"), flush=True)


def _run(job: dict[str, Any]) -> None:
    if job["kill_at"] is not None:
        _arm(job["kill_at"], job["torn"])
    config = load_config([Path(job["recipe"])])
    with RunDirectory(Path(config.run.directory) / config.run.name) as directory:
        if not directory.config.exists():
            directory.config.write_text(Path(job["recipe"]).read_text())
        asyncio.run(Run(config, directory, MonitorHub([]), resume=job["resume"]).execute())


def _arm(number: int, torn: bool) -> None:
    """Die in the middle of writing event `number`."""
    write = journal.EventFiles.write

    def write_or_die(self: Any, event: Event) -> None:
        if event.number == number:
            if torn:
                write_all(self._file, b'01234567 [%d,0.5,"bus/pu' % number)
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, event)

    journal.EventFiles.write = write_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
