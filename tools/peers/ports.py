"""Ports of loopback: free ones, and whether a server answers."""

from __future__ import annotations

import socket
import urllib.request


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def is_answered(url: str) -> bool:
    """Return True if a GET succeeds; False also for a status of 400 or more."""
    try:
        with urllib.request.urlopen(url, timeout=30):
            return True
    except OSError:
        return False
