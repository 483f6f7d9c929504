"""Measure what the table of routes saves an embedding server (`app.api.routing.RouteTable`).

    python -m tools.measure.route_table [--model bert] [--rounds 40] [--requests 100]

One server answers short texts on `/v1/embeddings`, in turn with the table and by FastAPI's router alone. The figures are
CPU seconds, so that other processes disturb them less: of the event loop's thread, and of the whole process with the
model on one thread. The table stays only if it is worth `MIN_GAIN` of the requests that a core's time allows.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

from app.api.routing import RouteTable
from app.server.app import create_app
from app.server.listeners import listen
from app.server.prepare import prepare
from app.server.process import server_config
from app.server.startup import ServerRuntime
from app.settings import Settings

PATH = "/v1/embeddings"
BODY = json.dumps({"input": "Once upon a time there was a fox."})
NUM_CONNECTIONS = 8
MIN_GAIN = 0.05
VARIANTS = ("table", "router")


class AlternatingApp:
    """ASGI application that serves with the table of routes or without it, as `variant` says."""

    def __init__(self, runtime: Any) -> None:
        self.variant = "table"
        self._apps = {variant: create_app(runtime) for variant in VARIANTS}
        without = self._apps["router"]
        without.user_middleware = [each for each in without.user_middleware if each.cls is not RouteTable]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        lifespan = scope["type"] == "lifespan"
        await self._apps["table" if lifespan else self.variant](scope, receive, send)


def send_requests(port: int) -> None:
    """Client process: send as many requests as each line of standard input says, then print a line."""
    connections = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(NUM_CONNECTIONS)]

    def send(connection: http.client.HTTPConnection, count: int) -> None:
        for _ in range(count):
            connection.request("POST", PATH, BODY, {"content-type": "application/json"})
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.status

    for line in sys.stdin:
        threads = [threading.Thread(target=send, args=(each, int(line))) for each in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(flush=True)


def measure(app: AlternatingApp, loop: threading.Thread, port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return CPU microseconds per request: of the loop's thread and of the process, by variant."""
    command = [sys.executable, "-m", "tools.measure.route_table", "--client", str(port)]
    assert loop.ident is not None
    clock = time.pthread_getcpuclockid(loop.ident)
    rounds: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin and client.stdout
        for number in range(2 * (options.rounds + 1)):
            app.variant = VARIANTS[number % 2]
            before = time.clock_gettime(clock), time.process_time()
            client.stdin.write(f"{options.requests}\n")
            client.stdin.flush()
            assert client.stdout.readline(), "the client has failed"
            after = time.clock_gettime(clock), time.process_time()
            each = 1e6 / (options.requests * NUM_CONNECTIONS)
            if number >= 2:  # the first round warms up
                rounds[app.variant].append(((after[0] - before[0]) * each, (after[1] - before[1]) * each))
        client.stdin.close()
    return {
        name: {variant: statistics.median(pair[index] for pair in rounds[variant]) for variant in VARIANTS}
        for index, name in enumerate(("loop", "process"))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("bert"))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--requests", type=int, default=100, help="requests of each connection in a round")
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        send_requests(options.client)
        return 0
    settings = Settings(model=options.model, port=0, threads=1)
    failures: list[BaseException] = []
    runtime = ServerRuntime(prepare(settings), failures.append)
    app = AlternatingApp(runtime.runtime())
    (listener,) = listen(settings.host, settings.port).sockets
    server = uvicorn.Server(server_config(app, settings))  # type: ignore[arg-type]
    loop = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    loop.start()
    while not runtime.service.ready:
        assert not failures, failures
        time.sleep(0.1)
    try:
        figures = measure(app, loop, listener.getsockname()[1], options)
    finally:
        server.should_exit = True
        loop.join()
    gains = {name: 1 - each["table"] / each["router"] for name, each in figures.items()}
    print(f"{'CPU µs per request':20}{'table':>10}{'router':>10}{'saved':>10}")
    for name, each in figures.items():
        print(f"{name:20}{each['table']:10.0f}{each['router']:10.0f}{gains[name]:10.1%}")
    requests = figures["process"]["router"] / figures["process"]["table"] - 1
    print(f"requests a core can serve: {requests:+.1%} with the table, which needs {MIN_GAIN:.0%} to stay")
    return 0 if requests >= MIN_GAIN else 1


if __name__ == "__main__":
    sys.exit(main())
