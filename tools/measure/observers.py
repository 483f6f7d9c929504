"""Measure what it costs to be watched: `python -m tools.measure.observers [--model DIR] [--rounds 8]`.

One server is watched: the page Now is open, in Chromium where there is one, and requests are traced at 10% to a collector
in this process. The other server is not. Both run all the time, and by turns each decodes for eight clients, so that a
busy machine disturbs both alike. The medians of their tokens/s are printed, and the quartiles of the paired ratios,
watched over unwatched.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import httpx

from tools.measure.two_checkouts import HERE, generate, server, story

CLIENTS = 8
MAX_TOKENS = 64
METRICS_SECONDS, STEPS_SECONDS = 2, 6  # as in app/web/now.js
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
Show = Callable[[bool], Awaitable[None]]  # shows the page Now, or another one that asks nothing


class Discarding(BaseHTTPRequestHandler):
    """Collector that counts the requests with spans."""

    num_requests = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        Discarding.num_requests += 1
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[str]:
    """Run a collector and yield its URL."""
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Discarding)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{collector.server_address[1]}"
    finally:
        collector.shutdown()


@asynccontextmanager
async def browsing(url: str) -> AsyncIterator[Show]:
    """Open the web page in Chromium."""
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        program = next(filter(None, map(shutil.which, BROWSERS)))
        browser = await driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = await browser.new_page()
        await page.goto(url)

        async def show(now: bool) -> None:
            await page.evaluate("(part) => { location.hash = part }", "#now" if now else "#machine")

        yield show
        await browser.close()


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[Show]:
    """Send the requests of the page Now at its intervals, without a browser."""
    polls: list[asyncio.Task[None]] = []

    async def poll(path: str, seconds: float) -> None:
        async with httpx.AsyncClient() as client:
            while True:
                (await client.get(f"{url}{path}")).raise_for_status()
                await asyncio.sleep(seconds)

    async def show(now: bool) -> None:
        for task in polls:
            task.cancel()
        paths = (("/metrics", METRICS_SECONDS), ("/info/steps?after=0", STEPS_SECONDS))
        polls[:] = [asyncio.create_task(poll(*each)) for each in paths] if now else []

    yield show
    await show(False)


async def decode(client: httpx.AsyncClient, url: str, turn: int, seconds: float) -> float:
    """Return the tokens/s of all clients, each of which sends one request after the other for so many seconds."""
    began = time.perf_counter()

    async def ask(number: int) -> int:
        tokens = 0
        while time.perf_counter() - began < seconds:
            usage = await generate(client, url, f"{story(turn, 0)} of client {number}", MAX_TOKENS)
            tokens += usage["completion_tokens"]
        return tokens

    tokens = sum(await asyncio.gather(*map(ask, range(CLIENTS))))
    return tokens / (time.perf_counter() - began)


async def measure(unwatched: str, watched: str, rounds: int, seconds: float, has_browser: bool) -> list[list[float]]:
    """Return the samples of both servers."""
    samples: list[list[float]] = [[], []]
    opened = browsing(watched) if has_browser else asking(watched)
    async with httpx.AsyncClient(timeout=300) as client, opened as show:
        for url in (unwatched, watched):
            await decode(client, url, 0, 1.0)  # records the steps
        for turn in range(rounds):
            for index in sorted(range(2), reverse=bool(turn % 2)):
                await show(index == 1)
                samples[index].append(await decode(client, (unwatched, watched)[index], turn + 1, seconds))
                await show(False)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory; the demo if not given")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each server in a round")
    parser.add_argument("--ratio", default="0.1", help="share of the requests that are traced")
    parser.add_argument("--no-browser", action="store_true", help="send the page's requests without a browser")
    arguments = parser.parse_args()
    has_browser = bool(find_spec("playwright") and any(map(shutil.which, BROWSERS)) and not arguments.no_browser)
    with ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        flags = ["--precision", arguments.precision, "--cache-dir", cache]
        flags += ["--model", arguments.model] if arguments.model else []
        traces = ["--otlp-traces-endpoint", stack.enter_context(collecting()), "--trace-sample-ratio", arguments.ratio]
        unwatched, _ = stack.enter_context(server(HERE, flags))
        watched, _ = stack.enter_context(server(HERE, flags + traces))
        samples = asyncio.run(measure(unwatched, watched, arguments.rounds, arguments.seconds, has_browser))
        plain, seen = samples
    by = "in Chromium" if has_browser else "by its requests, without a browser"
    print(f"page Now open {by}; traced: {arguments.ratio} of the requests, {Discarding.num_requests} batches of spans")
    ratios = statistics.quantiles([new / old for old, new in zip(plain, seen, strict=True)], n=4)
    medians = statistics.median(plain), statistics.median(seen)
    print(f"tokens/s of {CLIENTS} clients: unwatched {medians[0]:.1f}, watched {medians[1]:.1f}")
    print(
        f"ratio of the medians {medians[1] / medians[0]:.3f}; paired {ratios[1]:.3f} ({ratios[0]:.3f} to {ratios[2]:.3f})"
    )


if __name__ == "__main__":
    main()
