"""examples/ray on a real Ray of this machine: several models, streams, keys, errors, clients that leave, autoscaling."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tools.peers.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "ray"
KEY = "of-the-small-model"
START_SECONDS, SCALE_SECONDS = 150.0, 90.0
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 24, "ignore_eos": True}
# Prints the number of running replicas of every application as JSON.
REPLICAS = (
    "import json, ray; from ray import serve; ray.init(log_to_driver=False); "
    "print(json.dumps({name: list(each.deployments.values())[0].replica_states.get('RUNNING', 0)"
    " for name, each in serve.status().applications.items()}))"
)


def ray_program(name: str) -> str:
    """Where a program of Ray is; skips the test by its name where it is not."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} (of ray[serve]) is not here: examples/ray/README.md says how to install it")
    return found


def configuration(port: int) -> dict[str, Any]:
    """The example's, on another port, with this Armature; keys for the first model, and little patience in scaling."""
    told: dict[str, Any] = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    told["http_options"] = {"host": "127.0.0.1", "port": port}
    small, embeddings = told["applications"]
    for each in (small, embeddings):
        each["args"]["command"] = [sys.executable, "-m", "app"]
    small["args"]["flags"] = ["--api-keys", KEY, "--max-running-seqs", "2"]
    quick = {"upscale_delay_s": 1, "downscale_delay_s": 600, "look_back_period_s": 3, "metrics_interval_s": 0.5}
    small["args"]["autoscaling"] |= quick
    return told


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which is killed at the end."""
    with log.open("wb") as said:
        running = subprocess.Popen(
            command,
            cwd=EXAMPLE,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        yield running
    finally:
        running.send_signal(signal.SIGINT)
        try:
            running.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def until(condition: Callable[[], object], seconds: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(what())
        time.sleep(0.5)


class Deployed:
    """The example as it runs: its URL, and how many replicas each application has."""

    def __init__(self, url: str, environment: dict[str, str]) -> None:
        self.url, self._environment = url, environment

    def replicas(self) -> dict[str, int]:
        python = str(Path(ray_program("ray")).with_name("python"))
        done = subprocess.run(
            [python, "-c", REPLICAS], env=self._environment, capture_output=True, text=True, check=True
        )
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return found


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    head, serve = ray_program("ray"), ray_program("serve")
    gcs, port, *agents = free_ports(5)
    with ExitStack() as stack:
        # Short, since Ray puts sockets there.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")))
        (folder / "config.yaml").write_text(yaml.safe_dump(configuration(port)))
        paths = os.pathsep.join([str(ROOT), str(EXAMPLE)])
        environment = dict(os.environ) | {
            "PYTHONPATH": paths,
            "RAY_ADDRESS": f"127.0.0.1:{gcs}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        start = [head, "start", "--head", "--block", f"--port={gcs}", "--num-cpus=4", "--include-dashboard=false"]
        start += ["--object-store-memory=100000000", f"--temp-dir={folder}", "--node-ip-address=127.0.0.1"]
        start += [f"--dashboard-agent-listen-port={agents[0]}", f"--metrics-export-port={agents[1]}"]
        without = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
        log, heads = folder / "serve.log", folder / "head.log"
        running = stack.enter_context(process(start, without, heads))
        until(
            lambda: running.poll() is not None or b"Ray runtime started" in heads.read_bytes(),
            START_SECONDS,
            lambda: heads.read_text(),
        )
        run = stack.enter_context(process([serve, "run", str(folder / "config.yaml")], environment, log))
        url = f"http://127.0.0.1:{port}"
        headers = {"authorization": f"Bearer {KEY}"}

        def is_ready() -> bool:
            assert run.poll() is None, log.read_text()
            try:
                return all(
                    httpx.get(f"{url}/{name}/v1/models", headers=headers, timeout=10.0).status_code == 200
                    for name in ("small", "embeddings")
                )
            except httpx.TransportError:
                return False

        until(is_ready, START_SECONDS, lambda: heads.read_text()[-2000:] + log.read_text()[-6000:])
        yield Deployed(url, environment)


@pytest.fixture
def small(deployed: Deployed) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"{deployed.url}/small", headers=headers, timeout=60.0) as client:
        yield client


@pytest.mark.full
def test_each_model_answers_at_its_own_path(small: httpx.Client, deployed: Deployed) -> None:
    answer = small.post("/v1/chat/completions", json=CHAT).json()
    assert answer["usage"]["completion_tokens"] == 24
    vectors = httpx.post(f"{deployed.url}/embeddings/v1/embeddings", json={"input": ["a", "b"]}, timeout=60.0).json()
    assert len(vectors["data"]) == 2
    assert small.get("/v1/models?limit=1").json()["data"][0]["id"] != ""


@pytest.mark.full
def test_a_stream_arrives_event_by_event(small: httpx.Client) -> None:
    with small.stream("POST", "/v1/chat/completions", json=CHAT | {"max_tokens": 200, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = list(answer.iter_raw())
    assert b"".join(parts).endswith(b"data: [DONE]\n\n")
    assert len(parts) > 20, "the stream was collected before it was sent"


@pytest.mark.full
def test_errors_and_keys_are_the_servers_own(small: httpx.Client, deployed: Deployed) -> None:
    wrong = small.post("/v1/chat/completions", json=CHAT | {"max_tokens": -1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")
    without = httpx.post(f"{deployed.url}/small/v1/chat/completions", json=CHAT, timeout=60.0)
    assert (without.status_code, without.json()["error"]["code"]) == (401, "unauthorized")
    assert small.get("/v1/no-such-route").status_code == 404


def aborted(client: httpx.Client) -> float:
    text = client.get("/metrics").text
    found = re.findall(r'^armature_requests_total\{api="chat",outcome="aborted"\} (\S+)$', text, re.MULTILINE)
    return float(found[0])


@pytest.mark.full
def test_a_client_that_leaves_ends_its_request(small: httpx.Client) -> None:
    before = aborted(small)
    with small.stream("POST", "/v1/chat/completions", json=CHAT | {"max_tokens": 1900, "stream": True}) as answer:
        next(answer.iter_raw())
    until(lambda: aborted(small) == before + 1, 20.0, lambda: "the server still computes for a client that has left")


@pytest.mark.full
def test_replicas_follow_the_predicted_wait(small: httpx.Client, deployed: Deployed) -> None:
    """More requests than a replica does at the same time; this test is the last, since a replica stays."""
    assert deployed.replicas() == {"small": 1, "embeddings": 1}
    ended = asyncio.Event()

    async def client(http: httpx.AsyncClient) -> None:
        while not ended.is_set():
            answer = await http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 400})
            assert answer.status_code in (200, 429), answer.text  # a full server refuses at once
            await asyncio.sleep(answer.status_code == 429)

    async def run() -> dict[str, int]:
        found = deployed.replicas()
        async with httpx.AsyncClient(base_url=small.base_url, headers=small.headers, timeout=300.0) as http:
            clients = [asyncio.ensure_future(client(http)) for _ in range(40)]
            deadline = time.monotonic() + SCALE_SECONDS
            while found["small"] < 2 and time.monotonic() < deadline:
                found = await asyncio.to_thread(deployed.replicas)
            ended.set()
            await asyncio.gather(*clients)
        return found

    assert asyncio.run(run()) == {"small": 2, "embeddings": 1}
