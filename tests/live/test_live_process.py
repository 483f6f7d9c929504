"""The server process: its output, how it ends, and that it uses no CPU time while idle."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from armature_kernels.native.library import native_library
from tests.live.live_server import ServerProcess, server_process, until
from tiny_checkpoints import write_checkpoint

LONG = {"prompt": "Once", "max_tokens": 240, "ignore_eos": True, "stream": True}


def ready(process: ServerProcess) -> str:
    url = process.url()
    until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
    return url


def test_on_sigterm_open_answers_are_finished(tiny: Path) -> None:
    with server_process(tiny, "--log-level", "debug") as process:
        url = ready(process)
        before = process.cpu_seconds() if Path("/proc").exists() else 0.0
        time.sleep(1.0)  # the second that is being measured
        idle = process.cpu_seconds() - before if Path("/proc").exists() else 0.0
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as told:
            lines = told.iter_lines()
            next(lines)
            process.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        status, said = process.finish()
        assert status == 0, said
        assert "Traceback" not in said
        assert "plan: threads = 1" in said
        assert "torch imported in" in said
        assert idle < 0.1


@pytest.mark.full
def test_those_that_take_too_long_are_reported(tmp_path: Path) -> None:
    """With Ctrl-C this time, which is the same to us."""
    slow = write_checkpoint(tmp_path / "slow", max_position_embeddings=100_000)
    with server_process(slow, "--drain-seconds", "0.2", "--log-level", "warning") as process:
        url = ready(process)
        body = LONG | {"max_tokens": 90_000}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as told:
            lines = told.iter_lines()
            next(lines)
            process.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "service_stopping"
        status, said = process.finish()
        assert status == 0, said
        assert "Traceback" not in said


@pytest.mark.parametrize("where", ["off", pytest.param("on", marks=pytest.mark.full)])
def test_a_second_ctrl_c_ends_at_once_with_a_sentence(tmp_path: Path, where: str) -> None:
    slow, address = write_checkpoint(tmp_path / "slow", max_position_embeddings=100_000), tmp_path / "socket"
    flags = ["--engine-process", where, "--calibrate", "off", "--log-level", "warning", "--host", "127.0.0.1"]
    with server_process(slow, *flags, "--host", f"unix:{address}") as process:
        url = ready(process)
        body = LONG | {"max_tokens": 90_000}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as told:
            next(told.iter_lines())
            process.process.send_signal(signal.SIGINT)
            until(lambda: not address.exists())  # it drains
            process.process.send_signal(signal.SIGINT)
            status, said = process.finish()
    assert (status, said.count("\n")) == (0, 1), said
    assert said.endswith("WARNING stopped by a second Ctrl-C: open requests are cut off\n")


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's /proc")
def test_a_serving_process_has_one_openmp_runtime(tiny: Path) -> None:
    """Two would be two pools of threads that spin on the same cores; numpy's and Pillow's wheels bring none, and ours must not."""
    with server_process(tiny, "--log-level", "warning") as process:
        url = ready(process)
        assert httpx.post(f"{url}/generate", json={"prompt": "Once", "max_tokens": 2}, timeout=60).status_code == 200
        maps = Path(f"/proc/{process.process.pid}/maps").read_text()
    assert len(openmp_runtimes(maps)) == 1, openmp_runtimes(maps)
    if native_library().library is not None:
        assert "libarmature" in maps, "the test should count while our own kernels are there"


def openmp_runtimes(maps: str) -> set[str]:
    return set(re.findall(r"\S*/lib(?:gomp|omp|iomp)[^/\s]*\.so\S*", maps))


@pytest.mark.full
def test_a_second_openmp_runtime_would_be_counted() -> None:
    maps = "".join(
        f"7f00-7f10 r-xp 0 08:01 1  /usr/lib/{name}\n" for name in ("libgomp.so.1.0.0", "libiomp5.so", "libc.so.6")
    )
    assert openmp_runtimes(maps + "7f00-7f10 r-xp 0 08:01 1  /venv/libgomp-24e2ab19.so.1.0.0\n" + maps) == {
        "/usr/lib/libgomp.so.1.0.0",
        "/usr/lib/libiomp5.so",
        "/venv/libgomp-24e2ab19.so.1.0.0",
    }


@pytest.mark.full
def test_a_stop_while_loading(tiny: Path) -> None:
    with server_process(tiny) as process:
        process.url()
        process.process.send_signal(signal.SIGTERM)
        status, said = process.finish()
        assert status == 0, said
        assert "Traceback" not in said


@pytest.mark.full
@pytest.mark.parametrize("broken", ["config.json", "tokenizer.json"])
def test_a_checkpoint_that_cannot_be_served_ends_the_process_with_a_sentence(tmp_path: Path, broken: str) -> None:
    """One is found before the port opens, the other by the worker thread."""
    directory = write_checkpoint(tmp_path / "broken")
    (directory / broken).write_text("{")
    with server_process(directory) as process:
        status, said = process.finish()
    assert status == 2
    assert said.splitlines()[-1].startswith("armature: ")
    assert broken in said.splitlines()[-1]
    assert "Traceback" not in said


@pytest.mark.full
def test_a_port_that_is_taken(tiny: Path) -> None:
    with server_process(tiny) as first:
        port = first.url().rpartition(":")[2]
        with server_process(tiny, "--port", port) as second:
            status, said = second.finish()
    assert status == 2
    assert port in said.splitlines()[-1]
