"""Messages to people: what is told, how often, and that a service that hangs or fails delays nothing (RR9, SE1)."""

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from relax.config.load import load_config
from relax.core.error import ConfigError, UserError
from relax.services.directory import RunDirectory
from relax.services.monitors import notify
from relax.services.monitors.config import NotifyConfig
from relax.services.monitors.hub import MonitorHub, build_monitors
from relax.services.monitors.notify import NotifyMonitor, open_apprise
from relax.services.outline import RunOutline, StageOutline, outline_of
from tests.services.recorder import Recorder
from tests.services.story import story_directory, write_recipe

OUTLINE = RunOutline("story", (StageOutline("rl", 0, 10),))
SECRET = "hunter2-token"


class Service:
    """Takes messages, or does what `behaviour` does."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, str]] = []
        self.behaviour: Any = lambda: True
        self.entered = threading.Event()

    def open(self, url: str) -> Any:
        assert SECRET in url
        return self.send

    def send(self, title: str, text: str, kind: str) -> bool:
        self.entered.set()
        self.messages.append((title, text, kind))
        return bool(self.behaviour())


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_URL", f"json://127.0.0.1:9/{SECRET}")


@pytest.fixture
def service() -> Service:
    return Service()


def build(service: Service, tmp_path: Path, now: list[float] | None = None, **settings: Any) -> NotifyMonitor:
    config = NotifyConfig(urls=("env:CHAT_URL",), **settings)  # type: ignore[arg-type]
    clock = (lambda: now[0]) if now is not None else (lambda: 0.0)
    return NotifyMonitor(config, directory=RunDirectory(tmp_path), outline=OUTLINE, open_send=service.open, clock=clock)


async def test_each_kind_is_told_with_the_name_of_the_run(service: Service, tmp_path: Path) -> None:
    hub = MonitorHub([("notify", build(service, tmp_path)), ("recorder", Recorder())])
    hub.step(0, {"reward/mean": 1.0})
    hub.samples(0, [{"text": "2"}])
    hub.notice("restart", "engine-0 restarted")
    hub.notice("failure", "the disk is full")
    hub.notice("end", "60 steps")
    await hub.close()
    hub.notice("end", "late")
    assert service.messages == [
        ("relax story: restart", "engine-0 restarted", "warning"),
        ("relax story: failure", "the disk is full", "failure"),
        ("relax story: end", "60 steps", "success"),
    ]


async def test_a_loop_of_restarts_is_one_message_now_and_then(service: Service, tmp_path: Path) -> None:
    now = [0.0]
    monitor = build(service, tmp_path, now, min_interval_s=100, on=("restart", "end"))
    for number in range(5):
        await monitor.notice("restart", f"restart {number}")
    await monitor.notice("stall", "not asked for")
    now[0] = 100.0
    await monitor.notice("restart", "restart 5")
    await monitor.notice("restart", "restart 6")
    for _ in range(2):
        await monitor.notice("end", "done")
    await monitor.close()
    await monitor.close()
    assert [text for _, text, _ in service.messages] == [
        "restart 0",
        "restart 5\n(4 more of them since the last message)",
        "done",
        "done",
        "restart 6\n(1 of them since the last message)",
    ]


async def test_rule_rr9_a_service_that_hangs_delays_nothing(service: Service, tmp_path: Path) -> None:
    gate, reports = threading.Event(), list[str]()
    service.behaviour = lambda: gate.wait(30)
    recorder = Recorder()
    hub = MonitorHub(
        [("notify", build(service, tmp_path)), ("recorder", recorder)], report=reports.append, close_timeout_s=0.2
    )
    hub.notice("restart", "engine-0 restarted")
    assert await asyncio.to_thread(service.entered.wait, 10)
    for step in range(1000):  # far more than its queue holds, if it took them
        hub.step(step, {"a": 1.0})
        await asyncio.sleep(0)
    hub.notice("failure", "the disk is full")
    assert hub.dropped["notify"] == 0
    await hub.close()
    try:
        assert recorder.entries[-1] == (999, {"a": 1.0})
        about = [
            report for report in reports if "'notify'" in report
        ]  # a slow machine may be too slow for the recorder
        assert about == ["monitor 'notify' did not end within 0.2 s and was left behind; 1 of its entries are lost"]
    finally:
        gate.set()
    assert (await asyncio.to_thread(hub._threads[0].ended.result, 10)) is None
    assert [title for title, _, _ in service.messages] == ["relax story: restart", "relax story: failure"]


@pytest.mark.parametrize("error", [None, OSError(f"no route to json://127.0.0.1:9/{SECRET}"), ValueError(SECRET)])
async def test_rule_se1_a_message_that_is_not_taken_is_said_once_without_the_url(
    service: Service, tmp_path: Path, error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bool:
        if error is not None:
            raise error
        return False

    service.behaviour = fail
    monitor = build(service, tmp_path)
    with caplog.at_level(logging.DEBUG):
        await monitor.notice("failure", "one")
        await monitor.notice("failure", "two")
    assert len(service.messages) == 2
    (record,) = caplog.records
    assert "did not reach env:CHAT_URL" in record.getMessage()
    assert SECRET not in caplog.text


@pytest.mark.parametrize("url", [f"nonsense://{SECRET}", SECRET])
def test_rule_se1_a_url_that_nobody_knows_is_refused_without_being_shown(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CHAT_URL", url)
    config = NotifyConfig(urls=("env:CHAT_URL",))  # type: ignore[arg-type]
    with caplog.at_level(logging.DEBUG), pytest.raises(UserError, match="env:CHAT_URL holds no URL") as caught:
        NotifyMonitor(config, directory=RunDirectory(tmp_path), outline=OUTLINE)
    assert SECRET not in str(caught.value) + caplog.text


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(UserError, match=r"pip install 'relax\[notify\]'"):
        open_apprise("json://127.0.0.1")


def test_an_unset_variable_is_found_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAT_URL")
    config = load_config([write_recipe(tmp_path)], ["monitors=[{type: notify, urls: ['env:CHAT_URL']}]"])
    with pytest.raises(UserError, match="CHAT_URL is not set"):
        build_monitors(config, RunDirectory(tmp_path), outline_of(config))


def test_rule_se1_a_url_in_the_recipe_is_refused_and_never_dumped(tmp_path: Path) -> None:
    from relax.services.cli.origin import config_text

    recipe = write_recipe(tmp_path)
    with pytest.raises(ConfigError, match="put it into an environment variable") as caught:
        load_config([recipe], [f"monitors=[{{type: notify, urls: ['slack://{SECRET}']}}]"])
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match="nobody would be told"):
        load_config([recipe], ["monitors=[{type: notify}]"])
    config = load_config([recipe], ["monitors=[{type: notify, urls: ['env:CHAT_URL']}]"])
    assert "env:CHAT_URL" in config_text(config)
    assert SECRET not in config_text(config)


@pytest.fixture
def inbox() -> Iterator[tuple[int, list[Any]]]:
    """A web service on this machine, and what it was sent."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, received
        server.shutdown()
        thread.join()


async def test_a_message_goes_through_apprise_itself(
    inbox: tuple[int, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, received = inbox
    monkeypatch.setenv("CHAT_URL", f"json://127.0.0.1:{port}/{SECRET}")
    config = load_config([write_recipe(tmp_path)], ["monitors=[{type: notify, urls: ['env:CHAT_URL']}]"])
    hub = build_monitors(config, story_directory(config), outline_of(config))
    hub.notice("restart", "engine-0 restarted")
    await hub.close()
    (message,) = received
    assert (message["title"], message["message"], message["type"]) == (
        "relax story: restart",
        "engine-0 restarted",
        "warning",
    )
