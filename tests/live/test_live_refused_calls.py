"""A kernel or a sandbox that refuses what is only advice: the server starts, serves and ends as it does elsewhere."""

from __future__ import annotations

import contextlib
import errno
import platform
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from app.settings import DEMO_DIRECTORY
from tests.live.live_server import PATIENCE, until

# System calls that advise or measure: their numbers on x86-64 and on 64-bit Arm (Linux, asm/unistd.h).
CALLS = {
    "madvise": (28, 233),
    "sched_setaffinity": (203, 122),
    "getrusage": (98, 165),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236),
    "perf_event_open": (298, 241),
    "mlock": (149, 228),
    "fadvise64": (221, 223),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
}

# Installs a filter (man 2 seccomp) that answers these calls with an error, then becomes the program.
FILTERED = """
import ctypes, os, struct, sys
error, *numbers = map(int, sys.argv[1].split(","))
def instruction(code, value, yes=0, no=0):
    return struct.pack("HBBI", code, yes, no, value)
code = [instruction(0x20, 0)]  # load the number of the call
for number in numbers:
    code += [instruction(0x15, number, 0, 1), instruction(0x06, 0x00050000 | error)]
code.append(instruction(0x06, 0x7FFF0000))
words = ctypes.create_string_buffer(b"".join(code))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
libc, made = ctypes.CDLL(None), Filter(len(code), ctypes.addressof(words))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(made)):
    sys.exit(77)  # no filters here
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.mark.cases(ci=1)
@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="filters are Linux's")
@pytest.mark.parametrize(
    "error",
    [
        errno.EPERM,
        *(pytest.param(error, marks=pytest.mark.nightly) for error in (errno.EINVAL, errno.ENOSYS, errno.EIO)),
    ],
    ids=lambda error: errno.errorcode[error],
)
@pytest.mark.parametrize(
    ("model", "flags", "path", "body"),
    [
        (DEMO_DIRECTORY, ("--precision", "int8"), "/v1/completions", {"prompt": "Once", "max_tokens": 4}),
        (DEMO_DIRECTORY.parent / "bert", (), "/v1/embeddings", {"input": "hello"}),
    ],
)
def test_refused_advice_ends_nothing(
    error: int, model: Path, flags: tuple[str, ...], path: str, body: dict[str, object], tmp_path: Path
) -> None:
    numbers = [pair[platform.machine() == "aarch64"] for pair in CALLS.values()]
    served = ["-m", "app", "serve", "--model", str(model), "--port", "0", "--threads", "1", "--calibrate", "off"]
    served += ["--cache-dir", str(tmp_path), *flags]
    refused = ",".join(map(str, (error, *numbers)))
    process = subprocess.Popen(
        [sys.executable, "-c", FILTERED, refused, *served], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line and process.wait(PATIENCE) == 77:
            pytest.skip("this system has no filters of system calls")
        assert line.startswith("listening on "), process.communicate(timeout=PATIENCE)
        with httpx.Client(base_url=line.removeprefix("listening on ").strip(), timeout=PATIENCE) as client:

            def ready() -> bool:
                assert process.poll() is None, process.communicate(timeout=PATIENCE)
                with contextlib.suppress(httpx.HTTPError):
                    return client.get("/readyz").status_code == 200
                return False

            until(ready)
            assert client.post(path, json=body).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()
