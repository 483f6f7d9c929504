"""Repeated requests of the kinds that a dashboard distinguishes: answers, abandoned requests, refusals and texts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import httpx

STORY = "Once upon a time there was a fox. The fox had a red hat. The fox had a red hat. The fox had a"
TIMEOUT = 60.0


@contextmanager
def busy(servers: dict[str, str]) -> Iterator[None]:
    """Run six clients until the block ends.

    Three use the generating server, one leaves early and sends errors, and two use the embedding server.
    """
    generate, embed = servers["amd64"], servers["arm64"]
    rounds = [partial(_answers, generate, number) for number in range(3)]
    rounds += [partial(_endings, generate), partial(_vectors, embed, 1), partial(_vectors, embed, 8)]
    # a moderate load: the machine must still answer queries
    with running(rounds, 0.02):
        yield


@contextmanager
def running(rounds: list[Callable[[], None]], pause: float) -> Iterator[None]:
    """Repeat each round in a thread of its own, with a pause of so many seconds after it."""
    stop = threading.Event()

    def again(once: Callable[[], None]) -> None:
        while not stop.is_set():
            once()
            stop.wait(pause)

    threads = [threading.Thread(target=again, args=(each,)) for each in rounds]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _answers(url: str, number: int) -> None:
    """Send streams with the same prompt, for prefix cache hits, and with repetitions, for speculation."""
    body = {"prompt": f"{STORY} {number}", "max_tokens": 24, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT) as told:
        for _ in told.iter_lines():
            pass
    httpx.post(f"{url}/generate", json={"prompt": "Hello", "max_tokens": 4}, timeout=TIMEOUT)


def _endings(url: str) -> None:
    """Leave one stream early, and send one invalid request."""
    body = {"prompt": STORY, "max_tokens": 200, "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=TIMEOUT) as told, suppress(StopIteration):
        next(told.iter_lines())
    assert httpx.post(f"{url}/generate", json={"prompt": "Hello", "max_tokens": -1}, timeout=TIMEOUT).status_code == 400


def _vectors(url: str, texts: int) -> None:
    httpx.post(f"{url}/encode", json={"inputs": [STORY] * texts}, timeout=TIMEOUT).raise_for_status()
