"""The server's process: it listens, runs uvicorn until a stop signal, and maps failures to the exit status."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import shlex
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, cast

import uvicorn

from app.api.access import RESERVED_CONNECTIONS, ApiKeys, ConnectionLimits
from app.api.application import Application, create_app
from app.api.http_protocol import BoundedProtocol, ProtocolFactory, protocol_factory
from app.api.routing import OTHER
from app.engine.worker import SWITCH_SECONDS
from app.errors import ServingFailed, SettingsInvalid, StartupError
from app.hardware.decision import format_bytes, format_count
from app.hardware.plan.plan import decide_api_processes
from app.models.encoders.config import EncoderConfig
from app.server.api_processes import ApiProcesses
from app.server.listeners import BACKLOG, Listeners, TlsListener, listen
from app.server.log_output import log_to_stderr
from app.server.models import ModelRegistry
from app.server.prepare import Prepared, prepare_start
from app.server.startup import ServerRuntime
from app.server.termination_log import describe_exception
from app.settings import Settings, served_models
from app.tracing.start import start_tracer
from app.weights.files import open_regular
from app.weights.program import ProgramCheckpoint

log = logging.getLogger(__name__)
# A client cannot connect to the address that stands for every address of the machine.
_LOOPBACK = {"//0.0.0.0:": "//127.0.0.1:", "//[::]:": "//[::1]:"}

AUTO_CONNECTIONS = 4_096  # each takes about 20 KB while it is idle
# The process's own: the model's files, the log, sockets and threads, and the connections of probes.
RESERVED_FILES = 40 + RESERVED_CONNECTIONS
STOP_SECONDS = 4.5  # from the end of draining to the end of the process, at most
EXIT_SECONDS = 1.0  # from the end of serving to the end of the process, at most


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C and return the exit status. Raises `StartupError` or `ServingFailed`."""
    log_to_stderr(settings)
    sys.setswitchinterval(SWITCH_SECONDS)
    tls = tls_context(settings)
    tracer = start_tracer(settings, os.environ)
    failures: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True  # uvicorn reads it ten times a second

    addresses: list[str] = []  # known before the worker starts

    models = served_models(settings)
    # One model that is loaded with the server, and stays, needs no registry.
    is_single = len(models) == 1 and models[0].load == "start" and models[0].unload_after_seconds == "never"

    def on_ready(ready: Prepared, seconds: float, has_chat: bool) -> None:
        for label, text in start_summary(ready, addresses[0], seconds, has_chat, names_model=not is_single):
            log.info("%s", text, extra={"label": label})

    serving: ServerRuntime | ModelRegistry
    number = decide_api_processes(settings).value
    processes = None if number == 1 else ApiProcesses(number, settings, models, is_single)
    if is_single:
        beside = None if processes is None else processes.beside(0)
        serving = ServerRuntime(prepare_start(models[0]), on_fatal, on_ready, tracer, beside=beside)
    else:
        serving = ModelRegistry(settings, models, on_fatal, on_ready, tracer, processes)
    app = create_app(serving.runtime()) if processes is None else processes.application(serving)
    server = PunctualServer(server_config(app, settings, number), settings.drain_seconds, tls)
    # uvicorn raises the signal again after draining. This harmless handler receives it, so that the process ends by
    # returning.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    _read_keys_on_hangup(app.state.runtime.api_keys, processes)
    server.listeners = listen(settings.host, settings.port)
    if processes is not None:
        processes.sockets, server.on_shutdown = server.listeners.sockets, processes.drain
    addresses += server.listeners.urls(tls is not None)
    announce(addresses)
    try:
        server.run(sockets=list(server.listeners.sockets))
    except SystemExit:  # uvicorn exits so if the application's startup or shutdown has failed
        failures.append(
            ServingFailed(
                "The server could not start its threads; the log says why. Is the limit of processes reached?"
            )
        )
    finally:
        server.listeners.remove_files()
    log.info("stopped")
    for failure in failures:
        why = f"The worker has failed, so no request can be served: {describe_exception(failure).rstrip('.')}. The log has the traceback."
        failed_with = failure if isinstance(failure, StartupError) else ServingFailed(why)
        _end_process_after(EXIT_SECONDS, failed_with.exit_code)
        raise failed_with from failure
    _end_process_after(EXIT_SECONDS)  # a thread that reads a text cannot be ended, and Python would wait for it
    if serving.alive:
        # A thread within native code cannot be ended, and finalizing the interpreter would crash it: so exit without
        # finalizing.
        logging.shutdown()
        os._exit(0)
    return 0


def announce(addresses: Sequence[str]) -> None:
    """Print each address on standard output, which may be closed or full."""
    try:
        if sys.stdout is None:  # it was closed when Python started
            raise OSError("it is closed")
        sys.stdout.write("".join(f"listening on {address}\n" for address in addresses))
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: a closed file
        log.warning("standard output cannot be written (%s): listening on %s", error, ", ".join(addresses))
        if sys.stdout is not None:  # Python would write the rest at its end, and fail again
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _read_keys_on_hangup(keys: ApiKeys | tuple[str, ...], processes: ApiProcesses | None) -> None:
    """Let SIGHUP read the key file again, as it does for daemons. In a terminal, it still ends the process."""

    def read(*_: object) -> None:
        if isinstance(keys, ApiKeys):
            keys.read()
        if processes is not None:
            processes.read_keys()

    if not (sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()):
        signal.signal(signal.SIGHUP, read)


class PunctualServer(uvicorn.Server):
    """uvicorn's server, whose process ends at `drain_seconds` and a few more after a stop signal, in any state.

    With `tls`, TCP connections are counted before their handshakes. `on_shutdown` is called when draining begins.
    """

    def __init__(self, config: uvicorn.Config, drain_seconds: float, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._stop_seconds, self._tls = drain_seconds + STOP_SECONDS, tls
        self.listeners = Listeners(())
        self.on_shutdown: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        given = sockets or []
        unix = [each for each in given if each.family == socket.AF_UNIX]
        own = [] if self._tls is None else [each for each in given if each.family != socket.AF_UNIX]
        await super().startup([each for each in given if each not in unix and each not in own])
        loop = asyncio.get_running_loop()
        for each in unix:
            self.servers.append(await loop.create_unix_server(self._make_protocol, sock=each, backlog=BACKLOG))
        for each in own:
            assert self._tls is not None, "it was looked at above"
            listener = TlsListener(each, self._tls, self._make_protocol)
            listener.start()
            self.servers.append(cast(asyncio.base_events.Server, listener))

    def _make_protocol(self) -> BoundedProtocol:
        make = cast(ProtocolFactory, self.config.http_protocol_class)
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Remove the files of UNIX sockets, so that nobody waits there, and drain."""
        self.listeners.remove_files()
        self.on_shutdown()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, and limit the time for it: to none after a second Ctrl-C.

        uvicorn would then only stop waiting, and report each task that it cancels.
        """
        if self.should_exit and sig == signal.SIGINT:
            self.listeners.remove_files()
            _end_process_after(0.0, why="stopped by a second Ctrl-C: open requests are cut off")
            return
        self._end_in_time()
        super().handle_exit(sig, frame)

    def drain(self) -> None:
        """Begin to stop without a signal."""
        self._end_in_time()
        self.should_exit = True

    def _end_in_time(self) -> None:
        if not self.should_exit:
            _end_process_after(self._stop_seconds)


def _end_process_after(
    seconds: float, status: int = 0, why: str = "stopping took longer than expected: the process ends now"
) -> None:
    def end() -> None:
        log.warning("%s", why)
        logging.shutdown()
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def server_config(app: Application, settings: Settings, num_processes: int = 1) -> uvicorn.Config:
    """Return uvicorn's configuration: no access log, no WebSockets, bounded request heads."""
    limits = connection_limits(settings, num_processes)
    limits.count_error = lambda status, code: app.state.runtime.metrics.responded(OTHER, OTHER, status, code)
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=cast(type[asyncio.Protocol], protocol_factory(limits)),
        lifespan="on",
        ws="none",
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=cast(int, settings.keep_alive_seconds),  # passed to the event loop, which accepts fractions
        timeout_graceful_shutdown=cast(
            int, settings.drain_seconds
        ),  # passed to asyncio's timeout, which accepts fractions
    )


def connection_limits(settings: Settings, num_processes: int = 1) -> ConnectionLimits:
    """Return the bounds on connections, of which each process that serves has its part.

    The operating system's limit of open files bounds them too.
    """
    open_files = resource.RLIM_INFINITY
    with suppress(OSError, ValueError):
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = sys.maxsize if open_files == resource.RLIM_INFINITY else max(open_files - RESERVED_FILES, 1)
    total = AUTO_CONNECTIONS if settings.max_connections == "auto" else settings.max_connections
    wanted = max(total // num_processes, 1)
    if possible < wanted:
        log.warning(
            "at most %d connections instead of %d: this process may open %d files. Raise that limit (ulimit -n).",
            possible,
            wanted,
            open_files,
        )
    return ConnectionLimits(min(wanted, possible), settings.write_timeout_seconds)


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the context with the certificate and its key; None without TLS. Raises `SettingsInvalid`."""
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise SettingsInvalid("tls_cert and tls_key must be given together: TLS needs a certificate and its key.")
    try:
        for file in (settings.tls_cert, settings.tls_key):
            open_regular(file).close()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise SettingsInvalid(
            f"tls_cert {settings.tls_cert} and tls_key {settings.tls_key} cannot be used: {error}. Both are PEM files; "
            "the key has no password."
        ) from error
    return context


def start_summary(
    prepared: Prepared, url: str, seconds: float, has_chat: bool, names_model: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each line; `seconds` is the time of the start. `names_model`: there are several."""
    plan, needs = prepared.plan, prepared.needs
    stored = needs.stored_quantization or needs.stored_dtype
    yield (
        "model",
        f"{prepared.model_name}: {needs.architecture}, {needs.num_parameters / 1e6:,.0f}M parameters"
        f"{f' of {stored}' if stored else ''}, from {prepared.checkpoint.location}",
    )
    yield "machine", _machine(prepared)
    yield "precision", f"{plan.weights.precision}. {plan.decisions['precision'].reason}"
    yield "memory", _memory(prepared)
    capacity = plan.decisions["capacity_tokens_per_second"]
    yield "speed", capacity.reason if capacity.value else plan.decisions["speed_source"].reason
    page = "/ is a page to try the model, " if prepared.settings.page == "on" else ""
    yield "ready", f"in {seconds:.1f} s at {url} ({page}/docs lists the API)"
    yield "try", try_command(prepared, url, has_chat, names_model)


def _machine(prepared: Prepared) -> str:
    facts, plan = prepared.facts, prepared.plan
    gpu = plan.gpu(facts)
    threads = format_count(plan.cpu.threads, "thread")
    processor = facts.cpu.name or facts.architecture
    where = f"{processor}, {threads}, {plan.weights.kernels} kernels"
    if gpu is not None:
        where = gpu.name
    elif plan.placement.device != "cpu":
        where = f"{plan.placement.device} of {processor}"
    return f"{where}, {format_bytes(facts.usable_bytes)} of memory available"


def _memory(prepared: Prepared) -> str:
    plan, needs = prepared.plan, prepared.needs
    weights = f"{format_bytes(plan.memory.weight_bytes)} of weights"
    if not needs.generates:
        return weights
    states = f" and {format_bytes(plan.memory.state_bytes)} of recurrent states" if plan.memory.state_bytes else ""
    return (
        f"{weights}, {format_bytes(plan.memory.kv_cache_bytes)} of KV cache{states} for "
        f"{format_count(plan.memory.max_running_seqs, 'sequence')} at a time, of up to {plan.memory.max_model_len:,} tokens"
    )


def try_command(prepared: Prepared, url: str, has_chat: bool, names_model: bool = False) -> str:
    """Return a `curl` command whose answer shows what the model does, to paste into a shell of this machine."""
    path, body = _first_request(prepared, has_chat)
    if names_model and body is not None:
        path, body = ("/v1/classify", {"input": body["inputs"]}) if path == "/predict" else (path, body)
        body = {"model": prepared.model_name, **body}
    for every, own in _LOOPBACK.items():
        url = url.replace(every, own)
    words = ["curl", f"{url}{path}"]
    if url.startswith("unix:"):
        words = ["curl", "--unix-socket", url.removeprefix("unix:"), f"http://localhost{path}"]
    if url.startswith("https:"):
        words.append("--insecure")  # the certificate names a host, not this address
    if prepared.settings.api_keys or prepared.settings.api_key_file is not None:
        words += ["-H", "authorization: Bearer YOUR_KEY"]
    if body is not None:
        words += ["-H", "content-type: application/json", "-d", json.dumps(body)]
    return shlex.join(words)


def _first_request(prepared: Prepared, has_chat: bool) -> tuple[str, dict[str, Any] | None]:
    if isinstance(prepared.checkpoint, ProgramCheckpoint):
        return f"/v2/models/{prepared.model_name}", None  # its inputs and outputs
    config = prepared.checkpoint.model_config
    if isinstance(config, EncoderConfig):
        return ("/predict" if config.labels else "/v1/embeddings"), (
            {"inputs": "I like you."} if config.labels else {"input": "I like you."}
        )
    if has_chat:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
    return "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 64}
