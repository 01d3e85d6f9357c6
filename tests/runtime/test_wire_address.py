import socket
import stat
from pathlib import Path

import pytest

from relax.core.error import InvariantError, TransportError, UserError
from relax.runtime import wire_address
from relax.runtime.wire_address import TcpAddress, UnixAddress, bind, check_secret, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/a/b.sock", UnixAddress("/a/b.sock")),
        ("unix:b:c.sock", UnixAddress("b:c.sock")),
        ("tcp:127.0.0.1:0", TcpAddress("127.0.0.1", 0)),
        ("tcp:localhost:65535", TcpAddress("localhost", 65535)),
        ("tcp:[::1]:80", TcpAddress("::1", 80)),
    ],
)
def test_addresses_are_read_and_written(text: str, address: UnixAddress | TcpAddress) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:",
        "tcp:",
        "tcp:host",
        "tcp::80",
        "tcp:host:",
        "tcp:host:-1",
        "tcp:host:65536",
        "tcp:host:²",
        "http://a:1",
    ],
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match=r"is no address; expected unix:/path/to.sock or tcp:host:port"):
        parse_address(text)


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    longest = "/" + "é" * 51
    assert parse_address(f"unix:{longest}") == UnixAddress(longest)
    with pytest.raises(UserError, match=r"is 104 bytes long and the system takes 103; give the folder"):
        parse_address(f"unix:{longest}x")


@pytest.mark.parametrize("secret", [None, ""])
def test_rule_se1_tcp_needs_a_secret_a_unix_socket_does_not(secret: str | None) -> None:
    check_secret(UnixAddress("/a"), secret)
    check_secret(TcpAddress("127.0.0.1", 1), "s")
    with pytest.raises(InvariantError, match=r"\[SE1\] tcp:127.0.0.1:1 .* no secret was given"):
        check_secret(TcpAddress("127.0.0.1", 1), secret)


def test_rule_se1_a_socket_file_is_for_its_owner_alone(socket_folder: Path) -> None:
    address = UnixAddress(str(socket_folder / "a.sock"))
    with bind(address):
        assert stat.S_IMODE((socket_folder / "a.sock").lstat().st_mode) == 0o600


def test_the_file_of_a_dead_process_is_replaced_that_of_a_living_one_is_not(socket_folder: Path) -> None:
    address = UnixAddress(str(socket_folder / "a.sock"))
    bind(address).close()
    number = wire_address.file_number(address.path)
    with bind(address) as listening:
        listening.listen(1)
        with pytest.raises(TransportError, match=r"cannot listen on unix:.*a living process already does"):
            bind(address)
        wire_address.remove(address.path, None if number is None else number + (1 << 40))
        assert (socket_folder / "a.sock").exists()  # not ours
        wire_address.remove(address.path, wire_address.file_number(address.path))
    assert not (socket_folder / "a.sock").exists()


def test_a_busy_listener_is_alive(socket_folder: Path) -> None:
    address = UnixAddress(str(socket_folder / "a.sock"))
    with bind(address) as listening, socket.socket(socket.AF_UNIX) as waiting:
        listening.listen(0)
        waiting.connect(address.path)
        with pytest.raises(TransportError, match="a living process"):
            bind(address)


def test_what_is_no_socket_is_left_alone(socket_folder: Path) -> None:
    (socket_folder / "a.sock").write_text("mine")
    with pytest.raises(TransportError, match="something that is no socket lies there"):
        bind(UnixAddress(str(socket_folder / "a.sock")))
    assert (socket_folder / "a.sock").read_text() == "mine"


def test_a_taken_port_leaves_nothing_open() -> None:
    with bind(TcpAddress("127.0.0.1", 0)) as first:
        first.listen(1)
        address = wire_address.address_of(first)
        with pytest.raises(OSError, match="in use"):
            bind(address)
