"""Listening: addresses of both protocols, several at once, and files of UNIX sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import SettingsInvalid
from app.server.listeners import Listeners, UnixSocketFile, listen
from app.settings import Settings, load_settings

HAS_IPV6 = socket.has_dualstack_ipv6() and Path("/proc/net/if_inet6").exists()
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")


@contextlib.contextmanager
def listening(*hosts: str, port: int = 0) -> Iterator[Listeners]:
    found = listen(hosts, port)
    try:
        yield found
    finally:
        found.close()


def can_connect(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 10).close()
    except OSError:
        return False
    return True


@needs_ipv6
@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        (("::",), ["http://[::]"]),
        (("",), ["http://[::]"]),
        (("0.0.0.0", "::"), ["http://0.0.0.0", "http://[::]"]),
        (("::", "0.0.0.0"), ["http://[::]", "http://0.0.0.0"]),
        (("127.0.0.1", "::1"), ["http://127.0.0.1", "http://[::1]"]),
    ],
)
def test_clients_of_both_protocols_on_one_port(hosts: tuple[str, ...], addresses: list[str]) -> None:
    with listening(*hosts) as found:
        urls = [url.rpartition(":") for url in found.urls()]
        assert [url for url, _, _ in urls] == addresses
        (port,) = {int(port) for _, _, port in urls}
        assert can_connect("127.0.0.1", port) and can_connect("::1", port)
    assert not can_connect("127.0.0.1", port)


def test_one_address_is_one_address() -> None:
    with listening("127.0.0.1") as found:
        assert len(found.sockets) == 1
        assert not can_connect("127.0.0.2", found.sockets[0].getsockname()[1])
        assert found.urls(has_tls=True) == [found.urls()[0].replace("http:", "https:")]


def test_a_name_is_all_its_addresses_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: object) -> list[object]:
        assert host == "two.example"
        return [(socket.AF_INET, 1, 6, "", (address, port)) for address in ("192.0.2.1", "127.0.0.1", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with listening("two.example") as found:
        assert [each.getsockname()[0] for each in found.sockets] == ["127.0.0.1"]


def test_a_port_that_is_taken_ends_the_start_and_closes_the_others(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with listening("127.0.0.1") as first:
        port = first.sockets[0].getsockname()[1]
        with pytest.raises(
            SettingsInvalid, match=f"Cannot listen on 127.0.0.1 port {port}: .*in use.*--host and --port"
        ):
            listen((f"unix:{path}", "127.0.0.1"), port)
    assert not path.exists()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such name", "x" * 300 + ".example"])
def test_an_address_of_another_machine(host: str) -> None:
    with pytest.raises(SettingsInvalid, match="Cannot listen on"):
        listen((host,), 0)


def test_a_unix_socket_is_for_its_user_and_group_and_removed_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    umask = os.umask(0o22)
    try:
        with listening(f"unix:{path}", "127.0.0.1") as found:
            assert found.urls()[0] == f"unix:{path}" and found.urls()[1].startswith("http://127.0.0.1:")
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
            with pytest.raises(SettingsInvalid, match=f"Cannot listen on unix:{path}: .*another server listens there"):
                listen((f"unix:{path}",), 0)
    finally:
        assert os.umask(umask) == 0o22
    assert not path.exists()


def test_a_file_that_a_server_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listening(f"unix:{path}"):
        pass
    assert not path.exists()


def test_a_socket_that_was_replaced_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with listening(f"unix:{path}") as found:
        path.rename(tmp_path / "old.sock")
        path.write_text("of somebody else")
        assert found.files == (UnixSocketFile.of(tmp_path / "old.sock"),) or found.files[0].path == path
    assert path.read_text() == "of somebody else"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path.write_text("a note"), "exists and is no socket"),
        (lambda path: path.mkdir(), "exists and is no socket"),
        (lambda path: path.symlink_to("/dev/null"), "exists and is no socket"),
    ],
)
def test_other_files_stay(tmp_path: Path, make: object, sentence: str) -> None:
    path = tmp_path / "x.sock"
    make(path)  # type: ignore[operator]
    with pytest.raises(SettingsInvalid, match=sentence):
        listen((f"unix:{path}",), 0)
    assert path.is_symlink() or path.exists()


def test_a_path_that_cannot_be() -> None:
    for path in ("/nonexistent/folder/x.sock", "/tmp/" + "x" * 200):
        with pytest.raises(SettingsInvalid, match=f"^Cannot listen on unix:{path}: "):
            listen((f"unix:{path}",), 0)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("0.0.0.0,::", ("0.0.0.0", "::")),
        (" [::1] , localhost", ("::1", "localhost")),
        ("unix:/run/x.sock", ("unix:/run/x.sock",)),
        ("", ("",)),
    ],
)
def test_hosts_are_read(text: str, hosts: tuple[str, ...]) -> None:
    assert load_settings(host=text)[0].host == hosts


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("/tmp/x.sock", "unix:PATH"),
        ("x.sock", "unix:PATH"),
        ("127.0.0.1,", "empty"),
        ("127.0.0.1:8000", "has a port"),
        ("[::1]:8000", "has a port"),
    ],
)
def test_a_host_that_is_none_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(SettingsInvalid, match=f"^host .*{sentence}"):
        load_settings(host=text)


def test_the_default_is_this_machine_alone() -> None:
    assert Settings().host == ("127.0.0.1",)
