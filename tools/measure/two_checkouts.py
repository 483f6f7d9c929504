"""Compare the servers of two checkouts in turn: `python -m tools.measure.two_checkouts OTHER [--model DIR] [--rounds 60]`.

The figures are the latency of one token, the tokens/s of 1, 8 and 32 clients, and the prompt tokens/s of new prompts of
about 512 tokens. Of an encoder, it is the latency of one short text.

Both servers run all the time and one of them is asked at a time, so that a busy machine disturbs both alike. For each
figure the medians and the quartiles of the paired ratios (this checkout over the other) are printed. A ratio whose
quartiles lie on both sides of 1 is within the noise. OTHER needs the native library of this checkout in armature_kernels.
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
CLIENTS = (1, 8, 32)
PROMPT_WORDS = 500  # a word of the prompts is one token in most vocabularies


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


async def generate(client: httpx.AsyncClient, url: str, prompt: str, max_tokens: int) -> dict[str, int]:
    """Return the usage of one completion."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = await client.post(f"{url}/v1/completions", json=body)
    usage: dict[str, int] = response.raise_for_status().json()["usage"]
    return usage


async def embed(client: httpx.AsyncClient, url: str, text: str) -> None:
    """Request the embedding of one text."""
    (await client.post(f"{url}/v1/embeddings", json={"input": text})).raise_for_status()


async def measure_encoders(urls: list[str], rounds: int) -> dict[str, list[list[float]]]:
    """Return the samples of the one figure of an encoder, one list for each server."""
    samples: list[list[float]] = [[] for _ in urls]
    async with httpx.AsyncClient(timeout=300) as client:
        for turn in range(rounds):
            for index in sorted(range(len(urls)), reverse=bool(turn % 2)):
                began = time.perf_counter()
                await embed(client, urls[index], story(turn, 4))
                samples[index].append(1000 * (time.perf_counter() - began))
    return {"latency of one short text, ms": samples}


def story(turn: int, words: int) -> str:
    """Return a prompt that no earlier turn has sent, so that no prefix is cached."""
    return " ".join([f"Story {turn}", *("word of a story that goes on".split() * words)[:words]])


async def measure(urls: list[str], rounds: int, max_tokens: int) -> dict[str, list[list[float]]]:
    """Return the samples of each figure, one list for each server."""
    latency, prefill = "latency of one token, ms", "prompt tokens/s, about 512 tokens"
    rates = {f"tokens/s, {number} client{'s' * (number > 1)}": number for number in CLIENTS}
    samples: dict[str, list[list[float]]] = {name: [[] for _ in urls] for name in (latency, *rates, prefill)}
    async with httpx.AsyncClient(timeout=300) as client:
        for turn in range(rounds):
            for name, of_servers in samples.items():
                for index in sorted(range(len(urls)), reverse=bool(turn % 2)):
                    words, tokens = (PROMPT_WORDS if name == prefill else 0), (max_tokens if name in rates else 1)
                    prompts = [f"{story(turn, words)} of client {number}" for number in range(rates.get(name, 1))]
                    began = time.perf_counter()
                    usages = await asyncio.gather(*(generate(client, urls[index], each, tokens) for each in prompts))
                    seconds = time.perf_counter() - began
                    counted = "prompt_tokens" if name == prefill else "completion_tokens"
                    rate = sum(usage[counted] for usage in usages) / seconds
                    of_servers[index].append(1000 * seconds if name == latency else rate)
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
        if httpx.get(f"{urls[1]}/info").json()["model"]["kind"] == "encoder":
            samples = asyncio.run(measure_encoders(urls, arguments.rounds))
        else:
            samples = asyncio.run(measure(urls, arguments.rounds, arguments.max_tokens))
        for name, (other, this) in samples.items():
            ratios = statistics.quantiles([new / old for old, new in zip(other, this, strict=True)], n=4)
            medians = f"other {statistics.median(other):.2f}, this {statistics.median(this):.2f}"
            print(f"{name}: {medians}; ratio {ratios[1]:.3f} ({ratios[0]:.3f} to {ratios[2]:.3f})")


if __name__ == "__main__":
    main()
