"""Both architectures, hardened: they become ready, generate, embed, are scraped, and finish streams on SIGTERM."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from armature_kernels.linear.torchao_config import EXAMPLE, INT8_REFERENCE, KLEIDI_INT4
from tools.proofs.containers import Container, Image, docker
from tools.proofs.findings import Findings

PROMPT = "Once upon a time there was a little house by the river."
GREEDY_TOKENS = 48
TEXT = "a small boat on a wide river"
DRAIN_SECONDS = 60.0  # the setting drain_seconds is 30
STREAM_SECONDS = 6.0  # an open stream must last long enough for SIGTERM to arrive in its middle
SHORTEST_DRAIN = 0.2  # less could be data that was already on its way
LEAST_COSINE = 0.9999
QUANTIZED_TOKENS = 8
# Formats of torchao, which the image must contain.
TORCHAO = {"amd64": (INT8_REFERENCE, EXAMPLE), "arm64": (INT8_REFERENCE, EXAMPLE, KLEIDI_INT4[32])}
SAME = "the first architecture's, letter by letter"
# The server needs neither: without them the image must start, answer and stop.
SHELLS = ("/usr/bin/dash", "/usr/bin/bash")
LOOK = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/1/status") if ":" in line)
try:
    open("/opt/armature/written", "w").close()
    written = True
except OSError:
    written = False
print(json.dumps({name: status[name].split()[0] for name in ("Uid", "CapEff", "NoNewPrivs", "Seccomp")} | {"written": written}))
"""
CONFINED = {"Uid": "10001", "CapEff": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2", "written": False}


def run(findings: Findings, images: Sequence[Image], limits: Sequence[str]) -> None:
    """Check that both images return the same greedy text in FP32 and nearly the same vector."""
    texts, vectors = {}, {}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        no_shells = without_shells(Path(folder))
        for image in images:
            options = (*limits, *no_shells)
            with Container(image, options, ("--precision", "fp32")) as decoder:
                ready = decoder.wait_until_ready()
                texts[image.architecture] = _decodes(findings, decoder)
                rows.append((image.architecture, "llama", f"{ready:.1f}", *_plan(decoder.get("/info"))))
                _drains(findings, decoder)
            with Container(image, options, ("--model", "bert", "--precision", "fp32")) as encoder:
                ready = encoder.wait_until_ready()
                vectors[image.architecture] = _embeds(findings, encoder)
                rows.append((image.architecture, "bert", f"{ready:.1f}", *_plan(encoder.get("/info"))))
            for quantization in TORCHAO[image.architecture]:
                _serves_torchao(findings, image, quantization, options)
    findings.table("Ready", ("architecture", "model", "seconds", "processor", "kernels", "threads", "precision"), rows)
    _alike(findings, texts, vectors)


def _serves_torchao(findings: Findings, image: Image, quantization: str, options: Sequence[str]) -> None:
    """Check that a config of torchao serves, and that the plan says so."""
    with Container(image, options, ("--quantization", quantization)) as server:
        server.wait_until_ready()
        planned = server.get("/info")["plan"]["precision"]["value"]
        body = {"prompt": PROMPT, "max_tokens": QUANTIZED_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = server.post("/generate", body)
    served = planned == quantization and answer["usage"]["completion_tokens"] == QUANTIZED_TOKENS
    found = f"{planned}: “{answer['text']}”"
    findings.check(
        f"{image.architecture}: serves a format of torchao", served, found, f"{QUANTIZED_TOKENS} tokens in it"
    )


def without_shells(folder: Path) -> tuple[str, ...]:
    """Return docker options that replace each shell by an empty file."""
    empty = folder / "empty"
    empty.touch()
    return tuple(f"--volume={empty}:{shell}:ro" for shell in SHELLS)


def _plan(info: Any) -> Iterator[str]:
    yield info["facts"]["cpu"]["name"] or info["facts"]["architecture"]
    yield from (str(info["plan"][name]["value"]) for name in ("kernels", "threads", "precision"))


def _decodes(findings: Findings, server: Container) -> str:
    named = server.image.architecture
    look = json.loads(docker("exec", server.name, "python3", "-SEc", LOOK).stdout)
    findings.check(f"{named}: confined", look == CONFINED, look, "user 10001, no capability, seccomp, nothing written")
    shell = docker("exec", server.name, "/bin/sh", "-c", "true", check=False)
    findings.check(
        f"{named}: serves without a shell", shell.returncode != 0, f"/bin/sh ends with {shell.returncode}", "no shell"
    )
    findings.check(f"{named}: /healthz", server.status("/healthz") == 200, server.status("/healthz"), 200)
    answer = server.post(
        "/generate", {"prompt": PROMPT, "max_tokens": GREEDY_TOKENS, "temperature": 0, "ignore_eos": True}
    )
    made = answer["usage"]["completion_tokens"]
    findings.check(f"{named}: generates", made == GREEDY_TOKENS, f"{made} tokens", f"{GREEDY_TOKENS} tokens")
    _scraped(findings, server, f'armature_tokens_total{{kind="completion"}} {float(made)}')
    _healthy(findings, server)
    return str(answer["text"])


def _scraped(findings: Findings, server: Container, sample: str) -> None:
    text = server.get("/metrics")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    findings.check(f"{server.image.architecture}: /metrics", sample in lines, f"{len(lines)} samples", sample)


def _healthy(findings: Findings, server: Container) -> None:
    """Check the health: docker probes every second until the first success, then every ten."""
    deadline = time.monotonic() + 60
    while server.state()["Health"]["Status"] != "healthy" and time.monotonic() < deadline:
        time.sleep(1)
    status = server.state()["Health"]["Status"]
    findings.check(f"{server.image.architecture}: HEALTHCHECK", status == "healthy", status, "healthy")


def _drains(findings: Findings, server: Container) -> None:
    """Send SIGTERM during a stream: the stream must reach its last event, and the exit status must be 0."""
    named, tokens = server.image.architecture, _tokens_for(server, STREAM_SECONDS)
    events = _events(
        server, {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    )
    seen = [next(events)]
    docker("kill", "--signal=TERM", server.name)
    stopped = time.perf_counter()
    seen += events
    went_on = time.perf_counter() - stopped
    streamed = sum(len(event.get("token_ids", ())) for event in seen)
    ended = seen[-1].get("finish_reason")
    whole = streamed == tokens and ended == "length" and went_on > SHORTEST_DRAIN
    found = f"{streamed} of {tokens} tokens, {ended}, {went_on:.1f} s after it"
    findings.check(f"{named}: a stream that is open at SIGTERM ends well", whole, found, "all tokens, length")
    code = server.wait(DRAIN_SECONDS)
    found = f"{code} after {time.perf_counter() - stopped:.1f} s"
    findings.check(f"{named}: exit status after SIGTERM", code == 0, found, 0)


def _tokens_for(server: Container, seconds: float) -> int:
    began = time.perf_counter()
    server.post("/generate", {"prompt": PROMPT, "max_tokens": GREEDY_TOKENS, "temperature": 0, "ignore_eos": True})
    rate = GREEDY_TOKENS / (time.perf_counter() - began)
    return int(max(4, min(1900, rate * seconds)))


def _events(server: Container, body: Any) -> Iterator[dict[str, Any]]:
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=DRAIN_SECONDS) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def _embeds(findings: Findings, server: Container) -> list[float]:
    vector: list[float] = server.post("/encode", {"inputs": [TEXT], "normalize": True})["embeddings"][0]
    length = math.sqrt(sum(value * value for value in vector))
    found = f"{len(vector)} numbers of length {length:.5f}"
    findings.check(f"{server.image.architecture}: embeds", abs(length - 1) < 1e-4, found, "length 1")
    return vector


def _alike(findings: Findings, texts: dict[str, str], vectors: dict[str, list[float]]) -> None:
    if len(texts) < 2:
        findings.skipped.append("one text on both architectures: only one was tried.")
        return
    (first, text), *others = texts.items()
    for name, other in others:
        findings.check(f"{first} and {name} say the same in FP32", other == text, f"“{other}”", SAME)
        cosine = sum(one * two for one, two in zip(vectors[first], vectors[name], strict=True))
        findings.check(
            f"{first} and {name} embed alike", cosine >= LEAST_COSINE, f"cosine {cosine:.7f}", f">= {LEAST_COSINE}"
        )
