"""What the image's HEALTHCHECK asks: is the worker thread alive? Standard library only, so that it costs some milliseconds."""

import os
import sys
from http.client import HTTPConnection, HTTPException

port = os.environ.get("ARMATURE_PORT", "8000")
connection = HTTPConnection("127.0.0.1", int(port) if port.isdigit() else 8000, timeout=2)
try:
    connection.request("GET", "/healthz")
    sys.exit(connection.getresponse().status != 200)
except (OSError, HTTPException) as error:
    sys.exit(f"/healthz on port {port}: {error}")
