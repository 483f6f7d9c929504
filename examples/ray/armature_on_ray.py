"""Models served by Armature as deployments of Ray Serve: `serve run config.yaml`.

A replica starts `armature serve` on a free port and passes requests on: every route, streams event by event, errors and
keys as they are. A client that leaves ends its request. Replicas are added by the wait for the first token that the
servers predict. Needs ray[serve]; Armature may be installed elsewhere, see `command`.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

TARGET_SECONDS = 1.0  # predicted wait for which one more replica is due, as in k8s/components/autoscaling
START_SECONDS = 1800.0  # large models are read, packed and calibrated at their first start
POLL_SECONDS = 0.2
STATISTIC = "predicted_wait_seconds"
WAIT = re.compile(r"^armature_predicted_wait_seconds (\S+)$", re.MULTILINE)
# Headers of one connection and not of a message; aiohttp sets length and host itself.
HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host", "content-length"}


def by_predicted_wait(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas: the sum of their predicted waits over the target; a step down is by one.

    Bounds and delays are Ray's, from the autoscaling configuration.
    """
    waits = (context.aggregated_metrics or {}).get(STATISTIC, {})
    now = context.target_num_replicas
    if not waits:  # nothing was reported yet
        return now, {}
    wanted = math.ceil(sum(waits.values()) / TARGET_SECONDS)
    return max(wanted, now - 1, 1), {}


@serve.deployment
class Armature:
    """One `armature serve` process and the way to it."""

    async def __init__(self, flags: Sequence[str], command: Sequence[str] = ("armature",)) -> None:
        """Start the server and return when it is ready. `flags` are those of `armature serve`."""
        self._url = f"http://127.0.0.1:{_free_port()}"
        place = ["--host", "127.0.0.1", "--port", self._url.rpartition(":")[2]]
        self._server = subprocess.Popen([*command, "serve", *place, *flags], stdin=subprocess.DEVNULL)
        endless = aiohttp.ClientTimeout(total=None, sock_connect=5.0)  # the server ends its requests itself
        self._client = aiohttp.ClientSession(timeout=endless, auto_decompress=False)
        await asyncio.wait_for(self._ready(), START_SECONDS)

    async def __call__(self, request: Request) -> Response:
        """Pass a request on. Its body was read whole, the answer is passed on as it arrives."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        url = f"{self._url}{path or '/'}?{request.url.query}".rstrip("?")
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP]
        try:
            answer = await self._client.request(
                request.method, url, headers=headers, data=await request.body(), allow_redirects=False
            )
        except aiohttp.ClientConnectionError as error:
            return JSONResponse({"error": {"code": "server_unavailable", "message": str(error)}}, 503)
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
        return StreamingResponse(_chunks(answer), answer.status, kept)

    async def check_health(self) -> None:
        """Raise an error if the server has ended or its worker has died: Ray then replaces the replica."""
        async with self._client.get(f"{self._url}/healthz") as answer:
            answer.raise_for_status()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the predicted wait in seconds, which `by_predicted_wait` reads; 0 while it is not known."""
        async with self._client.get(f"{self._url}/metrics") as answer:
            found = WAIT.search(await answer.text())
        return {STATISTIC: float(found[1]) if found else 0.0}

    async def __del__(self) -> None:
        """Stop the server; it finishes its open requests, of which Ray has left none."""
        self._server.terminate()
        await self._client.close()
        await asyncio.to_thread(self._server.wait)

    async def _ready(self) -> None:
        while True:
            with suppress(aiohttp.ClientConnectionError):
                async with self._client.get(f"{self._url}/readyz") as answer:
                    if answer.status == 200:
                        return
            if self._server.poll() is not None:
                raise RuntimeError(f"armature serve ended with status {self._server.returncode}")
            await asyncio.sleep(POLL_SECONDS)


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield what arrives. Ends the request if the client leaves, since that cancels this generator."""
    try:
        async for chunk in answer.content.iter_any():
            yield chunk
    finally:
        answer.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def model(arguments: dict[str, Any]) -> serve.Application:
    """Return the application of one model, from the `args` of config.yaml.

    `flags` and `command` are those of `Armature`; `cpus` is what a replica takes of a machine, and the number of its
    threads; `autoscaling` overrides fields of Ray's AutoscalingConfig.
    """
    cpus = arguments.get("cpus", 1)
    flags = [*map(str, arguments.get("flags", [])), "--threads", str(max(1, math.floor(cpus)))]
    scaling = AutoscalingConfig(
        policy=AutoscalingPolicy(policy_function=by_predicted_wait),
        **{
            "min_replicas": 1,
            "max_replicas": 4,
            "upscale_delay_s": 10,
            "downscale_delay_s": 600,
            "look_back_period_s": 30,
            "metrics_interval_s": 2,
            **arguments.get("autoscaling", {}),
        },
    )
    deployment = Armature.options(
        autoscaling_config=scaling,
        ray_actor_options={"num_cpus": cpus},
        max_ongoing_requests=arguments.get("max_ongoing_requests", 128),  # the server queues and refuses by itself
        graceful_shutdown_timeout_s=600,
    )
    return deployment.bind(flags, arguments.get("command", ["armature"]))
