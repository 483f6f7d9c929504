"""Result files of machines that do not exist: invented figures in the shape of measured ones, for the report's and the costs' tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from armature_bench.compare.result import CompareResult, LoadPoint, LoadSpec, PointEnergy, StepColumns

BEGAN = 1_790_000_000.0
CLIENTS = (1, 2, 4, 8, 16, 32)
BATCHES = (1, 4, 8, 16, 32)
LENGTHS = (128, 512)
ANSWER = 128
WEIGHTS = 1_100_000_000  # parameters of the model that is not there


@dataclass(frozen=True, slots=True)
class Machine:
    """`speed`: by how much quicker than the first; `watts` of load and `idle_watts`, None where nobody counts joules."""

    name: str = "xeon"
    architecture: str = "x86_64"
    vendor: str = "Intel"
    cpu: str = "Xeon Platinum 8488C"
    cores: int = 8
    threads_a_core: int = 2
    speed: float = 1.0
    watts: float | None = 180.0
    idle_watts: float = 60.0
    reads: float = 120e9
    products: dict[str, float] = field(default_factory=lambda: {"bf16": 4e12, "int8": 8e12, "int4": 5e12})


XEON = Machine()
GRAVITON = Machine(
    "graviton",
    "arm64",
    "Arm",
    "Neoverse-V2",
    16,
    1,
    1.3,
    120.0,
    40.0,
    180e9,
    {"bf16": 3e12, "int8": 6e12, "int4": 4e12},
)


def made_decoder(
    machine: Machine = XEON, precision: str = "int4", seed: int = 1, samples: int = 24, **changes: Any
) -> CompareResult:
    """Generations by 1 to 32 clients, of prompts of 128 and 512 tokens; `samples` requests a point."""
    rng = random.Random(seed)
    points: list[LoadPoint] = []
    for tokens in LENGTHS:
        for clients in CLIENTS:
            began = 10.0 + sum(point.seconds + 2 for point in points)
            load = LoadSpec(kind="generate", clients=clients, tokens=tokens, max_tokens=ANSWER)
            points.append(_generated(load, began, machine, precision, max(samples, clients), rng))
    return _result(machine, precision, "decoder", points, changes)


def made_encoder(
    machine: Machine = XEON, precision: str = "int8", seed: int = 1, samples: int = 60, **changes: Any
) -> CompareResult:
    """One client with batches of 1 to 32 texts of 128 and 512 tokens, and 32 clients with a text each."""
    rng = random.Random(seed)
    loads = [LoadSpec(kind="embed", clients=1, batch=batch, tokens=tokens) for tokens in LENGTHS for batch in BATCHES]
    loads += [LoadSpec(kind="embed", clients=clients, batch=1, tokens=128) for clients in (8, 32)]
    points: list[LoadPoint] = []
    for load in loads:
        began = 10.0 + sum(point.seconds + 2 for point in points)
        points.append(_embedded(load, began, machine, precision, samples, rng))
    return _result(machine, precision, "encoder", points, changes)


def _bits(precision: str) -> int:
    return {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}[precision]


def _step_seconds(machine: Machine, precision: str, rows: int) -> float:
    """As a roofline would have it, at six tenths of the ceilings."""
    reading = WEIGHTS * _bits(precision) / 8 / machine.reads
    return (reading + 2.0 * WEIGHTS * rows / machine.products.get(precision, 3e12)) / 0.6 / machine.speed


def _generated(
    load: LoadSpec, began: float, machine: Machine, precision: str, samples: int, rng: random.Random
) -> LoadPoint:
    step = _step_seconds(machine, precision, load.clients)
    prefill = _step_seconds(machine, precision, load.tokens)
    seconds = samples / load.clients * (prefill * load.clients**0.5 + step * ANSWER)
    first = [prefill * load.clients**0.5 * rng.uniform(0.9, 1.5) for _ in range(samples)]
    gaps = [_gap(step, prefill, rng) for _ in range(min(1500, samples * (ANSWER - 1)))]
    tpot = [step * rng.uniform(0.98, 1.15) for _ in range(samples)]
    steps = _steps(began, seconds, [(step, load.clients, "decode")] * 8 + [(prefill, load.tokens, "prefill")], rng)
    return LoadPoint(
        load=load,
        began=began,
        seconds=seconds,
        samples=samples,
        read_tokens=samples * load.tokens,
        generated_tokens=samples * ANSWER,
        request_seconds=[one + other * (ANSWER - 1) for one, other in zip(first, tpot, strict=True)],
        first_token_seconds=first,
        tpot_seconds=tpot,
        gap_at=[began + seconds * index / len(gaps) for index in range(len(gaps))],
        gap_seconds=gaps,
        steps=steps,
        **_around(seconds, machine),
    )


def _embedded(
    load: LoadSpec, began: float, machine: Machine, precision: str, samples: int, rng: random.Random
) -> LoadPoint:
    rows = load.batch * load.clients
    step = _step_seconds(machine, precision, rows * load.tokens)
    seconds = samples / load.clients * step
    return LoadPoint(
        load=load,
        began=began,
        seconds=seconds,
        samples=samples * load.batch,
        read_tokens=samples * load.batch * load.tokens,
        request_seconds=[step * rng.uniform(0.95, 1.2) * (3.0 if rng.random() < 0.02 else 1.0) for _ in range(samples)],
        steps=_steps(began, seconds, [(step, rows * load.tokens, "encode")], rng),
        **_around(seconds, machine),
    )


def _gap(step: float, prefill: float, rng: random.Random) -> float:
    return (
        step * rng.uniform(0.97, 1.1)
        + (prefill if rng.random() < 0.01 else 0.0)
        + (4 * step if rng.random() < 0.003 else 0.0)
    )


def _steps(began: float, seconds: float, kinds: list[tuple[float, int, str]], rng: random.Random) -> StepColumns:
    """Steps one after the other, at most 1,000; some took longer, and why is known of most of them."""
    chosen = [kinds[index % len(kinds)] for index in range(min(1000, max(20, int(seconds / kinds[0][0]))))]
    causes = [
        rng.choices(("", "prefill", "garbage_collection", "descheduled", "unknown"), (970, 14, 4, 8, 4))[0]
        for _ in chosen
    ]
    took = [
        base * rng.uniform(0.98, 1.08) * (rng.uniform(1.6, 6) if cause else 1.0)
        for (base, _, _), cause in zip(chosen, causes, strict=True)
    ]
    return StepColumns(
        at=[began + end - each for end, each in zip(accumulate(took), took, strict=True)],
        seconds=took,
        phase=[phase for _, _, phase in chosen],
        tokens=[tokens for _, tokens, _ in chosen],
        cause=causes,
    )


def _around(seconds: float, machine: Machine) -> dict[str, Any]:
    energy = None
    if machine.watts is not None:
        energy = PointEnergy(joules=machine.watts * seconds, source="rapl", idle_watts=machine.idle_watts)
    return {"energy": energy, "throttled_seconds": 0.0, "stolen_ratio": 0.01, "client_cpu_ratio": 0.1}


def _result(
    machine: Machine, precision: str, kind: str, points: list[LoadPoint], changes: dict[str, Any]
) -> CompareResult:
    fields: dict[str, Any] = {
        "schema": "armature-compare/1",
        "name": f"{machine.name}-{precision}",
        "began_at": BEGAN,
        "measured_by": "0.1.0",
        "info": made_info(machine, precision, kind),
        "points": points,
    }
    return CompareResult.model_validate(fields | changes)


def made_info(machine: Machine, precision: str, kind: str) -> dict[str, Any]:
    """What `/info` would say of it, as far as anybody here reads it."""
    return {
        "version": "0.1.0",
        "stage": "ready",
        "model": {
            "name": "invented-1b",
            "kind": kind,
            "architecture": "LlamaForCausalLM" if kind == "decoder" else "BertModel",
            "num_parameters": WEIGHTS,
            "weight_bytes": 2 * WEIGHTS,
            "max_model_len": 2048,
            "num_layers": 22,
            "hidden_size": 2048,
            "vocab_size": 32000,
            "stored_dtype": "bfloat16",
        },
        "facts": _facts(machine),
        "plan": _plan(machine, precision),
        "calibration": _calibration(machine, precision),
        "speed": {"steps_over_measured": {}, "drifted": False, "capacity_tokens_per_second": {}, "roofline_ratio": {}},
    }


def _facts(machine: Machine) -> dict[str, Any]:
    width = machine.threads_a_core
    return {
        "os": "linux",
        "architecture": machine.architecture,
        "cpu": {"vendor": machine.vendor, "name": machine.cpu, "microarchitecture": None, "product": None},
        "cores": [
            {
                "cpu_ids": list(range(core * width, core * width + width)),
                "package": 0,
                "numa_node": 0,
                "kind": "performance",
            }
            for core in range(machine.cores)
        ],
        "memory_bytes": machine.cores * 4 * 2**30,
        "kernel": "6.1.0",
        "isa": ["avx2", "avx512f"] if machine.architecture == "x86_64" else ["neon", "i8mm", "sve"],
        "cgroup": {"version": 2, "quota_cores": None, "cpuset": None, "memory_limit_bytes": None},
        "torch": {"version": "2.13.0+cpu"},
    }


def _plan(machine: Machine, precision: str) -> dict[str, Any]:
    values: dict[str, tuple[object, str]] = {
        "device": ("cpu", "No other device is here."),
        "precision": (precision, f"Measured: {precision} is quickest for this model here."),
        "kernels": (
            "avx512" if machine.architecture == "x86_64" else "i8mm",
            "The best level that this processor runs.",
        ),
        "threads": (machine.cores, f"{machine.cores} physical cores may be used."),
        "max_running_seqs": (64, "Beyond that many rows products gain little."),
        "compile": (True, "A step's operations are recorded once and run again natively."),
    }
    return {name: {"value": value, "reason": reason} for name, (value, reason) in values.items()}


def _calibration(machine: Machine, precision: str) -> dict[str, Any]:
    trial = {
        "precision": precision,
        "threads": machine.cores,
        "decode_seconds": {str(rows): _step_seconds(machine, precision, rows) for rows in (1, 4, 16, 64)},
        "prefill_seconds": {str(rows): _step_seconds(machine, precision, rows) for rows in (128, 512)},
        "encode_seconds": {},
        "read_bytes": WEIGHTS * _bits(precision) // 8,
        "operations_per_token": 2.0 * WEIGHTS,
        "int8_copy": False,
    }
    measurements = {
        "read_bytes_per_second": machine.reads,
        "products_per_second": machine.products,
        "trials": [trial],
        "most_few_rows": None,
        "seconds": 3.0,
        "fallback": "",
    }
    return {"from_cache": True, "age_seconds": 60.0, "measurements": measurements}
