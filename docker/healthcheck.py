"""What the image's HEALTHCHECK asks: is the worker thread alive? Standard library only, so that it costs some milliseconds.

It knows the port from the environment alone: give a container `ARMATURE_PORT`, not `--port`.
"""

import os
import sys
from http.client import HTTPConnection, HTTPException

asked = os.environ.get("ARMATURE_PORT", "")
port = int(asked) if asked.isdecimal() else 8000  # tcp://… is of a Service of our name; the server ignores it too
connection = HTTPConnection("127.0.0.1", port, timeout=5)
try:
    connection.request("GET", "/healthz")
    sys.exit(connection.getresponse().status != 200)
except (OSError, HTTPException) as error:
    sys.exit(f"/healthz on port {port}: {error}")
