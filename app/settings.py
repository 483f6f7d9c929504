"""What the operator may say, once: each field is a flag of `armature serve`, an environment variable `ARMATURE_*` and a row of the docs.

Everything but the model is `auto`; what `auto` becomes is the plan's business and is printed with its reason.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from app.errors import SettingsInvalid

PREFIX = "ARMATURE_"
# What kernels/native.py reads itself: for tests and for those who build the library.
NATIVE_VARIABLES = ("ARMATURE_ISA", "ARMATURE_NATIVE_LIBRARY")
DEMO = Path(__file__).resolve().parent / "demo" / "llama"
SECRETS = frozenset({"api_keys"})  # never printed, not even in a refusal
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(value: Any) -> Any:
    """Turns `4GiB`, `4G` (1024-based) and `500MB` (1000-based) into bytes; anything else is left to the type's own check."""
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        return value
    number, letter, binary = match.groups()
    base = 1000 if value.strip().lower().endswith("b") and not binary and letter else 1024
    return int(float(number) * base ** _POWERS[letter.lower()])


Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Bytes = Annotated[int, Field(ge=1)]


class Settings(BaseSettings):
    """Frozen once read. Unknown flags are refused by the command line; unknown `ARMATURE_*` variables are named in a warning."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True, protected_namespaces=()
    )

    model: Path | None = Field(
        None,
        description="Checkpoint directory (Hugging Face or sentence-transformers layout), exported program (.pt2), or a name: bert, minilm;"
        " the embedded demo if not given.",
    )
    served_model_name: str | None = Field(None, description="Name clients use for the model; the directory's name if not given.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port to listen on; 0 picks a free one.")
    device: Literal["auto", "cpu", "mps", "cuda"] = Field("auto", description="Device to serve on.")
    cuda_device: Annotated[int, Field(ge=0)] | Auto = Field(
        "auto", description="GPU to serve on, by nvidia-smi's number; auto: the one with the most free memory."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] = Field(
        "auto", description="Weight precision; auto: what fits, and what was measured to gain enough. fp16: on Apple GPUs."
    )
    threads: PositiveInt | Auto = Field("auto", description="Compute threads.")
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Record a step's operations and run them again natively, without Python; off: every step through Python.",
    )
    calibrate: Literal["auto", "on", "off"] = Field(
        "auto", description="Measure the machine with the model's shapes; auto: once, on: at every start."
    )
    max_model_len: PositiveInt | Auto = Field("auto", description="Longest context, prompt and completion together, in tokens.")
    max_running_seqs: PositiveInt | Auto = Field("auto", description="Sequences that may be computed at the same time.")
    max_batch_tokens: PositiveInt | Auto = Field("auto", description="Tokens in one step at the most.")
    max_waiting_requests: PositiveInt | Auto = Field(
        "auto", description="Requests that may queue before new ones are refused with 429."
    )
    request_timeout_seconds: PositiveFloat = Field(600.0, description="A request that has not finished by then is ended.")
    drain_seconds: Annotated[float, Field(ge=0)] = Field(
        30.0, description="On SIGTERM, how long open answers may take to finish."
    )
    kv_cache_bytes: Annotated[Bytes | Auto, BeforeValidator(parse_bytes)] = Field(
        "auto", description="KV cache memory, such as 4GiB."
    )
    cache_dir: Path | None = Field(None, description="Where packs and calibration are kept; ~/.cache/armature if not given.")
    api_keys: tuple[str, ...] = Field((), description="API keys clients must send as Bearer tokens, as a JSON list; none: open.")
    api_key_file: Path | None = Field(None, description="File with one API key a line.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe message to log.")
    hourly_price: PositiveFloat | None = Field(None, description="Dollars an hour of this machine, for metrics of cost.")
    watts: PositiveFloat | None = Field(
        None,
        description="Watts that this machine takes while it computes; counted while steps run, where no counter can be read.",
    )
    itl_target_ms: PositiveFloat | Auto = Field(
        "auto", description="Inter-token latency that prefill of other requests may not exceed."
    )
    kv_precision: Literal["auto", "bf16", "int8"] = Field(
        "auto", description="Precision of keys and values; auto: int8 only where memory is short."
    )
    int8_copy: Literal["auto", "on", "off"] = Field("auto", description="With int4, hold an int8 copy for many rows.")
    speculation: Literal["auto", "off"] = Field(
        "auto", description="Guess what follows a repeated phrase and check it in one step; each token stays the model's own."
    )
    numa_node: Annotated[int, Field(ge=0)] | Auto = Field("auto", description="NUMA node to serve on.")
    deterministic: Literal["off", "on"] = Field(
        "off", description="Same request, same text, whatever else is in the batch; prompts are slower."
    )

    @property
    def checkpoint_directory(self) -> Path:
        """The directory to serve: what was asked for, or the demo that comes with the package."""
        return DEMO if self.model is None else self.model.expanduser()

    @property
    def cache_directory(self) -> Path | None:
        """Where things are kept for the next start: what was asked for, or the user's cache; None for a user without a home."""
        if self.cache_dir is not None:
            return self.cache_dir.expanduser()
        caches = os.environ.get("XDG_CACHE_HOME")
        try:
            return (Path(caches) if caches else Path.home() / ".cache") / "armature"
        except RuntimeError:  # no HOME, and the system does not know this user: so in a container with a number for a user
            return None


def kubernetes_link_variables(environ: dict[str, str]) -> list[str]:
    """Names of variables that Kubernetes injects for a Service called `armature` (`ARMATURE_PORT=tcp://10.0.0.1:8000` and its kin)."""
    pattern = re.compile(rf"^{PREFIX}(PORT|SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)$")
    return [name for name, value in environ.items() if pattern.match(name) and (name != f"{PREFIX}PORT" or "://" in value)]


def load_settings(**flags: Any) -> tuple[Settings, list[str]]:
    """Settings from flags over environment, with the warnings to print. Raises `SettingsInvalid` with one sentence a mistake."""
    injected = kubernetes_link_variables(dict(os.environ))
    warnings = [f"{name} was injected by Kubernetes for a Service named armature and is ignored." for name in injected]
    for name in injected:
        os.environ.pop(name, None)
    known = {row.variable for row in setting_rows()}.union(NATIVE_VARIABLES)
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    warnings += [f"{name} is not a setting and is ignored." for name in unknown]
    try:
        return Settings(**flags), warnings
    except ValidationError as error:
        raise SettingsInvalid("; ".join(_sentences(error))) from None
    except SettingsError as error:  # a variable that should hold JSON and does not
        raise SettingsInvalid(f"{error}: {error.__cause__}" if error.__cause__ else str(error)) from None


def _sentences(error: ValidationError) -> list[str]:
    """One sentence a field: a union reports each of its branches, and any of them would have done."""
    branches: dict[str, list[str]] = {}
    inputs: dict[str, str] = {}
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else "settings"
        branches.setdefault(name, []).append(item["msg"][:1].lower() + item["msg"][1:])
        secret = name in SECRETS
        inputs[name] = "" if secret else f", got {item.get('input')!r}"
    rows = {row.name: row for row in setting_rows()}
    return [
        f"{name} ({rows[name].flag}, {rows[name].variable}): {' or '.join(dict.fromkeys(texts))}{inputs[name]}"
        if name in rows
        else f"{name} is not a setting"
        for name, texts in branches.items()
    ]


# ---- the same words for the command line and the docs --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting as people see it. `values` says what it takes, `default` is empty where there is none."""

    name: str
    flag: str
    variable: str
    values: str
    default: str
    description: str


def setting_rows() -> list[SettingRow]:
    """Every setting in the order of its declaration; flags, help texts and `docs/settings.md` are made from these."""
    return [
        SettingRow(
            name=name,
            flag=f"--{name.replace('_', '-')}",
            variable=PREFIX + name.upper(),
            values="|".join(dict.fromkeys(_values(field.annotation))),
            default="" if field.default in (None, ()) else str(field.default),
            description=field.description or "",
        )
        for name, field in Settings.model_fields.items()
    ]


_WORDS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


def _values(annotation: Any) -> list[str]:
    """`auto|INTEGER` and the like, out of a type."""
    if get_origin(annotation) is Annotated:
        return _values(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return sorted((word for part in parts for word in _values(part)), key=str.isupper)
    if get_origin(annotation) is tuple:
        return ["JSON LIST"]
    return [_WORDS[annotation]]
