"""Models that transformers computes: decode steps by each way to hold the weights, side by side, and speech to text.

The ways are torch's own products in FP32 and BF16, eager and compiled, this package's forms, and torchao's. Each is
loaded alone, since two that share the processor's caches slow each other.
"""

from __future__ import annotations

import gc
import io
import json
import time
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from app.backends.selection import select_host_backend
from app.engine.build import BuildRequest
from app.engine.transformers.loading import load_for_plan, load_model
from app.engine.transformers.sequences import GenerationSteps, Rows
from app.engine.transformers.speech import SpeechModel
from app.engine.transformers.task_table import build_task_engine
from app.engine.transformers.tasks import TaskEngine
from app.engine.transformers.trials import trial_rows
from app.errors import ArmatureError
from app.hardware.facts import Facts
from app.hardware.plan.plan import make_plan
from app.messages import RequestFailed, RunTask
from app.models.transformers_tasks import SPEECH
from app.settings import Settings
from app.weights.checkpoint import Checkpoint
from app.weights.forms import RECIPES
from armature_bench.console import BenchOutcome, Figure, MeasurementFailed, compute_spread, progress
from armature_bench.engine.compiled import missing_compiler
from armature_kernels.errors import KernelError
from armature_kernels.linear.torchao_config import INT4_REFERENCE, INT8_REFERENCE, KLEIDI_INT4

PROMPT_TOKENS, STEPS = 128, 24
TORCH, COMPILED = "torch", "torch.compile"
# Formats by name. Torch's own products have the first word in place of a form's.
WAYS: Mapping[str, str] = {
    f"{TORCH} fp32": "fp32",
    f"{TORCH} bf16": "bf16",
    f"{COMPILED} fp32": "fp32",
    "bf16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "torchao int8 weight-only": INT8_REFERENCE,
    "torchao int8 dynamic": "torchao:Int8DynamicActivationInt8WeightConfig",
    "torchao int4 weight-only": INT4_REFERENCE,
    "torchao int4 dynamic": "torchao:Int8DynamicActivationIntxWeightConfig(weight_dtype=int4)",
    "torchao int4 KleidiAI": KLEIDI_INT4[32],
}


@dataclass(frozen=True, slots=True)
class LibraryJob:
    checkpoint: Checkpoint
    settings: Settings
    facts: Facts
    rounds: int
    rows: Sequence[int]


@dataclass(slots=True)
class WayTimes:
    """Seconds of the steps by number of rows, of a prompt, and of loading, with compilation; logits [prompts, vocab]."""

    decode: dict[int, list[float]]
    prefill: float
    loading: float
    logits: Tensor


def measure_library_steps(job: LibraryJob) -> BenchOutcome:
    """Measure every way that this machine serves. Ctrl-C keeps what was measured; the notes say what was refused."""
    measured: dict[str, WayTimes] = {}
    refused: dict[str, str] = {}
    complete, compiler = True, missing_compiler()
    with progress(len(WAYS), "loading") as advance, torch.no_grad():
        try:
            for way, precision in WAYS.items():
                advance(way, 0)
                if way.startswith(COMPILED) and compiler is not None:
                    refused[way] = compiler
                else:
                    _try(job, way, precision, measured, refused)
                advance(way)
        except KeyboardInterrupt:
            complete = False
    notes = tuple(f"{way}: {reason}" for way, reason in refused.items())
    details = {"machine": job.facts.to_json(), "torch": torch.__version__, "refused": refused}
    subject = f"{job.checkpoint.name} by transformers, {torch.get_num_threads()} threads"
    return BenchOutcome("eager", subject, tuple(_figures(measured)), details, complete, notes)


def _try(job: LibraryJob, way: str, precision: str, measured: dict[str, WayTimes], refused: dict[str, str]) -> None:
    try:
        measured[way] = _measure(job, way, precision)
    except (ArmatureError, KernelError, RuntimeError, ValueError, TypeError) as error:
        refused[way] = (" ".join(str(error).split()) or type(error).__name__)[:200]
    gc.collect()
    if way.startswith(COMPILED):
        torch.compiler.reset()


def _measure(job: LibraryJob, way: str, precision: str) -> WayTimes:
    plan = make_plan(
        job.facts, None, job.settings.with_weight_format(precision), job.checkpoint.needs(), RECIPES.keys()
    )
    request = BuildRequest(job.checkpoint, plan)
    backend = select_host_backend(plan)
    backend.configure(plan)
    began = time.perf_counter()
    if way.split()[0] in (TORCH, COMPILED):
        model = load_model(job.checkpoint, torch.bfloat16 if precision == "bf16" else torch.float32, backend.device)
    else:
        model = load_for_plan(request, backend)
    loading = time.perf_counter() - began
    steps = GenerationSteps(model, job.checkpoint.needs().vocab_size)
    if way.startswith(COMPILED):
        began = time.perf_counter()
        # Dynamic shapes cannot be compiled for keys that are a part of a larger tensor, which is in the cache too.
        steps.has_room = False
        model.forward = torch.compile(model.forward, dynamic=True)
        for rows in job.rows:
            batch, texts = trial_rows(steps, rows, PROMPT_TOKENS)
            for token_ids in (texts, [[1]] * rows, [[1]] * rows):
                _advance(steps, batch, token_ids)
        loading += time.perf_counter() - began
    return WayTimes(*_time_steps(steps, job), loading, steps.advance(*trial_rows(steps, 4, 16)).float())


def _time_steps(steps: GenerationSteps, job: LibraryJob) -> tuple[dict[int, list[float]], float]:
    decode: dict[int, list[float]] = {}
    for rows in job.rows:
        batch, texts = trial_rows(steps, rows, PROMPT_TOKENS)
        _advance(steps, batch, texts)
        seconds = [_advance(steps, batch, [[1]] * rows) for _ in range(job.rounds * STEPS)]
        decode[rows] = seconds[len(seconds) // 4 :]  # the first ones touch memory, or are compiled
    return decode, min(_advance(steps, *trial_rows(steps, 1, PROMPT_TOKENS)) for _ in range(job.rounds))


def _advance(steps: GenerationSteps, batch: Rows, token_ids: Sequence[Sequence[int]]) -> float:
    """Return the seconds of a step."""
    began = time.perf_counter()
    steps.advance(batch, token_ids)
    return time.perf_counter() - began


def _figures(measured: Mapping[str, WayTimes]) -> Iterator[Figure]:
    exact = measured.get(f"{TORCH} fp32")
    for rows in next(iter(measured.values())).decode if measured else ():
        for way, times in measured.items():
            spread = compute_spread(times.decode[rows])
            parts = {"prompt tokens/s": PROMPT_TOKENS / times.prefill, "loading s": times.loading}
            ratio = None
            if exact is not None:
                parts["error %"] = 100 * float((times.logits - exact.logits).norm() / exact.logits.norm())
                ratio = compute_spread(exact.decode[rows]).p50 / spread.p50
            name = f"decode ×{rows}, {way}"
            yield Figure(name, rows / spread.p50, "tokens/s", ratio=ratio, against=f"{TORCH} fp32", parts=parts)


SPEECH_SECONDS, SPEECH_TOKENS = 240, 100  # of the sound, and of the text of each of its windows
SPEECH_RATE, SPEECH_TARGET = 16_000, 1.5


def measure_speech(job: LibraryJob) -> BenchOutcome:
    """Measure how many seconds of a sound are read in a second, alone and with others, and by the library's pipeline."""
    prepared = make_plan(job.facts, None, job.settings, job.checkpoint.needs(), RECIPES.keys())
    built = build_task_engine(BuildRequest(job.checkpoint, prepared))
    file = _noise(SPEECH_SECONDS)
    seconds: dict[str, list[float]] = {}
    complete = True
    with progress(job.rounds * (1 + len(job.rows)), "loading") as advance:
        try:
            for _ in range(job.rounds):
                seconds.setdefault("pipeline", []).append(_by_pipeline(job.checkpoint, file))
                advance("pipeline")
                for sounds in job.rows:
                    taken = _by_engine(built.engine, file, sounds) / sounds
                    seconds.setdefault(f"server, {sounds} at a time", []).append(taken)
                    advance(f"{sounds} at a time")
        except KeyboardInterrupt:
            complete = False
    figures = []
    for name, samples in seconds.items():
        spread, base = compute_spread(samples), compute_spread(seconds["pipeline"]).p50
        is_ours = name != "pipeline"
        ratio, target = (base / spread.p50, SPEECH_TARGET) if is_ours else (None, None)
        figures.append(Figure(name, SPEECH_SECONDS / spread.p50, "s/s", ratio=ratio, against="pipeline", target=target))
    details = {"machine": job.facts.to_json(), "plan": prepared.to_json(), "torch": torch.__version__}
    subject = f"{job.checkpoint.name}, {SPEECH_SECONDS} s of sound, {SPEECH_TOKENS} tokens for each 30 s"
    return BenchOutcome("engine", subject, tuple(figures), details, complete)


def _noise(seconds: int) -> bytes:
    """Return the file of a sound, which needs no library to write."""
    samples = numpy.random.default_rng(0).integers(-3000, 3000, seconds * SPEECH_RATE, dtype=numpy.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as stream:
        stream.setnchannels(1)
        stream.setsampwidth(2)
        stream.setframerate(SPEECH_RATE)
        stream.writeframes(samples.tobytes())
    return file.getvalue()


def _by_pipeline(checkpoint: Checkpoint, file: bytes) -> float:
    """Return the seconds of the library's pipeline, with its own defaults, in FP32."""
    model = load_model(checkpoint, torch.float32, torch.device("cpu"))
    pipe = SpeechModel(model, checkpoint.directory).pipe
    samples = numpy.frombuffer(file, numpy.int16, offset=44).astype(numpy.float32) / 2**15
    options = {"max_new_tokens": SPEECH_TOKENS} if pipe.type.startswith("seq2seq") else None
    began = time.perf_counter()
    pipe(samples, chunk_length_s=30, **({"generate_kwargs": options} if options else {}))
    return time.perf_counter() - began


def _by_engine(engine: TaskEngine, file: bytes, sounds: int) -> float:
    """Return the seconds in which the engine reads a sound for this many clients."""
    task = engine.model.tasks[SPEECH]
    options = {"max_new_tokens": SPEECH_TOKENS} if "max_new_tokens" in task.check_parameters else {}
    began = time.perf_counter()
    for number in range(sounds):
        message = RunTask(f"bench-{number}", SPEECH, b"[0]", json.dumps(options).encode(), began, (file,))
        failed = engine.add(message)
        assert not failed, "the engine reads the sound"
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, RequestFailed):
                raise MeasurementFailed(event.error.message)
    return time.perf_counter() - began
