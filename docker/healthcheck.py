"""The image's HEALTHCHECK: succeeds while the worker thread is alive.

It uses only the standard library and takes some milliseconds. It reads the address and the port from the environment, so
set `ARMATURE_HOST` and `ARMATURE_PORT` for a container instead of `--host` and `--port`.
"""

import os
import socket
import sys
from http.client import HTTPConnection, HTTPException

ANY_ADDRESS = {"": ("127.0.0.1", "::1"), "0.0.0.0": ("127.0.0.1",), "::": ("127.0.0.1", "::1")}
SECONDS = 5

host = os.environ.get("ARMATURE_HOST", "").split(",")[0].strip().strip("[]")
asked = os.environ.get("ARMATURE_PORT", "")
port = int(asked) if asked.isdecimal() else 8000  # a Service named armature sets tcp://…, which the server also ignores


def connect() -> socket.socket:
    """Connect to the first address of the server; `::` serves IPv4 too, unless the kernel cannot."""
    if host.startswith("unix:"):
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        found.settimeout(SECONDS)
        found.connect(host.removeprefix("unix:"))
        return found
    *others, last = ANY_ADDRESS.get(host, (host,))
    for address in others:
        try:
            return socket.create_connection((address, port), SECONDS)
        except OSError:
            continue
    return socket.create_connection((last, port), SECONDS)


connection = HTTPConnection("localhost", port)
try:
    connection.sock = connect()
    connection.request("GET", "/healthz")
    sys.exit(connection.getresponse().status != 200)
except (OSError, HTTPException) as error:
    sys.exit(f"/healthz on {host if host.startswith('unix:') else f'port {port}'}: {error}")
