"""The image's HEALTHCHECK: succeeds while the worker thread is alive.

It uses only the standard library and takes some milliseconds. It reads the port from the environment, so set
`ARMATURE_PORT` for a container instead of `--port`.
"""

import os
import sys
from http.client import HTTPConnection, HTTPException

asked = os.environ.get("ARMATURE_PORT", "")
port = int(asked) if asked.isdecimal() else 8000  # a Service named armature sets tcp://…, which the server also ignores
connection = HTTPConnection("127.0.0.1", port, timeout=5)
try:
    connection.request("GET", "/healthz")
    sys.exit(connection.getresponse().status != 200)
except (OSError, HTTPException) as error:
    sys.exit(f"/healthz on port {port}: {error}")
