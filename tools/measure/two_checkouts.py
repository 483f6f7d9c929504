"""Compare the servers of two checkouts in turn: `python -m tools.measure.two_checkouts OTHER [--model DIR] [--rounds 60]`.

Both servers run all the time and one of them is asked at a time, so that a busy machine disturbs both alike. For each
figure the medians and the quartiles of the paired ratios (this checkout over the other) are printed. A ratio whose
quartiles lie on both sides of 1 is within the noise. OTHER needs the native library of this checkout in app/kernels.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

HERE = Path(__file__).resolve().parents[2]
LISTENING = re.compile(r"listening on (http://\S+)")
NUM_CLIENTS = 8


@contextmanager
def server(checkout: Path, flags: list[str]) -> Iterator[tuple[str, float]]:
    """Start a server; yield its URL and the seconds until it was ready."""
    began = time.monotonic()
    command = [sys.executable, "-m", "app", "serve", "--port", "0", "--calibrate", "off", *flags]
    process = subprocess.Popen(
        command,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = next((found for line in process.stdout if (found := LISTENING.search(line))), None)
        if found is None:
            raise SystemExit(f"the server of {checkout} ended with status {process.wait()}")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        while process.poll() is None and not is_ready(found[1]):
            time.sleep(0.01)
        yield found[1], time.monotonic() - began
    finally:
        process.terminate()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


async def generate(client: httpx.AsyncClient, url: str, prompt: str, max_tokens: int) -> int:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = await client.post(f"{url}/v1/completions", json=body)
    return int(response.raise_for_status().json()["usage"]["completion_tokens"])


async def measure(urls: list[str], rounds: int, max_tokens: int) -> dict[str, list[list[float]]]:
    """Return the samples of each figure, one list for each server."""
    names = ("latency of one token, ms", "tokens/s, 1 client", f"tokens/s, {NUM_CLIENTS} clients")
    samples: dict[str, list[list[float]]] = {name: [[] for _ in urls] for name in names}
    async with httpx.AsyncClient(timeout=300) as client:
        for turn in range(rounds):
            for name, clients, tokens in zip(names, (1, 1, NUM_CLIENTS), (1, max_tokens, max_tokens), strict=True):
                for index in sorted(range(len(urls)), reverse=bool(turn % 2)):
                    began = time.perf_counter()
                    prompts = [f"Story {turn} of client {number}" for number in range(clients)]
                    counts = await asyncio.gather(*(generate(client, urls[index], each, tokens) for each in prompts))
                    seconds = time.perf_counter() - began
                    samples[name][index].append(1000 * seconds if tokens == 1 else sum(counts) / seconds)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout, for example a git worktree")
    parser.add_argument("--model", help="checkpoint directory; the demo if not given")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        started = []
        for checkout in (arguments.other.resolve(), HERE):
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            flags = ["--precision", arguments.precision, "--cache-dir", cache]
            flags += ["--model", arguments.model] if arguments.model else []
            started.append(stack.enter_context(server(checkout, flags)))
        print(f"ready after: other {started[0][1]:.2f} s, this {started[1][1]:.2f} s (once each)")
        urls = [url for url, _ in started]
        for name, (other, this) in asyncio.run(measure(urls, arguments.rounds, arguments.max_tokens)).items():
            ratios = statistics.quantiles([new / old for old, new in zip(other, this, strict=True)], n=4)
            medians = f"other {statistics.median(other):.2f}, this {statistics.median(this):.2f}"
            print(f"{name}: {medians}; ratio {ratios[1]:.3f} ({ratios[0]:.3f} to {ratios[2]:.3f})")


if __name__ == "__main__":
    main()
