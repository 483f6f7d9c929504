"""The server's process: it listens, runs uvicorn until a stop signal, and maps failures to the exit status."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from typing import cast

import uvicorn
from fastapi import FastAPI

from app.api.middleware import BoundedHeadProtocol
from app.errors import ServingFailed, SettingsInvalid, StartupError
from app.server.app import create_app
from app.server.prepare import prepare
from app.server.startup import ServerRuntime
from app.server.termination_log import describe_exception
from app.settings import Settings

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = (
    75  # longer than the 60 s of common load balancers, which would otherwise reuse a connection as it closes
)
BACKLOG = 2048  # connections that wait while the loop is busy; uvicorn's default
# Interval at which Python switches threads: the longest wait of the event loop for a busy worker thread.
SWITCH_SECONDS = 0.001


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C and return the exit status.

    Raises:
        StartupError: The server could not start.
        ServingFailed: The worker failed while serving.
    """
    _log_to_stderr(settings.log_level)
    sys.setswitchinterval(SWITCH_SECONDS)
    prepared = prepare(settings)
    failures: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True  # uvicorn reads it ten times a second

    serving = ServerRuntime(prepared, on_fatal)
    server = uvicorn.Server(server_config(create_app(serving.runtime()), settings))
    # uvicorn raises the signal again after draining. This harmless handler receives it, so that the process ends by
    # returning.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    listener = listen(settings.host, settings.port)
    sys.stdout.write(f"listening on {url_of(listener)}\n")
    sys.stdout.flush()
    try:
        server.run(sockets=[listener])
    except SystemExit:  # uvicorn exits so if the application's startup or shutdown has failed
        failures.append(
            ServingFailed(
                "The server could not start its threads; the log says why. Is the limit of processes reached?"
            )
        )
    log.info("stopped")
    for failure in failures:
        raise (
            failure if isinstance(failure, StartupError) else ServingFailed(_worker_failure_message(failure))
        ) from failure
    if serving.worker.alive:
        # A thread within native code cannot be ended, and finalizing the interpreter would crash it: so exit without
        # finalizing.
        logging.shutdown()
        os._exit(0)
    return 0


def _worker_failure_message(failure: BaseException) -> str:
    return (
        f"The worker has failed, so no request can be served: {describe_exception(failure)}. The log has the traceback."
    )


def listen(host: str, port: int) -> socket.socket:
    """Open the port, so that clients and probes can connect from the first moment.

    Raises:
        SettingsInvalid: The address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsInvalid(
            f"Cannot listen on {host} port {port}: {error}. Choose others with --host and --port."
        ) from error


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket; IPv6 hosts are bracketed."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return uvicorn's configuration: no access log, no WebSockets, bounded request heads."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=BoundedHeadProtocol,
        lifespan="on",
        ws="none",
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=cast(
            int, settings.drain_seconds
        ),  # passed to asyncio's timeout, which accepts fractions
    )


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )
    # This process logs its events itself. uvicorn would also log malformed requests, which are not events of the
    # server.
    logging.getLogger("uvicorn.error").setLevel(logging.DEBUG if level == "debug" else logging.ERROR)
