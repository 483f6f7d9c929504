"""The lines that a ready server prints: what it serves, where, in which precision and why, and what to type next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from app.hardware.decision import format_bytes, format_count
from app.models.encoders.config import EncoderConfig
from app.server.prepare import Prepared
from app.weights.program import ProgramCheckpoint

# A client cannot connect to the address that stands for every address of the machine.
_LOOPBACK = {"//0.0.0.0:": "//127.0.0.1:", "//[::]:": "//[::1]:"}


def start_summary(prepared: Prepared, url: str, seconds: float, has_chat: bool) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each line; `seconds` is the time of the start."""
    plan, needs = prepared.plan, prepared.needs
    stored = needs.stored_quantization or needs.stored_dtype
    yield (
        "model",
        f"{prepared.model_name}: {needs.architecture}, {needs.num_parameters / 1e6:,.0f}M parameters"
        f"{f' of {stored}' if stored else ''}, from {prepared.checkpoint.location}",
    )
    yield "machine", _machine(prepared)
    yield "precision", f"{plan.weights.precision}. {plan.decisions['precision'].reason}"
    yield "memory", _memory(prepared)
    capacity = plan.decisions["capacity_tokens_per_second"]
    yield "speed", capacity.reason if capacity.value else plan.decisions["speed_source"].reason
    page = "/ is a page to try the model, " if prepared.settings.page == "on" else ""
    yield "ready", f"in {seconds:.1f} s at {url} ({page}/docs lists the API)"
    yield "try", try_command(prepared, url, has_chat)


def _machine(prepared: Prepared) -> str:
    facts, plan = prepared.facts, prepared.plan
    gpu = plan.gpu(facts)
    threads = format_count(plan.cpu.threads, "thread")
    processor = facts.cpu.name or facts.architecture
    where = f"{processor}, {threads}, {plan.weights.kernels} kernels"
    if gpu is not None:
        where = gpu.name
    elif plan.placement.device != "cpu":
        where = f"{plan.placement.device} of {processor}"
    return f"{where}, {format_bytes(facts.usable_bytes)} of memory available"


def _memory(prepared: Prepared) -> str:
    plan, needs = prepared.plan, prepared.needs
    weights = f"{format_bytes(plan.memory.weight_bytes)} of weights"
    if not needs.generates:
        return weights
    return (
        f"{weights}, {format_bytes(plan.memory.kv_cache_bytes)} of KV cache for "
        f"{format_count(plan.memory.max_running_seqs, 'sequence')} at a time, of up to {plan.memory.max_model_len:,} tokens"
    )


def try_command(prepared: Prepared, url: str, has_chat: bool) -> str:
    """Return a `curl` command whose answer shows what the model does, to paste into a shell of this machine."""
    path, body = _first_request(prepared, has_chat)
    for every, own in _LOOPBACK.items():
        url = url.replace(every, own)
    words = ["curl", f"{url}{path}"]
    if url.startswith("unix:"):
        words = ["curl", "--unix-socket", url.removeprefix("unix:"), f"http://localhost{path}"]
    if url.startswith("https:"):
        words.append("--insecure")  # the certificate names a host, not this address
    if prepared.settings.api_keys or prepared.settings.api_key_file is not None:
        words += ["-H", "authorization: Bearer YOUR_KEY"]
    if body is not None:
        words += ["-H", "content-type: application/json", "-d", json.dumps(body)]
    return shlex.join(words)


def _first_request(prepared: Prepared, has_chat: bool) -> tuple[str, dict[str, Any] | None]:
    """Return the path of a first request and its body; without a body it is a GET."""
    if isinstance(prepared.checkpoint, ProgramCheckpoint):
        return f"/v2/models/{prepared.model_name}", None  # its inputs and outputs
    config = prepared.checkpoint.model_config
    if isinstance(config, EncoderConfig):
        return ("/predict" if config.labels else "/v1/embeddings"), (
            {"inputs": "I like you."} if config.labels else {"input": "I like you."}
        )
    if has_chat:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
    return "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 64}
