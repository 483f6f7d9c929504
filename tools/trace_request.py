"""Print the files of app/ that one streamed request passes through: `python -m tools.trace_request`, or `make trace`.

It shows how much code a request meets, which is to stay little. The server runs in this process with the demo model and
without calibration. A client thread sends one streamed chat completion of four tokens. A profile function in every
thread records each Python function of app/ that is called between the moment the request is sent and its last byte.
Module code that runs because of an import does not count.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType

import app
from tools.peers.ports import free_port, is_answered

ROOT = Path(app.__path__[0]).resolve()
READY_SECONDS = 300.0
POLL_SECONDS = 0.05
BODY = {
    "messages": [{"role": "user", "content": "Tell me a story about a fox and a lantern."}],
    "max_tokens": 4,
    "temperature": 0,
    "stream": True,
}


class CallRecorder:
    """Records the functions of app/ that each thread calls while `recording` is true."""

    def __init__(self, root: Path = ROOT) -> None:
        self.recording = False
        self.num_calls = 0
        self.functions: dict[str, set[tuple[str, str]]] = defaultdict(set)  # by thread name: file and function
        self._prefix = f"{root}{os.sep}"

    def install(self) -> None:
        """Profile this thread and every thread that starts later."""
        threading.setprofile(self.on_event)
        sys.setprofile(self.on_event)

    def uninstall(self) -> None:
        self.recording = False
        threading.setprofile(None)
        sys.setprofile(None)

    def on_event(self, frame: FrameType, event: str, argument: object) -> None:
        """Handle an event of `sys.setprofile`. An import during the request is not part of its path."""
        if not self.recording or event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(self._prefix) and code.co_name != "<module>":
            self.num_calls += 1
            file = code.co_filename.removeprefix(self._prefix)
            self.functions[threading.current_thread().name].add((file, code.co_qualname))

    def files(self) -> dict[str, list[str]]:
        return {name: sorted({file for file, _ in functions}) for name, functions in self.functions.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace one request and print its files. Exit status 1 if the server or the request failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("flags", nargs="*", help="further flags of armature serve, after --")
    options = parser.parse_args(arguments)
    recorder = CallRecorder()
    answer = trace(recorder, options.flags)
    if isinstance(answer, str):
        print(f"trace: {answer}", file=sys.stderr)
        return 1
    print(json.dumps(as_json(recorder)) if options.json else as_text(recorder))
    return 0


def trace(recorder: CallRecorder, flags: Sequence[str] = ()) -> bytes | str:
    """Serve in this thread until one request is answered. Return the bytes of the answer, or a sentence on what failed."""
    from app.cli.main import main as armature

    port, answers = free_port(), list[bytes | str]()

    def client() -> None:
        try:
            answers.append(send_request(f"http://127.0.0.1:{port}", recorder))
        except (OSError, http.client.HTTPException) as error:
            answers.append(f"the request failed: {error}")
        finally:
            recorder.recording = False
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=client, name="client", daemon=True)
    recorder.install()
    try:
        thread.start()
        with redirect_stdout(io.StringIO()):
            status = armature(["serve", "--host", "127.0.0.1", "--port", str(port), "--calibrate", "off", *flags])
    finally:
        recorder.uninstall()
    thread.join(READY_SECONDS)
    return answers[0] if status == 0 and answers else f"the server ended with status {status}"


def send_request(url: str, recorder: CallRecorder) -> bytes:
    """Wait until the server is ready, send the request and read its answer to the end."""
    deadline = time.monotonic() + READY_SECONDS
    while not is_answered(f"{url}/readyz"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server is not ready after {READY_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(BODY).encode(), headers)
    recorder.recording = True
    with urllib.request.urlopen(request, timeout=READY_SECONDS) as response:
        answer: bytes = response.read()
    recorder.recording = False
    return answer


def as_json(recorder: CallRecorder) -> dict[str, object]:
    files = recorder.files()
    return {
        "files": len({file for of_thread in files.values() for file in of_thread}),
        "functions": len({function for functions in recorder.functions.values() for function in functions}),
        "calls": recorder.num_calls,
        "threads": files,
    }


def as_text(recorder: CallRecorder) -> str:
    """Return the files of each thread, and the totals in the last line."""
    totals = as_json(recorder)
    blocks = [
        f"{name}: {len(files)} files\n" + "".join(f"  {file}\n" for file in files)
        for name, files in sorted(recorder.files().items())
    ]
    total = f"{totals['files']} files of app/, {totals['functions']} functions, {totals['calls']} calls"
    return "\n".join([*blocks, total])


if __name__ == "__main__":
    sys.exit(main())
