"""The environment of the tests: only loopback, no settings of the shell."""

from __future__ import annotations

import os
import socket

import pytest


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("example.invalid", 80), ("2001:db8::1", 80)])
def test_the_world_is_out_of_reach(address: tuple[str, int]) -> None:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as connection, pytest.raises(AssertionError, match="loopback only"):
        connection.connect(address)


def test_loopback_is_not() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        assert connection.getpeername() == listener.getsockname()


def test_no_setting_comes_from_the_shell() -> None:
    """But for the one that is the tests' own: a start measures nothing."""
    assert [name for name in os.environ if name.startswith("ARMATURE_")] == ["ARMATURE_CALIBRATE"]
