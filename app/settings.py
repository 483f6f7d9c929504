"""All settings of the server, defined once: each is a flag, an environment variable `ARMATURE_*` and a row of the docs.

Most default to `auto`; the plan decides what `auto` becomes and prints the value with its reason.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import tomllib
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from app.errors import SettingsInvalid

PREFIX = "ARMATURE_"
# Read by armature_kernels/native/library.py itself, for tests and for builders of the library; the last by tools/native.py.
NATIVE_VARIABLES = ("ARMATURE_ISA", "ARMATURE_NATIVE_LIBRARY", "ARMATURE_WHEELS")
DEMO_DIRECTORY = Path(__file__).resolve().parent / "demo" / "llama"
# Groups in which help and documentation show the settings, in this order.
Group = Literal["model", "machine", "network", "limits", "tuning"]
SETTING_GROUPS: tuple[Group, ...] = get_args(Group)
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)
_PERCENT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*%\s*$")
# Settings that are one value for all models of a process, besides those of the network.
COMMON_SETTINGS = (
    "model_control", "hourly_price", "watts", "rate_limit", "max_connections", "write_timeout_seconds", "drain_seconds",
)  # fmt: skip
KEY_SETTINGS = ("api_keys", "api_key_file")  # of a model in the place of the keys for all
KEPT_PRECISIONS = ("int4", "int8", "bf16")  # of layers that `keep_layers` names
_MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAMED_MODEL = re.compile(rf"{_MODEL_NAME}=")
_NEXT_MODEL = re.compile(rf",(?={_MODEL_NAME}=)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_share(value: Any) -> Any:
    """Convert `3%` to 0.03. Any other value is returned unchanged for the field's own validation."""
    match = _PERCENT.match(value) if isinstance(value, str) else None
    return value if match is None else float(match[1]) / 100


def parse_kept_layers(text: str) -> tuple[tuple[str, str], ...]:
    """Return the pairs of pattern and precision in `keep_layers`. Raises `ValueError`."""
    pairs = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        pattern, equals, precision = (word.strip() for word in item.rpartition("="))
        if not equals or not pattern or precision not in KEPT_PRECISIONS:
            raise ValueError(f"{item!r} is not PATTERN=PRECISION with a precision of {', '.join(KEPT_PRECISIONS)}")
        pairs.append((pattern, precision))
    return tuple(pairs)


def parse_bytes(value: Any) -> Any:
    """Convert `4GiB`, `4G` (1024-based) or `500MB` (1000-based) to bytes, and leave others to the field."""
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        return value
    number, unit, binary = match.groups()
    base = 1000 if value.strip().lower().endswith("b") and not binary and unit else 1024
    return int(float(number) * base ** _POWERS[unit.lower()])


def parse_model(value: Any) -> Any:
    """Make `./ORG/NAME` absolute, which `Path` would shorten to the name of a model on the hub; return others unchanged."""
    return Path.cwd() / value if isinstance(value, str) and value.startswith("./") else value


def named_models(text: str) -> tuple[tuple[str, str], ...]:
    """Return the pairs of name and model of `chat=ORG/NAME,embed=DIR`; none if the text is one model, as it is.

    A name has no slash, and a text that exists as a path is a path: `./lr=1`, `/data/lr=1` and an existing `lr=1` are
    directories. A comma separates only before the next `NAME=`.
    """
    if not _NAMED_MODEL.match(text) or Path(text).exists():
        return ()
    return tuple((name, model) for name, _, model in (item.partition("=") for item in _NEXT_MODEL.split(text)))


def parse_names(value: Any) -> Any:
    """Split `a,b` at its commas; any other value is returned unchanged for the field's own validation."""
    if not isinstance(value, str):
        return value
    names = tuple(name.strip() for name in value.split(","))
    if not all(names):
        raise ValueError("names must not be empty")
    return names


Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Bytes = Annotated[int, Field(ge=1)]


def parse_list(value: Any) -> Any:
    """Convert `a,b` or the JSON list `["a", "b"]` to a tuple of texts. Other values are returned unchanged."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    if value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except ValueError as error:
            raise ValueError("is neither a JSON list nor texts separated by commas") from error
        return tuple(parsed)
    texts = tuple(text.strip() for text in value.split(","))
    if not all(texts):
        raise ValueError("has an empty text in a list separated by commas")
    return texts


def parse_hosts(value: Any) -> Any:
    """Convert `0.0.0.0,[::1],unix:/run/x.sock` to a tuple of addresses, without brackets.

    Raises `ValueError` if one of several is empty, or has a port or is a path without `unix:`.
    """
    texts = value.split(",") if isinstance(value, str) else value
    hosts = tuple(text.strip() for text in texts)
    for host in hosts:
        if not host and len(hosts) > 1:
            raise ValueError("has an empty text in a list separated by commas")
        if unix_path_of(host) is None and (host.startswith(("/", ".", "~")) or host.endswith(".sock")):
            raise ValueError(f"{host!r} is a path: the address of a UNIX socket is unix:PATH, such as unix:/run/x.sock")
        if re.fullmatch(r"(\[.*\]|[^:]*):\d+", host):
            raise ValueError(f"{host!r} has a port, which is the setting port")
    return tuple(host[1:-1] if host.startswith("[") and host.endswith("]") else host for host in hosts)


def unix_path_of(host: str) -> Path | None:
    """Return the path of a UNIX socket's address, `unix:PATH`; None for others."""
    path = host.removeprefix("unix:")
    return None if path == host or not path else Path(path).expanduser()


def parse_rate_limit(text: str) -> tuple[int | None, int | None]:
    """Return the requests and the tokens per minute of `rate_limit` (None: unlimited). Raises `ValueError`."""
    limits: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (word.strip() for word in item.partition("="))
        is_count = number.isdecimal() and 0 < int(number) < 10**12
        if name not in ("requests", "tokens") or name in limits or not is_count:
            raise ValueError(f"{item!r} is not requests=N or tokens=N with a number of at least 1, each at most once")
        limits[name] = int(number)
    return limits.get("requests"), limits.get("tokens")


def _check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    if not all(keys):
        raise ValueError("has an empty key")
    return keys


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise ValueError(f"{origin!r} is neither * nor an origin such as https://app.example.com, without a path")
    return origins


_MAX_HOST_CHARACTERS = 300  # a name has 253
_IMAGE_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_](?:[a-z0-9._-]*[a-z0-9_])?))(?::([0-9]{1,5}))?")


def parse_image_host(text: str) -> tuple[str, int | None]:
    """Return name and port of `allow_image_urls`, `HOST` or `HOST:PORT`, in one spelling. Raises `ValueError`."""
    found = _IMAGE_HOST.fullmatch(text.lower().removesuffix("."))
    if found is None or len(text) > _MAX_HOST_CHARACTERS or int(found[3] or 1) not in range(1, 2**16):
        raise ValueError(f"{text[:100]!r} is no name of a host such as images.example.com or 10.0.0.5:8080")
    name = found[2] or str(ipaddress.IPv6Address(found[1]))
    return name, int(found[3]) if found[3] else None


def _check_endpoint(url: str) -> str:
    if url and not re.fullmatch(r"https?://[^/?#\s]+(/\S*)?", url):
        raise ValueError("is no URL such as http://collector:4318; spans are sent over HTTP, not gRPC")
    return url


def parse_adapters(names: tuple[str, ...]) -> tuple[tuple[str, Path], ...]:
    """Return the name and directory of each adapter in `lora`, without duplicates. Raises `ValueError`."""
    pairs = [item.partition("=") for item in names]
    for item, (name, equals, directory) in zip(names, pairs, strict=True):
        if not equals or not name or not directory:
            raise ValueError(f"{item!r} is not NAME=DIR")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise ValueError("two adapters have the same name")
    return tuple((name, Path(directory).expanduser()) for name, _, directory in pairs)


def _checked_by(parse: Callable[[Any], object]) -> AfterValidator:
    """Return a validator that refuses what `parse` refuses, and keeps the value as it was given."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return AfterValidator(check)


# NoDecode: a variable too may be separated by commas, which pydantic-settings would refuse as no JSON.
TextList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_list)]


def setting(
    group: Group,
    default: Any,
    description: str,
    *,
    is_measured: bool = False,
    generates_only: bool = False,
    is_secret: bool = False,
    **constraints: Any,
) -> Any:
    """Declare a setting; its name gives the flag and the environment variable.

    `is_measured`: it changes what calibration measures; memory and limits of requests do not. `generates_only`: it is
    refused for models that do not generate. `is_secret`: it is never printed, not even in a refusal. `constraints` are
    as for pydantic's `Field`.
    """
    declared: dict[str, Any] = {
        "group": group,
        "is_measured": is_measured,
        "generates_only": generates_only,
        "is_secret": is_secret,
    }
    return Field(default, description=description, json_schema_extra=declared, **constraints)


class Settings(BaseSettings):
    """The server's settings, frozen once read. Unknown flags are refused, unknown `ARMATURE_*` are named."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True, protected_namespaces=()
    )

    model: Annotated[Path | None, BeforeValidator(parse_model)] = setting(
        "model",
        None,
        "A model of Hugging Face's hub, as ORG/NAME, ORG/NAME@REVISION or ORG/NAME:FILE.gguf, which is fetched into the hub's"
        " cache if it is not there; a checkpoint directory (Hugging Face or sentence-transformers layout); a GGUF file; an exported program"
        " (.pt2, .onnx); or a name: demo, bert, minilm; the embedded demo if not given. Several models: NAME=MODEL for each, or a"
        " file models.toml with a table of settings for each.",
    )
    load: Literal["start", "on-demand"] = setting(
        "model", "start", "When a model is loaded: with the server, or when a request names it first."
    )
    unload_after_seconds: PositiveFloat | Literal["never"] = setting(
        "model", "never", "Time without a request after which a model is unloaded; the next request loads it again."
    )
    model_control: Literal["off", "on"] = setting(
        "model",
        "off",
        "Let clients load and unload the models that are configured here, by name: with the Open Inference Protocol's"
        " repository, Ollama's keep_alive and llama.cpp's /models/load.",
    )
    offline: Literal["off", "on"] = setting(
        "model", "off", "Fetch nothing: a model that is not on this machine is refused. The images set it to on."
    )
    served_model_name: Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_names)] = setting(
        "model",
        (),
        "Names clients use for the model; answers have the first. In the variable they are separated by commas."
        " The directory's name, or ORG/NAME of a model of the hub, if not given.",
    )
    any_model_name: Auto | Literal["off", "on"] = setting(
        "model",
        "auto",
        "Accept every model name in a request's body, for clients that send a fixed one such as gpt-4o; on: also in paths;"
        " auto: yes, unless adapters may be served or there are several API keys.",
    )
    lora: Annotated[TextList, _checked_by(parse_adapters)] = setting(
        "model", (), "LoRA adapters, as NAME=DIR with peft's directory; a request chooses one by its name as the model."
    )
    lora_root: Path | None = setting(
        "model",
        None,
        "Directory of adapters that clients may load and unload while the server runs; none: they may not.",
    )
    max_loras: PositiveInt | Auto = setting(
        "model", "auto", "Adapters that may be loaded at the same time; auto: those listed, or 8 with lora_root."
    )
    max_lora_rank: Annotated[int, Field(ge=1, le=64)] | Auto = setting(
        "model", "auto", "Highest rank of an adapter, up to 64; auto: that of the listed ones, or 16 with lora_root."
    )
    draft_model: Annotated[Path | None, BeforeValidator(parse_model)] = setting(
        "model",
        None,
        "A smaller decoder with the same tokens, or a draft head, given like model, that drafts too, where it is measured to pay.",
        generates_only=True,
    )
    mmproj: Path | None = setting(
        "model",
        None,
        "File with the picture part of a GGUF model, as llama.cpp writes it; if not given, the one that lies beside it.",
        generates_only=True,
    )
    chat_template: Path | None = setting("model", None, "File with the chat template, in place of the checkpoint's.")
    tool_call_parser: Literal[
        "auto", "apertus", "apriel", "command_a", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4",
        "firefunction", "functionary", "gemma4", "gigachat", "gigachat3", "glm45", "granite", "hermes", "hunyuan", "json",
        "kimi_k2", "kimi_k3", "lfm2", "llama3_json", "llama_function", "minicpm5", "minimax", "minimax_m2", "minimax_m3",
        "mistral", "mistral_v11", "nemotron", "openai", "phi4_mini_json", "pythonic", "qwen3_coder", "seed_oss", "solar",
    ] = setting("model", "auto", "Format of the model's tool calls; auto: as its chat template writes them.")  # fmt: skip
    reasoning_parser: Literal[
        "auto", "off", "apertus", "apriel", "command_a", "deepseek_r1", "gemma4", "granite", "hunyuan", "kimi_k3",
        "kimi_vl", "minimax_m3", "mistral", "openai_gptoss", "qwen3", "seed_oss",
    ] = setting("model", "auto",
        "Tags of the model's reasoning, which is returned as reasoning_content; auto: as its chat template says;"
        " off: it stays in the text.")  # fmt: skip
    generation_config: Literal["auto", "off"] = setting(
        "model",
        "auto",
        "Sampling parameters that a request does not give: auto: those of the checkpoint's generation_config.json;"
        " off: neutral ones.",
    )
    engine: Literal["auto", "native", "transformers", "onnxruntime"] = setting(
        "model",
        "auto",
        "What computes the model: native, this package; transformers, the library of that name (the extra transformers);"
        " onnxruntime, for exported programs (the extra onnx); auto: native where the architecture is, and for a program"
        " whichever is faster.",
        is_measured=True,
    )
    device: Literal["auto", "cpu", "mps", "cuda"] = setting("machine", "auto", "Device to serve on.", is_measured=True)
    cuda_device: Annotated[int, Field(ge=0)] | Auto = setting(
        "machine", "auto", "GPU to serve on, by nvidia-smi's number; auto: the one with the most free memory."
    )
    numa_node: Annotated[int, Field(ge=0)] | Auto = setting(
        "machine", "auto", "NUMA node to serve on.", is_measured=True
    )
    threads: PositiveInt | Auto = setting("machine", "auto", "Compute threads.", is_measured=True)
    kv_cache_bytes: Annotated[Bytes | Auto, BeforeValidator(parse_bytes)] = setting(
        "machine", "auto", "KV cache memory, such as 4GiB.", generates_only=True
    )
    memory_bytes: Annotated[Bytes | Auto, BeforeValidator(parse_bytes)] = setting(
        "machine",
        "auto",
        "Most memory for a model, such as 4GiB: weights, KV cache and the rest; auto: what is available, or its share beside"
        " other models.",
    )
    cache_dir: Path | None = setting(
        "machine", None, "Directory for packed weights and calibration; ~/.cache/armature if not given."
    )
    calibrate: Literal["auto", "on", "off"] = setting(
        "machine", "auto", "Measure the machine with the model's shapes; auto: once; on: at every start."
    )
    engine_process: Literal["auto", "on", "off"] = setting(
        "machine",
        "auto",
        "Compute in a process of its own, beside the one that serves HTTP; auto: on a GPU, and for each of several models.",
    )
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = setting(
        "machine", 1, "GPUs among which the heads and MLPs of a model are split.", is_measured=True
    )
    data_parallel: Annotated[int, Field(ge=1, le=64)] = setting(
        "machine",
        1,
        "Engines of the same model, each on a GPU or on a part of the processor's cores, behind one address; memory_bytes,"
        " kv_cache_bytes and threads are for each.",
    )
    hourly_price: PositiveFloat | None = setting(
        "machine",
        None,
        "Price of this machine in dollars per hour, for cost metrics.",
    )
    watts: PositiveFloat | None = setting(
        "machine",
        None,
        "Power of this machine in watts while steps run; used if no energy counter can be read.",
    )
    host: Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_hosts)] = setting(
        "network",
        ("127.0.0.1",),
        "Addresses to listen on, such as 0.0.0.0, :: (both IPv6 and IPv4), a name, or unix:/run/armature.sock for a UNIX"
        " socket; an empty text: all addresses.",
    )
    port: int = setting("network", 8000, "TCP port to listen on; 0 picks a free one.", ge=0, le=65535)
    api_processes: Annotated[int, Field(ge=1, le=64)] | Auto = setting(
        "network",
        "auto",
        "Processes that serve HTTP on the same addresses, where one event loop is too slow for the engine; auto: one.",
    )
    keep_alive_seconds: PositiveFloat = setting(
        "network",
        620.0,
        "Time that a connection without a request stays open. Longer than load balancers keep theirs (600 s at Google, 60 s at"
        " AWS), which would otherwise send a request as it closes.",
    )
    tls_cert: Path | None = setting(
        "network", None, "File with the certificate chain for TLS, in PEM; without it the server speaks plain HTTP."
    )
    tls_key: Path | None = setting("network", None, "File with the private key of the certificate, in PEM.")
    api_keys: Annotated[TextList, AfterValidator(_check_keys)] = setting(
        "network",
        (),
        "API keys accepted as Bearer tokens, separated by commas or as a JSON list; none: no key is needed.",
        is_secret=True,
    )
    api_key_file: Path | None = setting("network", None, "File with one API key per line.")
    allowed_hosts: TextList = setting(
        "network",
        (),
        "Host names that requests may name, such as api.example.com or *.example.com. None: any, but on"
        " loopback without keys only loopback names. Health and metrics are exempt.",
    )
    cors_allow_origins: Annotated[TextList, AfterValidator(_check_origins)] = setting(
        "network", (), "Origins whose web pages may use the API, such as https://app.example.com, or *; none: no other."
    )
    page: Literal["on", "off"] = setting(
        "network",
        "on",
        "Serve the web page at /, where people try the model and see what the machine does; --no-page: off.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("network", "info", "Least severe message to log.")
    log_format: Literal["text", "json"] = setting(
        "network", "text", "Form of the log on standard error: text, or json: one JSON object a line."
    )
    request_log: Literal["on", "off"] = setting(
        "network", "on", "Log one line for each request, without its content; --no-request-log: off."
    )
    otlp_traces_endpoint: Annotated[str, AfterValidator(_check_endpoint)] = setting(
        "network",
        "",
        "Collector that gets a trace of each request by OTLP over HTTP, such as http://collector:4318; needs the extra otel."
        " If not given: OTEL_EXPORTER_OTLP_ENDPOINT; without that, no traces.",
    )
    trace_sample_ratio: Annotated[float | None, Field(ge=0, le=1), BeforeValidator(parse_share)] = setting(
        "network",
        None,
        "Share of requests that are traced if the client's traceparent does not decide it, such as 0.1 or 10%; if not given:"
        " as OTEL_TRACES_SAMPLER says, or all.",
    )
    max_model_len: PositiveInt | Auto = setting(
        "limits", "auto", "Longest context, prompt and completion together, in tokens.", is_measured=True
    )
    max_running_seqs: PositiveInt | Auto = setting(
        "limits", "auto", "Maximum number of sequences computed at the same time.", is_measured=True
    )
    max_waiting_requests: PositiveInt | Auto = setting(
        "limits", "auto", "Requests that may queue before new ones are refused with 429."
    )
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "limits",
        "fcfs",
        "Order of requests: fcfs: that of their arrival; priority: those with the lowest priority first, which any client"
        " may set, so that those of others may wait without end.",
    )
    max_logprobs: Annotated[int, Field(ge=-1)] = setting(
        "limits",
        20,
        "Most log-probabilities that a request may ask for at each token; -1: those of the whole vocabulary.",
    )
    max_images: Annotated[int, Field(ge=0)] = setting(
        "limits", 16, "Most pictures that a chat may have, with a model that reads them; 0: none."
    )
    allow_image_urls: Annotated[TextList, _checked_by(lambda hosts: list(map(parse_image_host, hosts)))] = setting(
        "limits",
        (),
        "Hosts from whose addresses pictures are fetched, such as images.example.com or 10.0.0.5:8080; none: pictures come"
        " in requests alone. A name may not lead to a private address.",
    )
    rate_limit: Annotated[str, _checked_by(parse_rate_limit)] = setting(
        "limits",
        "",
        "Most that each API key, or each address without one, may use per minute, as requests=N, tokens=N or both,"
        " separated by a comma; none: no limit.",
    )
    max_connections: PositiveInt | Auto = setting(
        "limits",
        "auto",
        "Connections that may be open at once; auto: 4,096, or what the limit of open files allows.",
    )
    request_timeout_seconds: PositiveFloat = setting(
        "limits", 600.0, "A request that has not finished within this time is ended."
    )
    write_timeout_seconds: PositiveFloat = setting(
        "limits",
        30.0,
        "Time in which a client must take 16 KiB of a response that waits for it, or else is cut off.",
    )
    drain_seconds: Annotated[float, Field(ge=0)] = setting(
        "limits",
        30.0,
        "Time that open requests get to finish after SIGTERM.",
    )
    chat_template_cpu_seconds: PositiveFloat = setting(
        "limits", 0.2, "CPU time that the checkpoint's chat template may take for one conversation."
    )
    chat_template_memory_bytes: Annotated[Bytes, BeforeValidator(parse_bytes)] = setting(
        "limits", 64 * 2**20, "Memory that rendering a conversation may take, such as 64MiB."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "int4", "int4-small"] = setting(
        "tuning",
        "auto",
        "Weight precision; auto: one that fits and was measured to be enough faster. fp16: Apple GPUs only; fp8: NVIDIA.",
        is_measured=True,
    )
    quantization: str = setting(
        "tuning",
        "",
        "Weights in a format of torchao, by the name of its config: torchao:CONFIG or torchao:CONFIG(name=value, …);"
        " precision must then be auto.",
        is_measured=True,
    )
    quality_budget: Annotated[float, Field(ge=0), BeforeValidator(parse_share)] = setting(
        "tuning",
        0.03,
        "Largest measured increase of perplexity, or of 1 - cosine for vectors, at which auto quantizes; 0: never.",
        is_measured=True,
    )
    keep_layers: Annotated[str, _checked_by(parse_kept_layers)] = setting(
        "tuning",
        "",
        "Layers in another precision than the other quantized ones, as PATTERN=PRECISION, separated by commas;"
        " patterns match tensor names: *.down_proj=int8,lm_head=bf16.",
        generates_only=True,
    )
    int8_copy: Literal["auto", "on", "off"] = setting(
        "tuning", "auto", "With int4 weights, keep an int8 copy for steps of many rows.", is_measured=True
    )
    kv_precision: Literal["auto", "bf16", "int8"] = setting(
        "tuning",
        "auto",
        "Precision of keys and values; auto: int8 only if memory is short.",
        is_measured=True,
        generates_only=True,
    )
    max_batch_tokens: PositiveInt | Auto = setting(
        "tuning", "auto", "Maximum number of tokens in one step.", is_measured=True
    )
    itl_target_ms: PositiveFloat | Auto = setting(
        "tuning",
        "auto",
        "Target inter-token latency in milliseconds while other requests are prefilled.",
        generates_only=True,
    )
    speculation: Literal["auto", "mtp", "off"] = setting(
        "tuning",
        "auto",
        "Speculative decoding: n-gram drafts from the text so far, and drafts of the model's own head if it has one, verified by the "
        "model in one step; mtp: a model without such a head is refused.",
    )
    compile: Literal["auto", "on", "off"] = setting(
        "tuning",
        "auto",
        "Record a step's operations and replay them natively, without Python; off: run every step in Python.",
        is_measured=True,
    )
    prompt_cache: Path | None = setting(
        "tuning",
        None,
        "Directory in which keys and values of prompts are kept and found again after a restart; they can be read back as"
        " text, so only this user may enter it; memory, on an NVIDIA GPU: the host's memory. Nothing is kept if not given.",
        generates_only=True,
    )
    prompt_cache_bytes: Annotated[Bytes, BeforeValidator(parse_bytes)] = setting(
        "tuning", 8 * 2**30, "Most that the prompt cache may take, such as 8GiB."
    )
    deterministic: Literal["off", "on"] = setting(
        "tuning",
        "off",
        "Make a request's text independent of the rest of the batch; prefill is slower.",
        is_measured=True,
    )

    @property
    def weight_format(self) -> str:
        return self.quantization or self.precision

    def with_weight_format(self, name: str, **others: Any) -> Settings:
        """Return a copy that asks for this format of the weights, with other settings changed too."""
        torchao = ":" in name
        changed = {"quantization": name if torchao else "", "precision": "auto" if torchao else name}
        return self.model_copy(update={**changed, **others})

    @property
    def checkpoint_directory(self) -> Path:
        return DEMO_DIRECTORY if self.model is None else self.model.expanduser()

    @property
    def cache_directory(self) -> Path | None:
        """Directory of files kept for the next start; None for a user without a home directory."""
        if self.cache_dir is not None:
            return self.cache_dir.expanduser()
        caches = os.environ.get("XDG_CACHE_HOME")
        try:
            return (Path(caches) if caches else Path.home() / ".cache") / "armature"
        except RuntimeError:  # no HOME and no such user, as in a container that runs under a bare numeric user id
            return None


def served_models(settings: Settings) -> tuple[Settings, ...]:
    """Return the settings of each model of `model`: several if it names them, or is a file of tables.

    A model's settings are its table's, then those that were given for all. Raises `SettingsInvalid`.
    """
    text = "" if settings.model is None else str(settings.model)
    if text.endswith(".toml"):
        tables = _model_tables(Path(text).expanduser())
    else:
        tables = {}
        for name, model in named_models(text):
            if name in tables:
                raise SettingsInvalid(f"model: two models are called {name}.")
            tables[name] = {"model": model}
    if not tables:
        return (settings,)
    return tuple(_model_settings(settings, name, table, len(tables)) for name, table in tables.items())


def one_model(settings: Settings) -> Settings:
    """Return the settings of the one model. Raises `SettingsInvalid` if there are several."""
    found = served_models(settings)
    if len(found) > 1:
        names = ", ".join(each.served_model_name[0] for each in found)
        raise SettingsInvalid(
            f"model names {len(found)} models ({names}), and this command takes one: give one of them."
        )
    return found[0]


def _model_tables(file: Path) -> dict[str, dict[str, Any]]:
    """Read a file with a table for each model; paths that begin with a dot are relative to the file."""
    try:
        with file.open("rb") as stream:
            tables = tomllib.load(stream)
    except OSError as error:
        raise SettingsInvalid(f"model: {file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsInvalid(f"model: {file} is not TOML: {error}.") from error
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SettingsInvalid(
                f"model: {file}: {name} is outside of a table. Write [NAME] before a model's settings."
            )
        if not re.fullmatch(_MODEL_NAME, name):
            raise SettingsInvalid(
                f"model: {file}: a model's name has letters, digits, dots, _ and - only, not {name!r}."
            )
        for key, value in table.items():
            if isinstance(value, str) and value.startswith("."):
                table[key] = str(file.resolve().parent / value)
    if not tables:
        raise SettingsInvalid(f"model: {file} has no table: each model needs one, such as [chat].")
    return tables


def _model_settings(settings: Settings, name: str, table: dict[str, Any], num_models: int) -> Settings:
    of_process = {*settings_with(group="network"), *COMMON_SETTINGS} - {*KEY_SETTINGS}
    common = next((key for key in table if key in of_process), None)
    if common is not None:
        raise SettingsInvalid(f"{common} in [{name}] is one value for all models: give it as {flag_of(common)}.")
    if "served_model_name" in settings.model_fields_set and num_models > 1:
        raise SettingsInvalid("served_model_name is of one model, and there are several: their names are in model.")
    replaced = {"model", "served_model_name"}
    if not table.keys().isdisjoint(KEY_SETTINGS):
        replaced |= {*KEY_SETTINGS}
    given = {key: getattr(settings, key) for key in settings.model_fields_set - replaced}
    aliases = parse_names(table.get("served_model_name", settings.served_model_name))
    names = {"model": table.get("model"), "served_model_name": tuple(dict.fromkeys((name, *aliases)))}
    try:
        return Settings(**{**given, **table, **names})
    except ValidationError as error:
        raise SettingsInvalid(f"[{name}] {'; '.join(_error_messages(error))}") from None


def settings_with(**declared: object) -> tuple[str, ...]:
    """Return the names of the settings that are declared so: `settings_with(group="network")`."""
    fields: dict[str, Any] = Settings.model_fields
    return tuple(name for name, field in fields.items() if declared.items() <= field.json_schema_extra.items())


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def given_settings(arguments: Namespace) -> dict[str, str]:
    """Return the settings that were given on the command line, as unparsed text by name."""
    return {name: getattr(arguments, name) for name in Settings.model_fields if hasattr(arguments, name)}


def setting_flags(arguments: Namespace) -> tuple[str, ...]:
    """Return the given settings as flags for a server that the command starts."""
    return tuple(f"{flag_of(name)}={value}" for name, value in given_settings(arguments).items())


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def kubernetes_link_variables(environ: dict[str, str]) -> list[str]:
    """Return the names of variables that Kubernetes injects for a Service called `armature`."""
    pattern = re.compile(rf"^{PREFIX}(PORT|SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)$")
    return [
        name for name, value in environ.items() if pattern.match(name) and (name != f"{PREFIX}PORT" or "://" in value)
    ]


def load_settings(**flags: Any) -> tuple[Settings, list[str]]:
    """Return the settings and the warnings to print; flags come before the environment.

    Raises `SettingsInvalid` with one sentence per mistake.
    """
    injected = kubernetes_link_variables(dict(os.environ))
    warnings = [f"{name} was injected by Kubernetes for a Service named armature and is ignored." for name in injected]
    for name in injected:
        os.environ.pop(name, None)
    known = {variable_of(name) for name in Settings.model_fields}.union(NATIVE_VARIABLES)
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    warnings += [f"{name} is not a setting and is ignored." for name in unknown]
    try:
        return Settings(**flags), warnings
    except ValidationError as error:
        raise SettingsInvalid("; ".join(_error_messages(error))) from None
    except SettingsError as error:  # a variable that must be JSON and is not
        raise SettingsInvalid(f"{error}: {error.__cause__}" if error.__cause__ else str(error)) from None


def _error_messages(error: ValidationError) -> list[str]:
    """Return one sentence per field, with the messages of a union's branches joined."""
    branches: dict[str, list[str]] = {}
    inputs: dict[str, str] = {}
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else "settings"
        branches.setdefault(name, []).append(item["msg"][:1].lower() + item["msg"][1:])
        is_secret = name in settings_with(is_secret=True)
        inputs[name] = "" if is_secret else f", got {item.get('input')!r}"
    return [
        f"{name} ({flag_of(name)}, {variable_of(name)}): {' or '.join(dict.fromkeys(texts))}{inputs[name]}"
        if name in Settings.model_fields
        else f"{name} is not a setting"
        for name, texts in branches.items()
    ]
