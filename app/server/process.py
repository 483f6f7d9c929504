"""The server's process: it listens, runs uvicorn until a stop signal, and maps failures to the exit status."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI

from app.api.http_protocol import ConnectionLimits, protocol_factory
from app.errors import ServingFailed, SettingsInvalid, StartupError
from app.server.app import create_app
from app.server.log_output import log_to_stderr
from app.server.prepare import Prepared
from app.server.start_summary import start_summary
from app.server.startup import ServerRuntime
from app.server.termination_log import describe_exception
from app.server.unfetched_model import prepare_start
from app.settings import Settings
from app.tracing.start import start_tracer

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = (
    75  # longer than the 60 s of common load balancers, which would otherwise reuse a connection as it closes
)
AUTO_CONNECTIONS = 4_096  # each takes about 20 KB while it is idle
RESERVED_FILES = 40  # the process's own: the model's files, the log, sockets and threads
BACKLOG = 2048  # connections that wait while the loop is busy; uvicorn's default
# Interval at which Python switches threads: the longest wait of the event loop for a busy worker thread.
SWITCH_SECONDS = 0.001
STOP_SECONDS = 4.5  # from the end of draining to the end of the process, at most
EXIT_SECONDS = 1.0  # from the end of serving to the end of the process, at most


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C and return the exit status.

    Raises:
        StartupError: The server could not start.
        ServingFailed: The worker failed while serving.
    """
    log_to_stderr(settings)
    sys.setswitchinterval(SWITCH_SECONDS)
    check_tls(settings)
    tracer = start_tracer(settings, os.environ)
    prepared = prepare_start(settings)
    failures: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True  # uvicorn reads it ten times a second

    addresses: list[str] = []  # known before the worker starts

    def on_ready(ready: Prepared, seconds: float, has_chat: bool) -> None:
        for label, text in start_summary(ready, addresses[0], seconds, has_chat):
            log.info("%s", text, extra={"label": label})

    serving = ServerRuntime(prepared, on_fatal, on_ready, tracer)
    server = PunctualServer(server_config(create_app(serving.runtime()), settings), settings.drain_seconds)
    # uvicorn raises the signal again after draining. This harmless handler receives it, so that the process ends by
    # returning.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    listener = listen(settings.host, settings.port)
    addresses.append(url_of(listener, settings.tls_cert is not None))
    sys.stdout.write(f"listening on {addresses[0]}\n")
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
        failed_with = failure if isinstance(failure, StartupError) else ServingFailed(_worker_failure_message(failure))
        _end_process_after(EXIT_SECONDS, failed_with.exit_code)
        raise failed_with from failure
    _end_process_after(EXIT_SECONDS)  # a thread that reads a text cannot be ended, and Python would wait for it
    if serving.worker.alive:
        # A thread within native code cannot be ended, and finalizing the interpreter would crash it: so exit without
        # finalizing.
        logging.shutdown()
        os._exit(0)
    return 0


class PunctualServer(uvicorn.Server):
    """uvicorn's server, whose process ends after a stop signal at `drain_seconds` and a few more, in any state."""

    def __init__(self, config: uvicorn.Config, drain_seconds: float) -> None:
        super().__init__(config)
        self._stop_seconds = drain_seconds + STOP_SECONDS

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, and limit the time for it."""
        if not self.should_exit:
            _end_process_after(self._stop_seconds)
        super().handle_exit(sig, frame)


def _end_process_after(seconds: float, status: int = 0) -> None:
    """End this process in `seconds` with the exit status if it has not ended by then."""

    def end() -> None:
        log.warning("stopping took longer than expected: the process ends now")
        logging.shutdown()
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


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


def url_of(listener: socket.socket, has_tls: bool = False) -> str:
    """Return the URL of a listening socket; IPv6 hosts are bracketed."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return uvicorn's configuration: no access log, no WebSockets, bounded request heads."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=cast(type[asyncio.Protocol], protocol_factory(connection_limits(settings))),
        lifespan="on",
        ws="none",
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=cast(
            int, settings.drain_seconds
        ),  # passed to asyncio's timeout, which accepts fractions
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


def connection_limits(settings: Settings) -> ConnectionLimits:
    """Return the bounds on connections. The operating system's limit of open files bounds them too."""
    open_files = resource.RLIM_INFINITY
    with suppress(OSError, ValueError):
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = sys.maxsize if open_files == resource.RLIM_INFINITY else max(open_files - RESERVED_FILES, 1)
    wanted = AUTO_CONNECTIONS if settings.max_connections == "auto" else settings.max_connections
    if possible < wanted:
        log.warning(
            "at most %d connections instead of %d: this process may open %d files. Raise that limit (ulimit -n).",
            possible,
            wanted,
            open_files,
        )
    return ConnectionLimits(min(wanted, possible), settings.write_timeout_seconds)


def check_tls(settings: Settings) -> None:
    """Check that the certificate and its key can be used.

    Raises:
        SettingsInvalid: One is given without the other, or they cannot be read or do not belong together.
    """
    if settings.tls_cert is None and settings.tls_key is None:
        return
    if settings.tls_cert is None or settings.tls_key is None:
        raise SettingsInvalid("tls_cert and tls_key must be given together: TLS needs a certificate and its key.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise SettingsInvalid(
            f"tls_cert {settings.tls_cert} and tls_key {settings.tls_key} cannot be used: {error}. Both are PEM files; "
            "the key has no password."
        ) from error
