"""The server process: ASGI application, start, calibration cache and shutdown."""
