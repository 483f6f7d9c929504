"""What a process gets from the server that starts it."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import sys
from collections.abc import Iterator

import pytest

from app.server.subprocesses import inherited_descriptors

_ABOVE_SELECT = 1100  # `select` takes descriptors up to 1,023


@pytest.fixture
def _many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= _ABOVE_SELECT:
        pytest.skip(f"a process may have {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _ABOVE_SELECT + 1), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_many_files")
def test_descriptors_of_a_server_with_many_clients_are_moved_down(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        high = fcntl.fcntl(theirs, fcntl.F_DUPFD, _ABOVE_SELECT)
        monkeypatch.setattr(sys, "argv", ["-c", "root", "name", str(high)])
        (low,) = inherited_descriptors()
        assert low < 1024
        os.write(low, b"x")
        assert ours.recv(1) == b"x"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(high)
        os.close(low)
