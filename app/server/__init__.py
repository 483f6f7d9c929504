"""The server process: ASGI application, start and shutdown."""
