"""The function behind each `armature bench` command: measurements in this process, or of a server over HTTP.

The benches import torch themselves, after the environment variables for its thread pools are set.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.hardware.plan.memory_budget import kv_bytes_per_token
from app.hardware.probe.probe import probe
from app.hardware.probe.software import available_levels
from app.models.transformers_tasks import SPEECH, TaskConfig
from app.server.prepare import Prepared, calibrate, prepare
from app.settings import Settings, given_settings, setting_flags
from app.version import VERSION
from app.weights.open import require_checkpoint
from app.weights.program import ProgramCheckpoint
from armature_bench.compare.measure import POINT_SECONDS, CompareJob, MachineLabels, run_compare
from armature_bench.console import BenchOutcome, MeasurementFailed
from armature_bench.http.dialects import EMBED_DIALECTS, GENERATE_DIALECTS
from armature_bench.http.embed import EmbedBench, EmbedWorkload
from armature_bench.http.generate import GenerateBench
from armature_bench.http.infer import DEFAULT_FREE_LENGTHS, InferBench, InferWorkload
from armature_bench.http.load import (
    DEFAULT_CLIENTS,
    LoadBench,
    LoadJob,
    LoadLevel,
    ServerBenchJob,
    ServerTarget,
    measure_load,
    measure_server,
)
from armature_bench.http.loops import RunLimits
from armature_bench.http.tally import NAMED_OBJECTIVES, GenerateWorkload, LatencyObjective
from armature_bench.http.workload import LogNormalLengths, UniformLengths
from armature_bench.published.command import PublishedJob, measure_published
from armature_bench.report.load_page import check_page, write_load_page
from armature_bench.report.load_picture import load_picture

DEFAULT_TOKENS = (128, 128)
BY_TRANSFORMERS = "a model that transformers computes"


def run_bench(settings: Settings, arguments: Namespace) -> BenchOutcome:
    """Run a bench and return its outcome.

    Raises `MeasurementFailed` if it failed or its arguments are invalid, and `StartupError` if the model cannot be
    opened or planned.
    """
    if arguments.bench == "http":
        return _measure_load(_load_job(settings, arguments), arguments.report)
    if arguments.bench == "compare":
        return run_compare(_compare_job(settings, arguments))
    if arguments.bench == "published":
        return measure_published(_published_job(arguments))
    inside = IN_PROCESS_BENCHES.get(arguments.bench)
    return (
        inside(_prepare_in_process(settings), arguments) if inside else measure_server(_http_job(settings, arguments))
    )


def report_results(arguments: Namespace) -> int:
    """Compare result files in a report and return the exit status.

    Raises `MeasurementFailed` if a file cannot be read, or flags were given that only apply to a measurement.
    """
    measuring = ("json", "url", "name", "instance", "output", "seconds", "api_key", *given_settings(arguments))
    given = [f"--{name.replace('_', '-')}" for name in measuring if getattr(arguments, name) is not None]
    if given:
        raise MeasurementFailed(
            f"{', '.join(given)}: these flags apply to a measurement, but RESULTs are given; leave out one or the other"
        )
    from armature_bench.report.report import make_report
    from armature_bench.report.tables import ReportOrigin

    return make_report(
        arguments.results, arguments.report, bool(arguments.force), ReportOrigin(VERSION, probe().to_json())
    )


def _measure_load(job: LoadJob, page: Path | None) -> BenchOutcome:
    if page is not None:
        check_page(page)
    outcome = measure_load(job)
    if page is not None:
        write_load_page(outcome, page, VERSION)
        outcome = replace(outcome, notes=(*outcome.notes, f"The page is {page}."))
    return replace(outcome, picture=load_picture(outcome.details["runs"]))


def _prepare_in_process(settings: Settings) -> Prepared:
    """Make the final serving plan and set the environment variables that torch reads."""
    prepared = prepare(settings)
    os.environ.update(prepared.plan.environment())
    return calibrate(prepared, lambda stage: None)


def _engine(prepared: Prepared, arguments: Namespace) -> BenchOutcome:
    from armature_bench.engine import decoder, encoder, program

    named = (arguments.rows or (), arguments.prompts or (), arguments.contexts or ())
    asked = decoder.EngineBenchOptions(arguments.rounds, *named, arguments.steps, arguments.beam_width)
    plan, facts = prepared.plan, prepared.facts
    if isinstance(prepared.checkpoint, ProgramCheckpoint):
        _refuse_flags(arguments, "an exported program", "contexts", "beam_width")
        return program.measure_program_engine(prepared.checkpoint, plan, facts, prepared.step_time_table, asked)
    checkpoint = require_checkpoint(prepared.checkpoint)
    if prepared.needs.engine == "transformers":
        _refuse_flags(arguments, BY_TRANSFORMERS, "prompts", "contexts", "steps", "beam_width")
        return _by_library(prepared, arguments)
    if checkpoint.kind == "encoder":
        _refuse_flags(arguments, "an encoder", "contexts", "beam_width")
        return encoder.measure_encoder_engine(checkpoint, plan, facts, prepared.step_time_table, asked)
    return decoder.measure_decoder_engine(checkpoint, plan, facts, asked)


def _kernels(prepared: Prepared, arguments: Namespace) -> BenchOutcome:
    from armature_bench.engine.kernels import measure_kernels

    return measure_kernels(prepared.plan, prepared.facts, arguments.rounds)


def _quality(prepared: Prepared, arguments: Namespace) -> BenchOutcome:
    from armature_bench.engine.llama_cpp import LlamaCppPeer
    from armature_bench.engine.quality import QualityJob, measure_quality

    checkpoint = require_checkpoint(prepared.checkpoint)
    job = QualityJob(checkpoint, prepared.settings, prepared.facts)
    if checkpoint.kind == "encoder":
        from armature_bench.engine.encoder_quality import measure_encoder_quality

        _refuse_flags(arguments, "an encoder", "tokens", "peer", "peer_python")
        return measure_encoder_quality(job, arguments.text, arguments.texts)
    _refuse_flags(arguments, "a language model", "texts")
    if arguments.peer_python and not arguments.peer:
        raise MeasurementFailed("--peer-python needs --peer llama.cpp")
    peer = LlamaCppPeer(arguments.peer_python or sys.executable) if arguments.peer else None
    return measure_quality(job, arguments.text, arguments.tokens, peer)


def _speculation(prepared: Prepared, arguments: Namespace) -> BenchOutcome:
    from armature_bench.engine.speculation import measure_speculation

    return measure_speculation(
        require_checkpoint(prepared.checkpoint),
        prepared.plan,
        prepared.facts,
        prepared.step_time_table,
        arguments.rounds,
        prepared.draft,
    )


def _by_library(prepared: Prepared, arguments: Namespace) -> BenchOutcome:
    """Measure a model that transformers computes: decode steps, or speech to text."""
    import torch._dynamo  # noqa: F401  # whole, since one of the ways compiles the model

    from app.engine.transformers.build import import_library

    import_library()
    from armature_bench.engine.library import LibraryJob, measure_library_steps, measure_speech

    checkpoint = require_checkpoint(prepared.checkpoint)
    config, rows = checkpoint.model_config, arguments.rows or (1, 8)
    job = LibraryJob(checkpoint, prepared.settings, prepared.facts, arguments.rounds, rows)
    if isinstance(config, TaskConfig):
        if SPEECH not in config.tasks:
            raise MeasurementFailed(f"{config.architecture}: of models of tasks, only speech to text is measured.")
        return measure_speech(job)
    return measure_library_steps(job)


def _eager(prepared: Prepared, arguments: Namespace) -> BenchOutcome:
    from armature_bench.engine.recording import ReplayOptions, measure_replay

    if prepared.needs.engine == "transformers":
        _refuse_flags(arguments, BY_TRANSFORMERS, "dtypes")
        return _by_library(prepared, arguments)
    asked = {name: given for name in ("rows", "dtypes") if (given := getattr(arguments, name)) is not None}
    options = ReplayOptions(arguments.rounds, **asked)
    return measure_replay(prepared.checkpoint, prepared.plan, prepared.facts, prepared.settings, options)


def _recording(prepared: Prepared, arguments: Namespace) -> BenchOutcome:
    from armature_bench.engine.recording import measure_step_recording

    return measure_step_recording(prepared.facts, arguments.rounds)


IN_PROCESS_BENCHES: Mapping[str, Callable[[Prepared, Namespace], BenchOutcome]] = {
    "engine": _engine,
    "kernels": _kernels,
    "quality": _quality,
    "speculation": _speculation,
    "eager": _eager,
    "recording": _recording,
}


def _http_job(settings: Settings, arguments: Namespace) -> ServerBenchJob:
    url = getattr(arguments, "url", None)
    flags = setting_flags(arguments)
    subject, tokens = url or settings.checkpoint_directory.name, getattr(arguments, "tokens", 0)
    image = getattr(arguments, "image", (0, 0))
    job = ServerBenchJob(arguments.bench, subject, flags, url, arguments.rounds, tokens, image=image)
    if job.bench == "overhead" and url is None:
        job = replace(job, tokenizer=settings.checkpoint_directory)
    return _with_memory(job, settings) if job.bench == "memory" else job


def _compare_job(settings: Settings, arguments: Namespace) -> CompareJob:
    """Return the job of `bench compare`. With a URL, `--model` is the model name that the running server uses."""
    if arguments.report is not None or arguments.force:
        raise MeasurementFailed("--report and --force need RESULTs: name the result files to compare")
    url, seconds = arguments.url, arguments.seconds
    of_a_server = [name for name in given_settings(arguments) if name not in ("model", "hourly_price", "watts")]
    if url and of_a_server:
        raise MeasurementFailed(
            f"--{of_a_server[0].replace('_', '-')} does not apply to a server that is already running: leave out --url or this flag"
        )
    target = ServerTarget(
        url, () if url else setting_flags(arguments), model=getattr(arguments, "model", None), api_key=arguments.api_key
    )
    place = MachineLabels(arguments.name, arguments.instance, settings.hourly_price, settings.watts)
    seconds = POINT_SECONDS if seconds is None else seconds
    return CompareJob(target, place, VERSION, arguments.output, seconds, arguments.seed)


def _published_job(arguments: Namespace) -> PublishedJob:
    given = setting_flags(arguments)
    if given:
        flag = given[0].partition("=")[0]
        raise MeasurementFailed(f"{flag} does not apply: each measurement has its own settings; leave out this flag")
    facts = probe()
    return PublishedJob(
        facts=facts.to_json(),
        usable_bytes=facts.usable_bytes,
        levels=available_levels(facts),
        topics=arguments.only or (),
        is_quick=arguments.quick is True,
        folder=arguments.folder,
        seconds=arguments.seconds,
        report=arguments.report,
    )


def _load_job(settings: Settings, arguments: Namespace) -> LoadJob:
    """Return the job of `bench http`. With a URL, `--model` is the model name that the running server uses."""
    kind = REQUEST_KINDS[arguments.kind]
    api = _api(arguments, kind)
    url, key = arguments.url, arguments.api_key
    name = getattr(arguments, "model", None) if url else None
    targets = [ServerTarget(url, () if url else setting_flags(arguments), api, name, key)]
    if arguments.against:
        targets.append(ServerTarget(arguments.against, api=api, api_key=key, preferred=name))
    clients = arguments.concurrency or (() if arguments.rate else DEFAULT_CLIENTS)
    levels = [*(LoadLevel(clients=each) for each in clients), *(LoadLevel(rate=each) for each in arguments.rate or ())]
    work = kind.work(arguments)
    asked = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in work.details().items())
    subject = f"{url or settings.checkpoint_directory.name}, {api}, {asked}"
    bounds = RunLimits(arguments.num_requests, arguments.seconds)
    return LoadJob(subject, targets, levels, work, bounds, arguments.rounds, arguments.warmup)


def _generation(arguments: Namespace) -> GenerateBench:
    _refuse_flags(arguments, "--kind generate", "texts", "lengths", "batch", "below")
    prompts, answers = (
        UniformLengths(*(given or DEFAULT_TOKENS)) for given in (arguments.prompt_tokens, arguments.max_tokens)
    )
    if arguments.image is not None and arguments.api != "openai":
        raise MeasurementFailed("--image needs --api openai: only chats have pictures")
    wanted = GenerateWorkload(prompts, answers, arguments.ignore_eos is not False, arguments.seed, arguments.image)
    return GenerateBench(wanted, _objective(arguments))


def _objective(arguments: Namespace) -> LatencyObjective:
    """Return the named objective or the flags'; times that are given go before the name's."""
    named = NAMED_OBJECTIVES[arguments.slo] if arguments.slo else LatencyObjective()
    first, gap = _seconds(arguments.slo_ttft_ms), _seconds(arguments.slo_itl_ms)
    return LatencyObjective(named.ttft_seconds if first is None else first, named.itl_seconds if gap is None else gap)


def _embedding(arguments: Namespace) -> EmbedBench:
    _refuse_flags(arguments, "--kind embed", *_GENERATE_FLAGS, "batch", "below")
    return EmbedBench(
        EmbedWorkload(arguments.texts or 1, _lengths(arguments) or UniformLengths(*DEFAULT_TOKENS), arguments.seed)
    )


def _inference(arguments: Namespace) -> InferBench:
    _refuse_flags(arguments, "--kind infer", *_GENERATE_FLAGS, "texts")
    below = 2 if arguments.below is None else arguments.below
    return InferBench(
        InferWorkload(arguments.batch or 1, _lengths(arguments) or DEFAULT_FREE_LENGTHS, below, arguments.seed)
    )


def _lengths(arguments: Namespace) -> UniformLengths | LogNormalLengths | None:
    if arguments.lengths is None:
        return None
    shape, low, high = arguments.lengths
    return LogNormalLengths(low, high) if shape == "lognormal" else UniformLengths(low, high)


_GENERATE_FLAGS = ("prompt_tokens", "max_tokens", "image", "ignore_eos", "slo", "slo_ttft_ms", "slo_itl_ms")


@dataclass(frozen=True, slots=True)
class RequestKind:
    """A kind of request (`--kind`): its API dialects, the default one, and the function that reads its flags."""

    dialects: Collection[str]
    usual: str
    work: Callable[[Namespace], LoadBench[Any]]


REQUEST_KINDS: Mapping[str, RequestKind] = {
    "generate": RequestKind(GENERATE_DIALECTS, "completions", _generation),
    "embed": RequestKind(EMBED_DIALECTS, "openai", _embedding),
    "infer": RequestKind(("oip",), "oip", _inference),
}


def _refuse_flags(arguments: Namespace, kind: str, *names: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise MeasurementFailed(f"--{name.replace('_', '-')} does not apply to {kind}")


def _api(arguments: Namespace, kind: RequestKind) -> str:
    api = arguments.api or kind.usual
    if api not in kind.dialects:
        raise MeasurementFailed(f"--api {api} does not support --kind {arguments.kind}: use {', '.join(kind.dialects)}")
    return str(api)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _with_memory(job: ServerBenchJob, settings: Settings) -> ServerBenchJob:
    """Add the expected memory to the job: size of the served weights, and KV bytes per token."""
    prepared = prepare(settings)
    plan = prepared.plan
    kv_bytes = kv_bytes_per_token(prepared.checkpoint.needs(), plan.weights.kv_precision)
    return replace(job, weight_bytes=plan.memory.weight_bytes, kv_bytes_per_token=kv_bytes)
