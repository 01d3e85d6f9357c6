"""Which files and addresses a run may read (MM6), and that it reads them whole or not at all."""

import asyncio
import io
import os
import threading
import time
from contextlib import contextmanager
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from relax.config.media import MediaSection
from relax.core.message import MediaPart
from relax.data.dataset import Refusal
from relax.data.media.access import MediaAccess
from relax.data.media.download import Download, is_public
from relax.data.media.origin import Origins, source_home
from relax.data.media.reference import RecordMedia, file_uri
from tests.data.media_fake import picture, png, write
from tests.data.toy import source_config


def access_of(roots=(), **values) -> MediaAccess:
    section = MediaSection.model_validate({"roots": tuple(map(str, roots)), **values})
    return MediaAccess(section, Origins(has_roots=bool(roots)))


async def fetched(access: MediaAccess, text: str, home: Path | None = None):
    """What a record that holds `text` for an image gets."""
    return await access.fetch(RecordMedia("record:toy/0", home).read("image", text))


async def reason_of(awaitable) -> str:
    with pytest.raises(Refusal) as raised:
        await awaitable
    return raised.value.reason


# --- files -----------------------------------------------------------------------------------------------------------


async def test_content_is_named_by_its_digest(tmp_path):
    path = write(tmp_path, "a b.png", b"content")
    content = await fetched(access_of([tmp_path]), "a b.png")
    assert content.uri == file_uri(str(path))
    assert content.digest == blake2b(b"content", digest_size=16).hexdigest()
    assert (content.num_bytes, content.place) == (7, str(path))
    assert content.is_unchanged()
    os.utime(path, ns=(1, 1))
    assert not content.is_unchanged()
    path.unlink()
    assert not content.is_unchanged()


async def test_relative_paths_are_of_the_first_root_that_has_them(tmp_path):
    roots = [tmp_path / name for name in ("one", "two")]
    write(roots[0], "a.png", b"1")
    write(roots[1], "a.png", b"2")
    write(roots[1], "b.png", b"3")
    access = access_of(roots)
    assert (await fetched(access, "a.png")).place == str(roots[0] / "a.png")
    assert (await fetched(access, "b.png")).place == str(roots[1] / "b.png")
    assert (await fetched(access, "../two/a.png")).place == str(roots[1] / "a.png")
    assert await reason_of(fetched(access, "c.png")) == "missing medium"


ESCAPES = [
    "../secret.png",
    "sub/../../secret.png",
    "{root}/../secret.png",
    "file://{root}/%2e%2e/secret.png",
    "file://{root}/..%2Fsecret.png",
    "file:../secret.png",
    "/etc/passwd",
    "//etc/passwd",
    "/proc/self/environ",
    "/dev/zero",
    "link.png",
    "folder-link/secret.png",
    "{root}-beside/secret.png",
    "../nothing-there.png",
]


@pytest.mark.parametrize("text", ESCAPES)
async def test_rule_mm6_no_path_leaves_the_roots(tmp_path, text):
    root = tmp_path / "root"
    write(root, "sub/in.png", b"in")
    write(tmp_path, "secret.png", b"secret")
    write(tmp_path, "root-beside/secret.png", b"secret")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "folder-link").symlink_to(tmp_path)
    assert await reason_of(fetched(access_of([root]), text.format(root=root))) == "forbidden path"
    assert await reason_of(fetched(access_of(), text.format(root=root), root)) == "forbidden path"


async def test_links_within_a_root_and_roots_that_are_links_are_fine(tmp_path):
    root = tmp_path / "root"
    path = write(root, "in.png", b"in")
    (root / "link.png").symlink_to("in.png")
    (tmp_path / "alias").symlink_to(root)
    access = access_of([tmp_path / "alias"])
    assert (await fetched(access, "link.png")).place == str(path)
    assert (await fetched(access, str(tmp_path / "alias/in.png"))).place == str(path)


async def test_tilde_and_nul_are_no_way_out(tmp_path):
    access = access_of([tmp_path])
    assert await reason_of(fetched(access, "~/.ssh/id_rsa")) == "missing medium"
    assert await reason_of(access.fetch(MediaPart("image", "file:a%00b.png"))) == "forbidden path"


async def test_what_is_no_file_is_refused_at_once(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    access = access_of([tmp_path])
    async with asyncio.timeout(5):
        assert await reason_of(fetched(access, "folder")) == "not a file"
        assert await reason_of(fetched(access, "pipe")) == "not a file"
        assert await reason_of(fetched(access, "loop")) == "unreadable medium"
        assert await reason_of(fetched(access, "x/" * 2000)) == "missing medium"


async def test_a_link_that_is_put_in_between_is_seen(tmp_path, monkeypatch):
    """Somebody may change the folder between the look at the path and the open."""
    root = tmp_path / "root"
    write(root, "sub/a.png", b"in")
    write(tmp_path, "evil/a.png", b"secret")
    real_open = os.open

    def meddle(path, *args, **kwargs):
        if str(path).endswith("a.png"):
            (root / "sub").rename(root / "moved")
            (root / "sub").symlink_to(tmp_path / "evil")
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", meddle)
    assert await reason_of(fetched(access_of([root]), "sub/a.png")) == "forbidden path"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(FileNotFoundError(2, "gone"), "missing medium"), (PermissionError(13, "denied"), "unreadable medium")],
)
async def test_a_file_that_is_there_and_cannot_be_opened(tmp_path, monkeypatch, error, reason):
    write(tmp_path, "a.png", b"in")

    def refuse(path, *args, **kwargs):
        raise error

    monkeypatch.setattr(os, "open", refuse)
    assert await reason_of(fetched(access_of([tmp_path]), "a.png")) == reason


async def test_limits_on_bytes(tmp_path):
    write(tmp_path, "full.png", b"x" * 11)
    write(tmp_path, "fits.png", b"x" * 10)
    write(tmp_path, "empty.png", b"")
    access = access_of([tmp_path], max_bytes=10)
    assert await reason_of(fetched(access, "full.png")) == "too large a medium"
    assert (await fetched(access, "fits.png")).num_bytes == 10
    assert await reason_of(fetched(access, "empty.png")) == "empty medium"


async def test_without_roots_a_source_reads_its_own_folder(tmp_path, monkeypatch):
    class Lines:
        def __init__(self, name):
            self.config = source_config(name=name, path=str(tmp_path / name / "a.jsonl"))
            write(tmp_path / name, "a.jsonl", b"")
            self.image = write(tmp_path / name, "images/a.png", name.encode())

    one, two = Lines("one"), Lines("two")
    origins = Origins()
    parts = [origins.reader(each, each.config, 0).read("image", "images/a.png") for each in (one, two)]
    assert [part.uri for part in parts] == [file_uri(str(one.image)), file_uri(str(two.image))]
    access = MediaAccess(MediaSection(), origins)
    assert (await access.fetch(parts[0], "one")).place == str(one.image)
    assert await reason_of(access.fetch(parts[0], "two")) == "forbidden path"
    assert (await access.fetch(parts[0])).place == str(one.image)
    monkeypatch.chdir(tmp_path)
    nowhere = MediaAccess(MediaSection(), Origins())
    assert (await nowhere.fetch(parts[0])).place == str(one.image)


@pytest.mark.parametrize(
    ("path", "home"),
    [
        ("data/a.jsonl", "data"),
        ("data", "data"),
        ("data/*.jsonl", "data"),
        ("data/**/x/*.jsonl", "data"),
        ("org/name-on-the-hub", ""),
    ],
)
def test_the_folder_of_a_source(tmp_path, monkeypatch, path, home):
    write(tmp_path, "data/a.jsonl", b"")
    monkeypatch.chdir(tmp_path)
    assert source_home(source_config(path=path)) == tmp_path / home
    assert source_home(source_config(type="generator", function="a:b")) == tmp_path


# --- records ---------------------------------------------------------------------------------------------------------


class Given:
    def __init__(self, *values):
        self.values, self.reads = values, 0

    def __len__(self):
        return len(self.values)

    def read(self, index):
        self.reads += 1
        return self.values[index]

    def location(self, index):
        return f"row {index}"


async def test_what_a_record_holds_is_found_again():
    contents = [png(picture(2, 2, seed)) for seed in range(3)]
    dataset = Given({"prompt": "<image>", "images": contents[:1]}, {"prompt": "<image><image>", "images": contents[1:]})
    config = source_config(path="a.jsonl", name="a/b", media_keys={"image": "images"})
    origins = Origins()
    reader = origins.reader(dataset, config, 1)
    parts = reader.read_list("image", "images", dataset.values[1]["images"])
    assert [part.uri for part in parts] == ["record:a/b/1/0", "record:a/b/1/1"]
    access = MediaAccess(MediaSection(), origins)
    assert (await access.fetch(parts[1])).place == contents[2]
    assert dataset.reads == 1
    origins.keep(reader)
    assert (await access.fetch(parts[0])).place == contents[1]
    assert dataset.reads == 1  # it was read a moment ago
    assert origins.location("a/b", 1) == "row 1"
    for uri in ("record:a/b/2/0", "record:c/0/0", "record:a/b/x/0", "record:a/b/0", "record:"):
        assert await reason_of(access.fetch(MediaPart("image", uri))) == "missing medium"
    assert await reason_of(access.fetch(MediaPart("image", "record:a/b/0/7"))) == "changed medium"


def test_a_file_that_grows_while_it_is_hashed_is_not_read_to_its_end(tmp_path):
    access = access_of([tmp_path], max_bytes=10)
    facts = write(tmp_path, "a.png", b"x").stat()
    with pytest.raises(Refusal, match="grows beyond"):
        access._hash("file:///a.png", "/a.png", io.BytesIO(b"x" * 11), facts)


def test_what_was_used_last_is_kept():
    origins = Origins(kept_bytes=100)
    config, dataset = source_config(path="a.jsonl"), Given({}, {}, {})
    for index in range(3):
        if index == 2:
            assert origins.medium("record:toy/0/0").value == b"x" * 40
        reader = origins.reader(dataset, config, index)
        reader.read("image", b"x" * 40)
        origins.keep(reader)
    assert [f"record:toy/{index}" in origins._recent for index in range(3)] == [True, False, True]


def test_what_was_read_a_moment_ago_is_bounded():
    origins = Origins(kept_bytes=100)
    dataset = Given({}, {}, {})
    config = source_config(path="a.jsonl")
    for index, size in enumerate((60, 60, 200)):
        reader = origins.reader(dataset, config, index)
        reader.read("image", b"x" * size)
        origins.keep(reader)
    assert [f"record:toy/{index}" in origins._recent for index in range(3)] == [False, True, False]


def test_two_sources_of_one_name_are_told_apart():
    origins = Origins()
    first, second = source_config(path="a.jsonl"), source_config(path="b.jsonl")
    data = [Given({}), Given({}), Given({})]
    assert origins.reader(data[0], first, 0).origin == "record:toy/0"
    assert origins.reader(data[1], second, 0).origin == "record:toy~2/0"
    assert origins.reader(data[2], first, 0).origin == "record:toy/0"
    assert origins.location("toy", 0) is None


# --- the web ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::5db8:d822", True),
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("192.0.2.1", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("::7f00:1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("2002:a00:1::1", False),
        ("2001:0:7f00:1::1", False),
        ("2001:db8::1", False),
        ("2130706433", False),
        ("nonsense", False),
    ],
)
def test_public_addresses(address, public):
    assert is_public(address) is public


class Handler(BaseHTTPRequestHandler):
    routes: dict = {}  # noqa: RUF012
    asked: list = []  # noqa: RUF012

    def do_GET(self):
        self.asked.append((self.path, dict(self.headers)))
        status, headers, chunks = self.routes[self.path]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for chunk in chunks:
                self.wfile.write(chunk() if callable(chunk) else chunk)
        except OSError:
            pass

    def log_message(self, *args):
        pass


@contextmanager
def serving(**routes):
    Handler.routes = {f"/{name}": route for name, route in routes.items()}
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def loopback(host, port):
    return ["127.0.0.1"]


def download_of(port, *, max_bytes=1000, fetch_s=5.0, **options) -> Download:
    """To the loopback server, whatever the host is called."""
    options = {"resolve": loopback, "is_allowed": lambda address: address == "127.0.0.1", **options}
    return Download([f"media.example:{port}"], max_bytes, fetch_s, **options)


async def test_content_comes_from_the_web_with_the_headers_of_its_host(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a proxy that nobody serves
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with serving(a=(200, {"Content-Length": "5"}, [b"hello"]), **{"b?x=1": (200, {}, [b"no ", b"length"])}) as port:
        download = download_of(port)
        assert await download.get(f"http://media.example:{port}/a") == b"hello"
        assert await download.get(f"http://MEDIA.example.:{port}/b?x=1#fragment") == b"no length"
        assert Handler.asked[0][1]["Host"] == f"media.example:{port}"
        assert "Authorization" not in Handler.asked[0][1]


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example:{port}/a",
        "http://media.example/a",
        "http://media.example:1/a",
        "http://127.0.0.1:{port}/a",
        "http://2130706433:{port}/a",
        "http://0x7f000001:{port}/a",
        "http://[::1]:{port}/a",
        "http://media.example.evil.example:{port}/a",
        "https://media.example/a",
    ],
)
async def test_rule_mm6_hosts_that_are_not_named_are_not_asked(url):
    with serving(a=(200, {}, [b"x"])) as port:
        assert await reason_of(download_of(port).get(url.format(port=port))) == "forbidden host"
        assert Handler.asked == []


@pytest.mark.parametrize(
    "url",
    [
        "http://user:password@media.example:{port}/a",
        "http://media.example:{port}/a b",
        "http://media.example:{port}/\r\nX-Evil: 1",
        "http://media.example:{port}/\u00e4",
        "http://media.example:99999/a",
        "http:///a",
        "http://[::1/a",
        "gopher://media.example:{port}/a",
    ],
)
async def test_urls_that_are_none(url):
    with serving(a=(200, {}, [b"x"])) as port:
        assert await reason_of(download_of(port).get(url.format(port=port))) == "unsupported URL"
        assert Handler.asked == []


async def test_without_hosts_the_web_is_off(tmp_path):
    assert await reason_of(fetched(access_of([tmp_path]), "https://example.org/a.png")) == "forbidden host"


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "2130706433", "0x7f.1", "017700000001", "[::1]", "[::ffff:127.0.0.1]"]
)
async def test_rule_mm6_a_named_host_with_a_private_address_is_not_asked(host):
    """The real resolver and the real check: every way to write loopback ends there."""
    with serving(a=(200, {}, [b"x"])) as port:
        download = Download([f"{host.strip('[]')}:{port}"], 1000, 5.0)
        assert await reason_of(download.get(f"http://{host}:{port}/a")) in ("forbidden host", "unreachable medium")
        assert Handler.asked == []


async def test_one_private_address_among_several_is_enough():
    async def both(host, port):
        return ["93.184.216.34", "127.0.0.1"]

    with serving(a=(200, {}, [b"x"])) as port:
        download = download_of(port, resolve=both, is_allowed=is_public)
        assert await reason_of(download.get(f"http://media.example:{port}/a")) == "forbidden host"
        assert Handler.asked == []


async def test_the_checked_address_is_the_one_that_is_connected_to():
    """A name that resolves to another address the second time gains nothing: it is asked once."""
    answers = [["127.0.0.1"], ["10.0.0.1"]]
    checked = []

    async def rebinding(host, port):
        return answers.pop(0)

    def is_allowed(address):
        checked.append(address)
        return address == "127.0.0.1"

    with serving(a=(200, {}, [b"x"])) as port:
        download = download_of(port, resolve=rebinding, is_allowed=is_allowed)
        assert await download.get(f"http://media.example:{port}/a") == b"x"
        assert checked == ["127.0.0.1"]
        assert await reason_of(download.get(f"http://media.example:{port}/a")) == "forbidden host"


async def test_redirects_are_checked_as_the_first(tmp_path):
    def to(place):
        return 302, {"Location": place, "Content-Length": "0"}, []

    routes = {
        "near": to("/a"),
        "far": to("http://evil.example/a"),
        "private": to("http://127.0.0.1/a"),
        "file": to(f"file://{tmp_path}/a"),
        "loop": to("/loop"),
        "a": (200, {}, [b"here"]),
    }
    with serving(**routes) as port:
        download, base = download_of(port), f"http://media.example:{port}"
        assert await download.get(f"{base}/near") == b"here"
        assert await reason_of(download.get(f"{base}/far")) == "forbidden host"
        assert await reason_of(download.get(f"{base}/private")) == "forbidden host"
        assert await reason_of(download.get(f"{base}/file")) == "unsupported URL"
        before = len(Handler.asked)
        assert await reason_of(download.get(f"{base}/loop")) == "unreachable medium"
        assert len(Handler.asked) == before + 6
    assert await reason_of(_redirected("https://a.example/x", "http://a.example/x")) == "forbidden host"


async def _redirected(url, place):
    return Download(["a.example"], 1, 1.0)._redirected(url, place)


async def test_limits_on_size_and_answers():
    routes = {
        "declared": (200, {"Content-Length": "1001"}, [b"x"]),
        "endless": (200, {}, [b"x" * 400] * 5),
        "short": (200, {"Content-Length": "10"}, [b"12345"]),
        "gone": (404, {"Content-Length": "0"}, []),
        "teapot": (302, {"Content-Length": "0"}, []),
        "nothing": (200, {"Content-Length": "0"}, []),
        "noise": (200, {"Content-Length": "many"}, [b"x"]),
    }
    expected = {
        "declared": "too large a medium",
        "endless": "too large a medium",
        "short": "unreachable medium",
        "gone": "unreachable medium",
        "teapot": "unreachable medium",
        "nothing": "empty medium",
    }
    with serving(**routes) as port:
        for name, reason in expected.items():
            assert await reason_of(download_of(port).get(f"http://media.example:{port}/{name}")) == reason


async def test_a_server_that_is_not_there_or_slow_costs_its_time_and_no_thread():
    def wait():
        time.sleep(0.05)
        return b"x"

    with serving(drip=(200, {"Content-Length": "900"}, [wait] * 900)) as port:
        start_s = time.perf_counter()
        reason = await reason_of(download_of(port, fetch_s=0.3).get(f"http://media.example:{port}/drip"))
        assert reason == "unreachable medium"
        assert time.perf_counter() - start_s < 3
    assert await reason_of(download_of(port).get(f"http://media.example:{port}/a")) == "unreachable medium"

    async def unknown(host, port):
        raise OSError("no such host")

    assert await reason_of(download_of(port, resolve=unknown).get(f"http://media.example:{port}/a")) == (
        "unreachable medium"
    )


async def test_a_server_that_never_answers_is_left():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        reason = await reason_of(download_of(port, fetch_s=0.2).get(f"http://media.example:{port}/a"))
    assert reason == "unreachable medium"


async def test_a_server_that_drips_headers_is_left():
    """Each byte comes in time; all of them would take longer than anybody waits."""
    import socket

    stop = threading.Event()

    def drip(server):
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not stop.wait(0.02):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        port = server.getsockname()[1]
        start_s = time.perf_counter()
        reason = await reason_of(download_of(port, fetch_s=0.3).get(f"http://media.example:{port}/a"))
        assert reason == "unreachable medium"
        assert time.perf_counter() - start_s < 5
        stop.set()
        thread.join()


async def test_https_is_verified():
    """A server without a certificate that this machine trusts is not believed."""
    import ssl

    with serving(a=(200, {}, [b"x"])) as port:
        reason = await reason_of(download_of(port).get(f"https://media.example:{port}/a"))
    assert reason == "unreachable medium"
    assert ssl.create_default_context().verify_mode == ssl.CERT_REQUIRED


async def test_what_was_downloaded_is_not_asked_for_again():
    content = png(picture(4, 4))
    with serving(a=(200, {}, [content])) as port:
        access = MediaAccess(MediaSection(), Origins(), download_of(port))
        part = MediaPart("image", f"http://media.example:{port}/a")
        found = await access.fetch(part)
        assert (found.place, found.uri) == (content, part.uri)
        again = await access.fetch(MediaPart("image", part.uri, found.digest))
        assert again == found
        assert len(Handler.asked) == 1
