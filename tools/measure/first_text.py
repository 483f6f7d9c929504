"""Measure a newcomer's wait: `python -m tools.measure.first_text [--wheels DIR] [--limit SECONDS]`.

Clones this checkout's last commit into an empty folder, runs `make serve` there with empty caches of pip, uv and
Armature, and asks for a story as soon as the server listens. Prints what was said and when, then the seconds to the
first text and the longest time in which nothing was said. `--wheels` names a folder with a wheel of the same sources
(`make wheels`), so that nothing is compiled. Packages come from the network or from where pip is configured to look; run
it on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGET, PREBUILT_TARGET, SILENCE_TARGET = 100.0, 60.0, 15.0  # seconds on two cores
LISTENING = "listening on "
QUESTION = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 16, "stream": True}
POLL_SECONDS = 0.1


@dataclass(slots=True)
class Session:
    """What was said since the start: seconds and lines."""

    began: float = field(default_factory=time.monotonic)
    said: list[tuple[float, str]] = field(default_factory=list)

    def hear(self, line: str) -> None:
        """Keep a line with its time, and print it."""
        self.said.append((time.monotonic() - self.began, line))
        print(f"{self.said[-1][0]:7.1f} s  {line}", flush=True)

    def longest_silence(self) -> float:
        """Return the most seconds between two lines, or before the first."""
        times = [0.0, *(seconds for seconds, _ in self.said)]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def main() -> int:
    """Measure once. The last line of the output is JSON; the status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="folder with a wheel of these sources")
    parser.add_argument("--limit", type=float, default=900.0, help="give up after so many seconds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="armature-first-text-") as folder:
        session = measure(Path(folder), arguments.wheels, arguments.limit)
    return report(session, PREBUILT_TARGET if arguments.wheels else TARGET)


def measure(folder: Path, wheels: Path | None, limit: float) -> Session:
    """Clone, serve and ask. The last line heard is the first text.

    Raises:
        SystemExit: `make serve` ended, or there was no text in time.
    """
    session = Session()
    checkout = folder / "armature"
    subprocess.run(["git", "clone", "-q", f"file://{ROOT}", str(checkout)], check=True)
    session.hear("cloned")
    process = subprocess.Popen(
        ["make", "serve", "ARGS=--port 0"],
        cwd=checkout,
        env=environment(folder, wheels),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(limit, os.killpg, (process.pid, signal.SIGINT))
    watchdog.start()
    try:
        return _until_text(process, session)
    finally:
        watchdog.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        process.wait(60)


def environment(folder: Path, wheels: Path | None) -> dict[str, str]:
    """Return the environment of somebody who has just arrived: no caches, and no settings of Armature."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ARMATURE_")}
    for name in ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"):
        kept.pop(name, None)
    caches = {name: str(folder / name.lower()) for name in ("PIP_CACHE_DIR", "UV_CACHE_DIR", "XDG_CACHE_HOME")}
    return {**kept, **caches, **({"ARMATURE_WHEELS": str(wheels.resolve())} if wheels else {})}


def _until_text(process: subprocess.Popen[str], session: Session) -> Session:
    assert process.stdout is not None
    found: list[str] = []
    asking: threading.Thread | None = None
    for line in process.stdout:
        session.hear(line.rstrip())
        if line.startswith(LISTENING):
            url = line.removeprefix(LISTENING).strip()
            asking = threading.Thread(target=_ask, args=(url, process, found))
            asking.start()
    if asking is not None:
        asking.join()
    if not found:
        raise SystemExit("There was no text: `make serve` ended, or it took too long.")
    session.said = [(seconds, line) for seconds, line in session.said if seconds <= float(found[0]) - session.began]
    session.said.append((float(found[0]) - session.began, f"first text: {found[1]}"))
    return session


def _ask(url: str, process: subprocess.Popen[str], found: list[str]) -> None:
    """Ask as soon as the server is ready, note the time of the first text, and end the server, as Ctrl-C would."""
    body = json.dumps(QUESTION).encode()
    while process.poll() is None and not _is_ready(url):
        time.sleep(POLL_SECONDS)  # a question now would be a line of the log, which nobody waits for
    while process.poll() is None:
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                if text := first_text(response):
                    found += [str(time.monotonic()), text]
                    break
        except OSError:
            time.sleep(POLL_SECONDS)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=60) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def first_text(lines: Any) -> str:
    """Return the first text of a stream of chat chunks; empty if there is none."""
    for raw in lines:
        line = raw.decode().strip()
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                if text := choice["delta"].get("content"):
                    return str(text)
    return ""


def report(session: Session, target: float) -> int:
    """Print the two figures with their targets, and return the exit status."""
    seconds, silence = session.said[-1][0], session.longest_silence()
    print(f"first text after {seconds:.1f} s, target {target:.0f} s on two cores: {session.said[-1][1]!r}")
    print(f"longest silence {silence:.1f} s, target {SILENCE_TARGET:.0f} s")
    print(json.dumps({"seconds": seconds, "longest_silence_seconds": silence, "said": session.said}))
    return 0 if seconds <= target and silence <= SILENCE_TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
