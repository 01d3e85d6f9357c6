"""The control API over a real socket: who may ask, what is answered, what it leaves in the run directory (SE1)."""

import http.client
import json
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from relax.config.control import ControlSection
from relax.config.load import load_config
from relax.core.error import ConfigError, RelaxError, UserError
from relax.services.control import connection
from relax.services.control.application import build_application
from relax.services.control.client import ControlClient
from relax.services.control.connection import MAX_CONNECTIONS
from relax.services.control.guard import MAX_BODY_BYTES
from relax.services.control.operator import Operator
from relax.services.control.request import Attach, Detach
from relax.services.control.server import ControlServer
from relax.services.directory import RunDirectory
from tests.services.fake_control import FakeControl, served

Asked = Callable[..., tuple[int, Any]]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory(tmp_path / "run") as made:
        yield made


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def url(control: FakeControl, directory: RunDirectory) -> Iterator[str]:
    with served(control, directory) as found:
        yield found


@pytest.fixture
def client(url: str, directory: RunDirectory) -> ControlClient:
    return ControlClient(directory)


@pytest.fixture
def asked(url: str, directory: RunDirectory) -> Asked:
    """One raw request; by default as it should be."""
    token = directory.control_token.read_text().strip()

    def ask(method: str, path: str, body: Any = None, **changes: str | None) -> tuple[int, Any]:
        headers: dict[str, str | None] = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        headers |= {name.replace("_", "-").title(): value for name, value in changes.items()}
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
        try:
            text = body if isinstance(body, str | bytes | None) else json.dumps(body)
            connection.request(
                method, path, text, {name: value for name, value in headers.items() if value is not None}
            )
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    return ask


def test_looks(client: ControlClient) -> None:
    assert client.get("/v1/run") == {"run": "fake", "step": 7, "total": 60, "paused": False}
    (role,) = client.get("/v1/roles")["roles"]
    assert (role["name"], role["state"], role["waits_for"], role["version"]) == (
        "trainer",
        "waiting",
        "3 of 8 groups",
        7,
    )
    (engine,) = client.get("/v1/engines")["engines"]
    assert (engine["name"], engine["state"], engine["version"]) == ("engine-0", "live", "v7")
    assert client.get("/v1/operations") == {"operations": []}
    assert "/v1/scale" in client.get("/v1/openapi.json")["paths"]


def test_scale_and_wait(client: ControlClient, control: FakeControl) -> None:
    said: list[str] = []
    answer = client.post("/v1/scale", {"replicas": {"rollout": 3, "reward": 2}, "id": "mine"})
    assert answer["plan"] == ["start rollout-1", "start rollout-2", "start reward-1"]
    done = client.follow(answer, said.append)
    assert (done["state"], done["result"]) == ("done", {"rollout": 3, "reward": 2})
    assert said == ["scale begins"]
    assert client.post("/v1/scale", {"replicas": {"rollout": 3, "reward": 2}, "id": "mine"})["state"] == "done"
    assert len(control.performed) == 1


def test_a_dry_run_changes_nothing(client: ControlClient, control: FakeControl) -> None:
    answer = client.post("/v1/scale", {"replicas": {"rollout": 2}, "dry_run": True})
    assert answer == {
        "dry_run": True, "kind": "scale", "arguments": {"replicas": {"rollout": 2}}, "plan": ["start rollout-1"],
    }  # fmt: skip
    assert client.delete("/v1/engines/engine-0", dry_run="true")["plan"] == ["drain engine-0"]
    assert (control.performed, client.get("/v1/operations")) == ([], {"operations": []})


@pytest.mark.parametrize("verb", ["pause", "resume", "checkpoint", "evaluate", "roles/trainer/restart"])
def test_what_needs_no_body_takes_none_or_one(client: ControlClient, asked: Asked, verb: str) -> None:
    status, answer = asked("POST", f"/v1/{verb}")
    assert status == 202
    assert client.follow(answer, lambda line: None)["state"] == "done"
    assert asked("POST", f"/v1/{verb}", {"id": "again"})[0] == 202


def test_attach_and_detach(client: ControlClient, control: FakeControl) -> None:
    body = {"name": "lab", "url": "https://lab.example:8000", "capacity": 4, "token": "env:RELAX_ENGINE_LAB"}
    assert client.follow(client.post("/v1/engines", body), lambda line: None)["state"] == "done"
    (request,) = control.performed
    assert isinstance(request, Attach)
    assert str(request.token) == "env:RELAX_ENGINE_LAB"
    assert [one["name"] for one in client.get("/v1/engines")["engines"]] == ["engine-0", "lab"]
    assert client.follow(client.delete("/v1/engines/lab", id="off"), lambda line: None)["id"] == "off"
    assert control.performed[1] == Detach("lab")


def test_an_operation_is_cancelled(client: ControlClient, control: FakeControl) -> None:
    control.hold = True
    answer = client.post("/v1/pause", {})
    assert client.get(f"/v1/operations/{answer['id']}", wait_s=0.01)["state"] in ("pending", "running")
    client.delete(f"/v1/operations/{answer['id']}")
    assert client.follow(answer, lambda line: None)["state"] == "cancelled"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/scale", {"replicas": {"rollout": 0}}, "replicas.rollout: Input should be greater than or equal to 1"),
        ("/v1/scale", {"replicas": {}}, "at least 1"),
        ("/v1/scale", {"replica": {"rollout": 2}}, "Extra inputs are not permitted"),
        ("/v1/scale", {"replicas": {"rollout": 2}, "timeout_s": -1}, "timeout_s"),
        ("/v1/scale", {"replicas": {"rollout": 2}, "id": "../x"}, "id: "),
        ("/v1/scale", "{", "JSON"),
        ("/v1/engines", {"name": "x", "url": "file:///etc/passwd"}, "must be http://HOST:PORT"),
        ("/v1/engines", {"name": "x", "url": "http://u:hunter2@lab:1"}, "holds a user, a password"),
        ("/v1/engines", {"name": "x", "url": "http://lab:1?key=hunter2"}, "holds a user, a password, a query"),
        ("/v1/engines", {"name": "x", "url": "http://[hunter2"}, "is no URL"),
        (
            "/v1/engines",
            {"name": "x", "url": "http://lab:1", "token": "hunter2"},
            "must be env:RELAX_ENGINE_...",
        ),
        (
            "/v1/engines",
            {"name": "x", "url": "http://lab:1", "token": "env:AWS_SECRET"},
            "must be env:RELAX_ENGINE_...",
        ),
    ],
)
def test_rule_se1_a_wrong_body_is_refused_and_not_repeated(asked: Asked, path: str, body: Any, said: str) -> None:
    status, answer = asked("POST", path, body)
    assert status == 422
    assert said in answer["error"]["message"]
    assert answer["error"]["next"]
    assert "hunter2" not in json.dumps(answer)


def test_errors_say_what_to_do(asked: Asked, client: ControlClient, control: FakeControl) -> None:
    for (method, path, body), (status, code) in {
        ("POST", "/v1/scale", '{"replicas": {"critic": 2}}'): (400, "refused"),
        ("DELETE", "/v1/engines/nobody", None): (400, "refused"),
        ("POST", "/v1/roles/nobody/restart", None): (400, "refused"),
        ("GET", "/v1/operations/nobody", None): (404, "unknown"),
        ("GET", "/v1/nothing", None): (404, "no_such_path"),
        ("PUT", "/v1/scale", None): (405, "no_such_path"),
        ("GET", "/docs", None): (404, "no_such_path"),
    }.items():
        found, answer = asked(method, path, body)
        assert (found, answer["error"]["code"]) == (status, code), path
        assert answer["error"]["message"]
        assert answer["error"]["next"]
    client.post("/v1/pause", {"id": "x"})
    with pytest.raises(UserError, match=r"give a new request an id of its own$"):
        client.post("/v1/resume", {"id": "x"})


def test_a_bug_is_one_line_and_the_server_goes_on(
    asked: Asked, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "run", lambda: 1 / 0)
    status, answer = asked("GET", "/v1/run")
    assert (status, answer["error"]["code"]) == (500, "bug")
    assert "Traceback" not in json.dumps(answer)
    assert asked("GET", "/v1/roles")[0] == 200


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer wrong", "Basic dTpw", "Bearer  ", "Bearer \xff"])
def test_rule_se1_nothing_is_answered_without_the_token(asked: Asked, authorization: str | None) -> None:
    for method, path in (("GET", "/v1/run"), ("POST", "/v1/pause"), ("GET", "/v1/openapi.json"), ("GET", "/nothing")):
        status, answer = asked(method, path, Authorization=authorization)
        assert (status, answer["error"]["code"]) == (401, "no_token")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", ""]
)
def test_rule_se1_another_host_name_is_refused_even_with_the_token(asked: Asked, host: str) -> None:
    status, answer = asked("GET", "/v1/run", Host=host)
    assert (status, answer["error"]["code"]) == (421, "wrong_host")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:8080", "10.1.2.3"])
def test_the_names_of_this_machine_are_accepted(asked: Asked, host: str) -> None:
    assert asked("GET", "/v1/run", Host=host)[0] == 200


def test_a_configured_name_is_accepted(
    control: FakeControl, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTROL_TOKEN", "0123456789abcdef")
    section = ControlSection(hosts=("Head.Cluster",), token="env:CONTROL_TOKEN")  # type: ignore[arg-type]
    with served(control, directory, section) as url:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
        headers = {"Authorization": "bearer 0123456789abcdef", "Host": "head.cluster:1"}
        connection.request("GET", "/v1/run", headers=headers)
        assert connection.getresponse().status == 200
        connection.close()
        assert json.loads(directory.control.read_text())["token"] == "env:CONTROL_TOKEN"
        assert not directory.control_token.exists()
        assert "0123456789abcdef" not in directory.control.read_text()
        assert ControlClient(directory).get("/v1/run")["run"] == "fake"


def test_a_large_body_is_refused(asked: Asked) -> None:
    status, answer = asked("POST", "/v1/scale", "x" * (MAX_BODY_BYTES + 1))
    assert (status, answer["error"]["code"]) == (413, "too_large")


def test_a_body_that_does_not_end_is_refused(
    url: str, asked: Asked, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax.services.control.guard.BODY_TIMEOUT_S", 0.05)
    parts = urlsplit(url)
    token = directory.control_token.read_text().strip()
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as raw:
        raw.sendall(
            f"POST /v1/pause HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Length: 10\r\n\r\n{{".encode()
        )
        assert b" 408 " in raw.recv(4096)
    assert asked("GET", "/v1/run")[0] == 200


def test_rule_se1_the_files_are_private_and_go_with_the_server(control: FakeControl, directory: RunDirectory) -> None:
    old = os.umask(0)
    try:
        with served(control, directory) as url:
            for path in (directory.control, directory.control_token):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
            told = json.loads(directory.control.read_text())
            assert (told["url"], told["token"], told["process"]) == (url, "file:control.token", os.getpid())
            assert url.startswith("http://127.0.0.1:")
            first = directory.control_token.read_text()
        assert not directory.control.exists()
        assert not directory.control_token.exists()
        with served(control, directory):
            assert directory.control_token.read_text() != first
    finally:
        os.umask(old)


def test_what_a_killed_controller_left_is_cleared_with_the_run(directory: RunDirectory) -> None:
    for path in (directory.control, directory.control_token):
        path.write_text("{}")
    assert directory.clear() == ()


def test_rule_se1_off_loopback_without_a_token_it_does_not_start(directory: RunDirectory) -> None:
    server = ControlServer(build_application(Operator(FakeControl())), ControlSection(host="0.0.0.0"), directory)
    with pytest.raises(
        UserError, match=r"'0\.0\.0\.0', which other machines can reach, and run\.control\.token is null"
    ):
        server.open()
    assert not directory.control.exists()
    with pytest.raises(ConfigError, match=r"can be reached from other machines \(SE1\)"):
        load_config(["recipes/quickstart.yaml"], ["run.control.host=0.0.0.0"])
    load_config(["recipes/quickstart.yaml"], ["run.control={host: 0.0.0.0, token: env:TOKEN}"])


def test_rule_se1_a_token_that_can_be_guessed_is_refused(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTROL_TOKEN", "hunter2")
    section = ControlSection(host="0.0.0.0", token="env:CONTROL_TOKEN")  # type: ignore[arg-type]
    server = ControlServer(build_application(Operator(FakeControl())), section, directory)
    with pytest.raises(UserError, match="at least 16 ASCII characters") as caught:
        server.open()
    assert "hunter2" not in str(caught.value)


def test_every_interface_is_reached_by_the_loopback_address_here(
    control: FakeControl, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTROL_TOKEN", "0123456789abcdef")
    section = ControlSection(host="0.0.0.0", token="env:CONTROL_TOKEN")  # type: ignore[arg-type]
    with served(control, directory, section) as url:
        assert url.startswith("http://127.0.0.1:")
        assert ControlClient(directory).get("/v1/run")["step"] == 7


def test_a_port_in_use_is_one_sentence(directory: RunDirectory, url: str) -> None:
    port = urlsplit(url).port
    server = ControlServer(build_application(Operator(FakeControl())), ControlSection(port=port or 0), directory)
    with pytest.raises(
        UserError, match=rf"cannot listen at 127\.0\.0\.1 port {port} \(run\.control\): Address already in use"
    ):
        server.open()


async def test_a_server_that_cannot_say_where_it_is_leaves_its_port(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("relax.services.control.server._write_private", full)
    server = ControlServer(build_application(Operator(FakeControl())), ControlSection(), directory)
    with pytest.raises(OSError, match="No space left"):
        await server.serve()
    assert server._socket is not None
    assert server._socket.fileno() == -1


def test_rule_i3_no_proxy_of_the_environment_is_asked(client: ControlClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert client.get("/v1/run")["run"] == "fake"


def test_the_client_says_why_nobody_answers(tmp_path: Path, control: FakeControl) -> None:
    root = tmp_path / "run"
    with pytest.raises(UserError, match="is not under way; go on with it by `relax train --resume"):
        ControlClient(RunDirectory(root)).get("/v1/run")
    with RunDirectory(root) as directory:
        with pytest.raises(UserError, match=r"runtime\.type=local all of it is one process"):
            ControlClient(directory).get("/v1/run")
        with served(control, directory):
            left = directory.control.read_text(), directory.control_token.read_text()
        directory.control.write_text(left[0])
        directory.control_token.write_text(left[1])
        with pytest.raises(RelaxError, match="its controller may be restarting"):
            ControlClient(directory).get("/v1/run")
    with pytest.raises(UserError, match="not under way any more"):
        ControlClient(RunDirectory(root)).get("/v1/run")
    directory.control.write_text("[]")
    with pytest.raises(UserError, match="cannot be read"):
        ControlClient(RunDirectory(root)).get("/v1/run")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/scale", {"replicas": {"rollout": True}}),
        ("/v1/scale", {"replicas": {"rollout": "2"}}),
        ("/v1/scale", {"replicas": {"rollout": 2.0}}),
        ("/v1/scale", {"replicas": {"rollout": 2}, "timeout_s": True}),
        ("/v1/pause", {"dry_run": "yes"}),
        ("/v1/pause", "null"),
        ("/v1/pause", []),
        ("/v1/engines", {"name": "lab", "url": "http://h:1", "capacity": True}),
    ],
)
def test_a_value_of_another_type_is_refused(asked: Asked, control: FakeControl, path: str, body: Any) -> None:
    status, answer = asked("POST", path, body)
    assert (status, answer["error"]["code"]) == (422, "invalid")
    assert control.performed == []


def test_whole_seconds_and_no_body_are_fine(asked: Asked) -> None:
    assert asked("POST", "/v1/scale", {"replicas": {"rollout": 2}, "timeout_s": 30})[0] == 202
    assert asked("POST", "/v1/pause")[0] == 202
    assert asked("DELETE", "/v1/engines/engine-0?timeout_s=30&dry_run=true")[0] == 200


def connected(url: str, number: int) -> list[socket.socket]:
    parts = urlsplit(url)
    return [socket.create_connection((parts.hostname, parts.port), timeout=20) for _ in range(number)]


def test_rule_se1_connections_that_ask_nothing_keep_nobody_out(client: ControlClient, url: str) -> None:
    silent = connected(url, MAX_CONNECTIONS + 16)
    try:
        for _ in range(3):
            assert client.get("/v1/run")["run"] == "fake"
    finally:
        for one in silent:
            one.close()


def test_rule_se1_a_connection_that_asks_nothing_is_closed(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(connection, "SILENT_S", 0.2)
    silent, slow = connected(url, 2)
    slow.sendall(b"GET /v1/run HTTP/1.1\r\nHost: ")
    for one in (silent, slow):
        with one:
            assert one.recv(1) == b"", "closed by the server"


def test_an_answer_that_takes_long_is_not_interrupted(
    monkeypatch: pytest.MonkeyPatch, client: ControlClient, control: FakeControl
) -> None:
    monkeypatch.setattr(connection, "SILENT_S", 0.05)
    control.hold = True
    pause = client.post("/v1/pause", {})
    assert client.get(f"/v1/operations/{pause['id']}", 0.5)["state"] == "running"


def test_the_client_says_when_the_server_is_full(client: ControlClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 10_000)
    silent = connected(client._address()[0], MAX_CONNECTIONS + 1)
    try:
        with pytest.raises(RelaxError, match=r"as many requests as it can at once \(503\); ask again"):
            client.get("/v1/run")
    finally:
        for one in silent:
            one.close()
