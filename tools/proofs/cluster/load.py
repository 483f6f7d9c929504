"""Clients of a service: each sends one request after the other, every one on a new connection.

`python -m tools.proofs.cluster.load URL CLIENTS TOKENS [KEY]` runs until its input ends and prints what was answered as
JSON. A Service distributes connections, not requests, so kept connections would stay with one pod.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from tools.proofs.cluster.namespaces import Place
from tools.proofs.findings import ROOT

TIMEOUT_SECONDS = 60.0
PAUSE_SECONDS = 0.05  # after a failure, so that a refused client does not count thousands
MAX_TOKENS = 24


@dataclass(slots=True)
class Outcome:
    """What the clients saw: seconds of each answer, and how often each kind of failure came."""

    answers: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return self.failures.total()

    def __str__(self) -> str:
        worst = f", the slowest after {max(self.answers):.1f} s" if self.answers else ""
        named = f" ({', '.join(f'{count} {name}' for name, count in self.failures.items())})" if self.failures else ""
        return f"{len(self.answers)} answers{worst}; {self.failed} failed{named}"


def ask(url: str, key: str = "", max_tokens: int = MAX_TOKENS, timeout: float = TIMEOUT_SECONDS) -> str:
    """Send one request on a new connection. Returns "" after a whole answer, else the kind of failure."""
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}).encode()
    headers = {"Content-Type": "application/json", "Connection": "close"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=timeout
        ) as reply:
            answer = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return str(error.code)
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        return type(reason).__name__
    return "" if answer["choices"][0]["text"] else "empty"


class Load:
    """A context manager: clients in the cluster's namespace; their `outcome` is known at its end."""

    def __init__(self, place: Place, url: str, clients: int, key: str = "", max_tokens: int = MAX_TOKENS) -> None:
        self.outcome = Outcome()
        arguments = [url, str(clients), str(max_tokens), *([key] if key else [])]
        words = place.command(sys.executable, "-m", "tools.proofs.cluster.load", *arguments)
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            told, _err = self._process.communicate("", timeout=2 * TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        said: dict[str, Any] = json.loads(told)
        self.outcome = Outcome(said["answers"], Counter(said["failures"]))


def main() -> int:
    url, clients, max_tokens, key = (*sys.argv[1:], "")[:4]
    outcome, over, lock = Outcome(), threading.Event(), threading.Lock()

    def client() -> None:
        while not over.is_set():
            began = time.monotonic()
            failure = ask(url, key, int(max_tokens))
            with lock:
                if failure:
                    outcome.failures[failure] += 1
                else:
                    outcome.answers.append(round(time.monotonic() - began, 3))
            if failure:
                over.wait(PAUSE_SECONDS)

    threads = [threading.Thread(target=client) for _ in range(int(clients))]
    for each in threads:
        each.start()
    sys.stdin.read()
    over.set()
    for each in threads:
        each.join()
    print(json.dumps({"answers": outcome.answers, "failures": outcome.failures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
