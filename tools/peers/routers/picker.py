"""A small endpoint picker for Envoy, by the protocol of the Gateway API Inference Extension.

`python tools/peers/routers/picker.py --port 9002 SERVER...`. It stands in for llm-d's picker, which is a container image:
it scores servers as k8s/components/gateway/picker-configuration.yaml tells that one to, from /metrics read every 200 ms.
It needs grpcio, and speaks the few messages of ext-proc that it needs itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import urllib.request
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

SCRAPE_SECONDS = 0.2
MOST_WAIT = 10.0  # seconds; beyond it all are equal
BLOCK = 256  # characters of a prompt that are one block of the prefix cache
MOST_BLOCKS = 8192  # blocks that the picker remembers of each server
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"
WAIT = re.compile(r"^armature_predicted_wait_seconds (\S+)$", re.MULTILINE)
SPEED = re.compile(r'^armature_capacity_tokens_per_second\{phase="decode",rows="1"\} (\S+)$', re.MULTILINE)
# Fields of envoy.service.ext_proc.v3: of ProcessingRequest, and of ProcessingResponse.
REQUEST_HEADERS, REQUEST_BODY = 2, 4
ANSWERS = {2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6}  # the field of a response by that of its request
OVERWRITE = 2


@dataclass
class Seen:
    """What the picker knows of a server. `wait` and `speed` are None before they are known, and if it is away."""

    wait: float | None = None
    speed: float | None = None
    is_there: bool = True
    num_open: int = 0
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def read(self, metrics: str) -> None:
        wait, speed = WAIT.search(metrics), SPEED.search(metrics)
        self.wait = None if wait is None else float(wait[1])
        self.speed = None if speed is None else float(speed[1])

    def remember(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > MOST_BLOCKS:
            self.blocks.popitem(last=False)


def prompt_blocks(prompt: str) -> list[int]:
    """Return a number for each whole block of the prompt, which depends on all blocks before it."""
    found, before = [], 0
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        before = hash((before, prompt[start : start + BLOCK]))
        found.append(before)
    return found


def prompt_of(body: bytes) -> str:
    """Return the text of an OpenAI body, or nothing."""
    with suppress(ValueError, TypeError, AttributeError, LookupError):
        told = json.loads(body)
        if isinstance(told.get("prompt"), str):
            return str(told["prompt"])
        return "\n".join(f"{each['role']}: {each['content']}" for each in told["messages"])
    return ""


def score(servers: Mapping[str, Seen], blocks: Sequence[int]) -> dict[str, float]:
    """Return the sum of each server that is there, in seconds of waiting; the highest is the best."""
    here = {name: seen for name, seen in servers.items() if seen.is_there} or dict(servers)
    speeds = [seen.speed for seen in here.values() if seen.speed is not None]
    slowest, fastest = min(speeds, default=0.0), max(speeds, default=0.0)
    most_open = max(seen.num_open for seen in here.values())
    sums = {}
    for name, seen in here.items():
        wait = MOST_WAIT if seen.wait is None else min(seen.wait, MOST_WAIT)
        speed = 0.0 if seen.speed is None or fastest == slowest else (seen.speed - slowest) / (fastest - slowest)
        idle = 1 - seen.num_open / most_open if most_open else 1.0
        known = next((index for index, block in enumerate(blocks) if block not in seen.blocks), len(blocks))
        sums[name] = MOST_WAIT - wait + speed + idle + (known / len(blocks) if blocks else 0.0)
    return sums


class Picker:
    """The choice of a server for each request, and the number of requests that are open at each."""

    def __init__(self, servers: Sequence[str]) -> None:
        self.servers = {name: Seen() for name in servers}

    def pick(self, body: bytes) -> str:
        blocks = prompt_blocks(prompt_of(body))
        sums = score(self.servers, blocks)
        best = max(sums, key=lambda name: sums[name])
        self.servers[best].remember(blocks)
        return best

    async def process(self, requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        """Serve one request of Envoy's, from its headers until it is answered."""
        chosen = ""
        try:
            async for message in requests:
                kind, content = next(iter(fields(message)))
                is_whole = kind == REQUEST_BODY or (kind == REQUEST_HEADERS and ends(content))
                if is_whole and not chosen:
                    body = dict(fields(content)).get(1, b"") if kind == REQUEST_BODY else b""
                    chosen = self.pick(body)
                    self.servers[chosen].num_open += 1
                yield answer(kind, chosen if is_whole else "")
        finally:
            if chosen:
                self.servers[chosen].num_open -= 1

    async def watch(self) -> None:
        """Read every server's metrics, for ever."""
        while True:
            texts = await asyncio.gather(*(asyncio.to_thread(_metrics, name) for name in self.servers))
            for seen, text in zip(self.servers.values(), texts, strict=True):
                seen.is_there = "\narmature_ready 1.0" in text
                if seen.is_there:
                    seen.read(text)
            await asyncio.sleep(SCRAPE_SECONDS)


def _metrics(server: str) -> str:
    with suppress(OSError), urllib.request.urlopen(f"http://{server}/metrics", timeout=1.0) as response:
        text: str = response.read().decode()
        return text
    return ""


# ---- messages ------------------------------------------------------------------------------------------------------


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and content of each field of a protobuf message: bytes, or an integer."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            content: Any
            content, at = _varint(message, at)
        elif tag & 7 == 2:
            length, at = _varint(message, at)
            content, at = message[at : at + length], at + length
        else:
            size = 8 if tag & 7 == 1 else 4
            content, at = message[at : at + size], at + size
        yield tag >> 3, content


def _varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        number |= (message[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if message[at - 1] < 0x80:
            return number, at


def _number(value: int) -> bytes:
    head = b""
    while value >= 0x80:
        head, value = head + bytes([value & 0x7F | 0x80]), value >> 7
    return head + bytes([value])


def _bytes(field_number: int, content: bytes) -> bytes:
    return _number(field_number << 3 | 2) + _number(len(content)) + content


def ends(headers: bytes) -> bool:
    """Return True if a request has only these headers (HttpHeaders.end_of_stream)."""
    return bool(dict(fields(headers)).get(3, 0))


def answer(kind: int, destination: str) -> bytes:
    """Return the ProcessingResponse to a message of this kind, which sets the destination if there is one."""
    common = b""
    if destination:
        header = _bytes(1, DESTINATION.encode()) + _bytes(3, destination.encode())
        option = _bytes(1, header) + _number(3 << 3) + _number(OVERWRITE)
        common = _bytes(2, _bytes(1, option))
    return _bytes(ANSWERS[kind], _bytes(1, common))


async def serve(port: int, servers: Sequence[str]) -> None:
    """Serve until the process ends."""
    import grpc

    picker = Picker(servers)
    handler = grpc.stream_stream_rpc_method_handler(picker.process)
    service, _, method = METHOD[1:].partition("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await picker.watch()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("servers", nargs="+", metavar="HOST:PORT")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.servers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
