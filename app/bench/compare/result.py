"""One machine's result file: everything that was measured of one model on it, raw, and what one must know to believe it.

Only shapes, reading and writing: `protocol` measures what lies here, the report and the cost table read it. Seconds and bytes throughout;
moments are seconds since `began_at`, so that points, steps and readings of energy lie on one line of time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.bench.stats import MeasurementFailed

SCHEMA: Literal["armature-compare/1"] = "armature-compare/1"
Kind = Literal["generate", "embed", "infer"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Energy(_Part):
    """Joules of the whole machine (or what `source` counts) over a point, idle included; `idle_watts` were read before any load."""

    joules: float = Field(ge=0)
    source: str  # rapl, hwmon, scmi, powermetrics, nvml, modelled
    idle_watts: float | None = Field(None, ge=0)


class Steps(_Part):
    """The engine's steps while a point was measured, as columns of equal length."""

    at: list[float] = []
    seconds: list[float] = []
    phase: list[str] = []  # prefill, decode, encode
    tokens: list[int] = []
    cause: list[str] = []  # why it took longer than such steps do; empty where it did not

    @model_validator(mode="after")
    def _rows(self) -> Self:
        if len({len(column) for column in (self.at, self.seconds, self.phase, self.tokens, self.cause)}) > 1:
            raise ValueError("its columns differ in length")
        return self


class Load(_Part):
    """What was asked of the server: so many clients at once, each request of so many texts or rows (1 for a prompt)."""

    kind: Kind
    clients: int = Field(ge=1)
    batch: int = Field(1, ge=1)
    tokens: int = Field(ge=0)  # of each prompt or text; 0 where rows have none
    max_tokens: int = Field(0, ge=0)  # of each answer

    @property
    def name(self) -> str:
        if self.kind == "generate":
            clients = "1 client" if self.clients == 1 else f"{self.clients} clients"
            return f"{clients}, prompts of {self.tokens}"
        clients = f"{self.clients} clients, " if self.clients > 1 else ""
        return f"{clients}batch {self.batch}" + (f" of {self.tokens} tokens" if self.tokens else "")


class Point(_Part):
    """One load, measured after its warm-up. Latencies are raw, one for each request; gaps one for each piece of an answer after its first.

    `samples` are generations, vectors or rows, `generated_tokens` of answers, `read_tokens` of prompts and texts: those of `seconds`, in
    which all clients had something asked for. A generation of which only a part lies in them counts as that part. Latencies are of all.
    """

    load: Load
    began: float = Field(ge=0)
    seconds: float = Field(gt=0)
    samples: float = Field(ge=0)
    read_tokens: int = Field(0, ge=0)
    generated_tokens: int = Field(0, ge=0)
    request_seconds: list[float] = []
    first_token_seconds: list[float] = []
    tpot_seconds: list[float] = []
    gap_at: list[float] = []
    gap_seconds: list[float] = []
    failures: dict[str, int] = {}
    throttled_seconds: float | None = Field(None, ge=0)  # of the server's control group; None where there is no quota to read
    stolen_ratio: float | None = Field(None, ge=0)  # of all cores: taken by the host or by others than the server and this client
    client_cpu_ratio: float | None = Field(None, ge=0)  # of one core, taken by the client itself
    pressure_ratio: float | None = Field(None, ge=0)  # of the time, in which some thread of this machine waited for a core
    energy: Energy | None = None
    steps: Steps = Steps()

    @model_validator(mode="after")
    def _rows(self) -> Self:
        if len(self.gap_at) != len(self.gap_seconds):
            raise ValueError("gap_at and gap_seconds differ in length")
        return self

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """What a decoder makes, what an encoder reads."""
        return (self.generated_tokens or self.read_tokens) / self.seconds


class Result(_Part):
    """`info` is what the server's `/info` said when the first load began: version, model, facts, plan with reasons, calibration.

    `doubts` are sentences that a reader must see before the figures. `instance` names a row of the price table where the operator gave one.
    """

    schema_name: Literal["armature-compare/1"] = Field(alias="schema")
    name: str
    began_at: float  # seconds since 1970, UTC
    measured_by: str  # the version of this client
    flags: list[str] = []  # of a server of our own
    url: str | None = None  # of one that ran already
    instance: str | None = None
    hourly_price: float | None = Field(None, gt=0)
    watts: float | None = Field(None, gt=0)
    complete: bool = True
    doubts: list[str] = []
    info: dict[str, Any]
    points: list[Point] = Field(min_length=1)
    repeats: list[Point] = []  # the first point's load again, half-way and at the end: how steady the machine was

    @property
    def model_shape(self) -> dict[str, Any]:
        """What two results must share to be compared: the model's size and shape, whatever it is called and however it is rounded."""
        return {name: value for name, value in dict(self.info.get("model", {})).items() if name != "name"}


def write_result(result: Result, path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(result.model_dump_json(by_alias=True), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise MeasurementFailed(f"{path} cannot be written: {error}.") from error
    finally:
        partial.unlink(missing_ok=True)


def read_result(path: Path) -> Result:
    """Raises `MeasurementFailed`, with what is wrong with the file and what would be right."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MeasurementFailed(f"{path} cannot be read: {error}.") from error
    if not text.strip():
        raise MeasurementFailed(f"{path} is empty: measure again with `armature bench compare --output {path}`.")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MeasurementFailed(f"{path} is damaged, or no result file: {error}.") from error
    schema = fields.get("schema") if isinstance(fields, dict) else None
    if schema != SCHEMA:
        raise MeasurementFailed(
            f"{path} has the schema {schema!r}; this version reads {SCHEMA!r}, which `armature bench compare` writes."
        )
    try:
        return Result.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise MeasurementFailed(f"{path} is damaged: {place}: {first['msg']}.") from error
