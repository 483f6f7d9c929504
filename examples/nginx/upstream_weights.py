"""Write nginx weights by the capacity of each server: `python examples/nginx/upstream_weights.py --out FILE SERVER ...`.

For a fleet without a gateway. It reads /metrics of each server and writes the `server` lines that an `upstream` block
includes. The file is replaced and nginx reloaded only if a share changed by more than a tenth. A server that reports no
capacity gets a weight that is a guess, which the output and the file say. The first file is written before anything is
read, so that nginx can start. Needs only the standard library.

SERVER is HOST:PORT, or a place where servers are found, looked up again at each update: dns:NAME:PORT (every address of
the name), srv:NAME (DNS records of type SRV), file:PATH (one HOST:PORT a line, or Prometheus' file_sd JSON), or
kubernetes:NAMESPACE/SERVICE (its ready endpoints, with the rights of the pod or through --kubernetes of `kubectl
proxy`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import shlex
import socket
import ssl
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

MOST_WEIGHT = 100  # weight of the fastest server; weights are whole numbers, and a hundredth is precise enough
CHANGE = 0.1  # relative change of a share that causes a write: a reload keeps old workers until their streams end
ANSWER_SECONDS = 5.0
CAPACITY = re.compile(r'^armature_capacity_tokens_per_second\{phase="(\w+)",rows="(\d+)"\} (\S+)$', re.MULTILINE)
LINE = re.compile(r"^server (\S+) weight=(\d+) ", re.MULTILINE)
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes puts a pod's token
RESOLVER = Path("/etc/resolv.conf")
SRV, INTERNET = 33, 1  # the type and the class of RFC 2782 and RFC 1035
Weights = dict[str, int]


class NotFound(Exception):
    """A place where servers are looked up did not answer, or what it said cannot be read."""


def requests_per_second(metrics: str, prompt_tokens: int, completion_tokens: int) -> float | None:
    """Return the requests per second of a full server by its own measurements, or None if it reports none.

    A prompt is read for each completion. For an encoder: texts of `prompt_tokens` tokens per second.
    """
    told: dict[str, dict[int, float]] = {}
    for phase, rows, speed in CAPACITY.findall(metrics):
        told.setdefault(phase, {})[int(rows)] = float(speed)
    fastest = {phase: by_rows[max(by_rows)] for phase, by_rows in told.items()}
    seconds = math.inf
    if "encode" in fastest:
        seconds = prompt_tokens / fastest["encode"] if fastest["encode"] > 0 else math.inf
    elif fastest.get("prefill", 0) > 0 and fastest.get("decode", 0) > 0:
        seconds = prompt_tokens / fastest["prefill"] + completion_tokens / fastest["decode"]
    return 1 / seconds if 0 < seconds < math.inf else None


def weigh(capacities: Mapping[str, float | None], before: Weights) -> Weights:
    """Return whole-number weights in proportion to the capacities.

    A server that reports nothing keeps its old weight. A server without an old weight counts as the slowest, so it
    never gets too much.
    """
    known = {server: capacity for server, capacity in capacities.items() if capacity is not None}
    most = max(known.values(), default=1.0)
    weights = {server: max(1, round(MOST_WEIGHT * capacity / most)) for server, capacity in known.items()}
    least = min(weights.values(), default=1)
    return {server: weights.get(server, before.get(server, least)) for server in capacities}


def differ(weights: Weights, before: Weights) -> bool:
    """Return True if the set of servers changed, or a share changed by more than a tenth of itself."""
    if weights.keys() != before.keys():
        return True
    now, then = sum(weights.values()), sum(before.values())
    return any(abs(weights[server] / now * then / before[server] - 1) > CHANGE for server in weights)


def read_weights(file: Path) -> Weights:
    """Return the weights that were written last, or none if there is no such file."""
    with suppress(FileNotFoundError):
        return {server: int(weight) for server, weight in LINE.findall(file.read_text())}
    return {}


def lines(weights: Weights, guessed: Iterable[str] = ()) -> str:
    """Return the `server` lines; those of `guessed` servers say that their weight is a guess.

    With max_fails above 0, nginx would treat a full server (429) as failed, and a fleet of full servers as down (502).
    """
    return "".join(
        f"server {server} weight={weight} max_fails=0;{' # a guess' if server in guessed else ''}\n"
        for server, weight in weights.items()
    )


def replace_safely(file: Path, text: str, check: Sequence[str], reload: Sequence[str]) -> str:
    """Write the file, check it and reload nginx. If the check fails, restore the old file.

    Returns a sentence on what went wrong, or None.
    """
    before = file.read_text() if file.exists() else None
    _write(file, text)
    for command in (check, reload):
        if not command:
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            if before is None:
                file.unlink()
            else:
                _write(file, before)
            return f"{shlex.join(command)} failed, and {file} is as it was: {done.stderr.strip()}"
    return ""


def _write(file: Path, text: str) -> None:
    """Replace the file atomically, so that nginx never reads half of it."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(file)


def scraped(server: str) -> str:
    """Return the server's metrics, or an empty text if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{server}/metrics", timeout=ANSWER_SECONDS) as answer:
            text: str = answer.read().decode()
            return text
    except (OSError, urllib.error.URLError) as error:
        print(f"{server} does not answer: {error}", file=sys.stderr)
        return ""


# ---- where servers are found ----------------------------------------------------------------------------------------


def find(places: Sequence[str], kubernetes: str = "") -> list[str]:
    """Return HOST:PORT of every server, in a stable order and each once. Raises `NotFound`."""
    found: dict[str, None] = {}
    for place in places:
        kind, _, rest = place.partition(":")
        look = {"dns": _by_name, "srv": _by_records, "file": _by_file}.get(kind)
        try:
            if kind == "kubernetes":
                servers = _by_endpoints(rest, kubernetes)
            else:
                servers = look(rest) if look else [place]
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise NotFound(f"{place}: {error}") from error
        if not servers:
            raise NotFound(f"{place}: no servers there")
        found |= dict.fromkeys(sorted(servers))
    return list(found)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _by_name(name: str) -> list[str]:
    host, _, port = name.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("this is no NAME:PORT")
    answers = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return sorted({_address(str(answer[4][0]), int(port)) for answer in answers})


def _by_file(path: str) -> list[str]:
    text = Path(path).read_text()
    if text.lstrip().startswith("["):
        return [str(target) for group in json.loads(text) for target in group["targets"]]
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _by_endpoints(service: str, api: str) -> list[str]:
    """Return the ready endpoints of NAMESPACE/SERVICE, from the API server at `api` or from within a pod."""
    namespace, _, name = service.partition("/")
    headers, context = {}, None
    if not api:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        api = f"https://{_address(host, int(port))}"
        headers["Authorization"] = f"Bearer {(ACCOUNT / 'token').read_text()}"
        context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector=kubernetes.io/service-name={name}"
    request = urllib.request.Request(api + path, headers=headers)
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS, context=context) as answer:
        slices = json.load(answer)["items"]
    return [
        _address(
            address, next((port for port in each["ports"] if port.get("name") == "http"), each["ports"][0])["port"]
        )
        for each in slices
        for endpoint in each.get("endpoints") or []
        if endpoint.get("conditions", {}).get("ready", True)
        for address in endpoint["addresses"]
    ]


def _by_records(name: str) -> list[str]:
    """Return the targets of a name's SRV records, asked of the first name server of /etc/resolv.conf.

    Over TCP, since a fleet's records may exceed a datagram.
    """
    server = next(line.split()[1] for line in RESOLVER.read_text().splitlines() if line.startswith("nameserver"))
    number = secrets.randbits(16)
    question = b"".join(bytes([len(part)]) + part.encode("idna") for part in name.strip(".").split(".")) + b"\0"
    packet = struct.pack(">6H", number, 0x0100, 1, 0, 0, 0) + question + struct.pack(">2H", SRV, INTERNET)
    with socket.create_connection((server, 53), ANSWER_SECONDS) as connection:
        connection.sendall(struct.pack(">H", len(packet)) + packet)
        with connection.makefile("rb") as stream:
            reply = stream.read(struct.unpack(">H", stream.read(2))[0])
    return read_records(reply, number, len(question))


def read_records(reply: bytes, number: int, question: int) -> list[str]:
    """Return HOST:PORT of the SRV records in a DNS reply to a question of `question` bytes (RFC 1035, 2782).

    Raises `ValueError` if the reply belongs to another question or reports an error.
    """
    told, flags, _, answers = struct.unpack_from(">4H", reply)
    if told != number or flags & 0xF:
        raise ValueError(f"the name server answers with error {flags & 0xF}")
    at, found = 12 + question + 4, []
    for _ in range(answers):
        _, at = _name(reply, at)
        kind, _, _, length = struct.unpack_from(">2HIH", reply, at)
        at += 10
        if kind == SRV:
            port = struct.unpack_from(">H", reply, at + 4)[0]
            found.append(_address(_name(reply, at + 6)[0], port))
        at += length
    return found


def _name(reply: bytes, at: int) -> tuple[str, int]:
    """Return the domain name at this place, and the place after it. Pointers lead backwards only."""
    parts: list[str] = []
    after, bound = 0, at + 1
    while length := reply[at]:
        if length >= 0xC0:
            after, at = after or at + 2, struct.unpack_from(">H", reply, at)[0] & 0x3FFF
            if at >= bound:
                raise ValueError("a name in the reply points forwards")
            bound = at
            continue
        parts.append(reply[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    return ".".join(parts), after or at + 1


# ---- one update -----------------------------------------------------------------------------------------------------


def once(arguments: argparse.Namespace) -> int:
    """Find and query every server once and write the file if needed. Returns the exit status."""
    out = arguments.out
    try:
        servers = find(arguments.server, arguments.kubernetes)
    except NotFound as error:
        print(f"{error}; {out} is as it was", file=sys.stderr)
        return 1
    before, guessed_before = read_weights(out), _guessed(out)
    if not out.exists():  # nginx may start now; it is reloaded once the weights are known
        _write(out, lines(dict.fromkeys(servers, 1), servers))
    with ThreadPoolExecutor(max_workers=min(32, len(servers))) as pool:
        told = dict(zip(servers, pool.map(scraped, servers), strict=True))
    capacities = {
        server: requests_per_second(text, arguments.prompt_tokens, arguments.completion_tokens)
        for server, text in told.items()
    }
    weights = weigh(capacities, before)
    guessed = {
        server
        for server, capacity in capacities.items()
        if capacity is None and (server not in before or server in guessed_before)
    }
    if guessed - guessed_before:
        print(
            f"a guess, since no capacity was ever reported: the weight of {', '.join(sorted(guessed))}", file=sys.stderr
        )
    if not differ(weights, read_weights(out)):
        if guessed != _guessed(out):
            _write(out, lines(read_weights(out), guessed))  # a comment: nothing to reload
        return 0
    problem = replace_safely(out, lines(weights, guessed), shlex.split(arguments.check), shlex.split(arguments.reload))
    if problem:
        print(problem, file=sys.stderr)
        return 1
    said = (f"{server} weight {weight}{' (a guess)' * (server in guessed)}" for server, weight in weights.items())
    print(", ".join(said), flush=True)
    return 0


def _guessed(file: Path) -> set[str]:
    """Return the servers that have a guessed weight in the file."""
    text = file.read_text() if file.exists() else ""
    return {LINE.findall(line)[0][0] for line in text.splitlines() if line.endswith("# a guess")}


def main() -> int:
    arguments = _arguments()
    status = once(arguments)
    while arguments.every:
        time.sleep(arguments.every)
        once(arguments)
    return status


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "server",
        nargs="+",
        metavar="SERVER",
        help="HOST:PORT, dns:NAME:PORT, srv:NAME, file:PATH or kubernetes:NAMESPACE/SERVICE",
    )
    parser.add_argument(
        "--kubernetes", default="", metavar="URL", help="address of `kubectl proxy`, for a place outside the cluster"
    )
    parser.add_argument("--out", type=Path, required=True, help="the file that the `upstream` block includes")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between updates; without it, update once")
    parser.add_argument(
        "--check",
        default="",
        help="checks the configuration, such as 'nginx -t'; if it fails, the old file is restored",
    )
    parser.add_argument("--reload", default="", help="command that reloads nginx, such as 'nginx -s reload'")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens of a typical request")
    parser.add_argument("--completion-tokens", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
