"""Composition of the server: from settings to a plan, then to a running worker and service.

Torch is imported on the worker thread only, after the plan has set the environment that thread pools read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from threading import Event as Flag
from typing import TYPE_CHECKING, Any

from app.api.access import AccessRules, ApiKeys, is_loopback_name
from app.api.routing import ApiRuntime, ModelNames
from app.engine.decoder.engine import DecoderEngine
from app.engine.worker import Callbacks, Worker
from app.errors import CheckpointInvalid, InvalidRequest, PrecisionTooCostly, ServiceStopping, SettingsInvalid
from app.hardware.facts import Facts, to_json_value
from app.hardware.imports import collection_paused
from app.hardware.plan.plan import ServingPlan
from app.hardware.plan.precision import describe_cost
from app.hardware.probe.cgroup import find_cpu_stat
from app.hardware.probe.host_files import HostFiles
from app.messages import SamplingParams, Stop
from app.metrics.gauges import DeploymentGauges, DeploymentInfo, ServerInfo, throttled_seconds
from app.metrics.instruments import Metrics
from app.metrics.power_monitor import PowerMonitor
from app.metrics.step_monitor import SlowStepDetector, StepMonitor, first_touch_seconds
from app.metrics.steps import ExpectedSpeed, SpeedDrift, StepTimeModel
from app.metrics.thermal_monitor import ThermalMonitor
from app.models.encoders.config import EncoderConfig
from app.server.adapters import adapter_store
from app.server.prepare import Prepared, UnfetchedModel, calibrate
from app.server.start_console import StartConsole
from app.service.served_model import (
    HELD_BYTES_DIVISOR,
    MIN_HELD_BYTES,
    ServedDecoder,
    ServedEncoder,
    ServedModel,
    ServedProgram,
    ServingLimits,
)
from app.service.service import Service
from app.settings import Settings, parse_rate_limit, unix_path_of
from app.text.chat import ChatTemplate
from app.text.grammar import GrammarCompiler
from app.text.reasoning import REASONING_FORMATS, ReasoningFormat, choose_reasoning_format
from app.text.tokenizer import Tokenizer
from app.text.tool_formats import TOOL_FORMATS, ToolFormat, choose_tool_format
from app.tracing.request_trace import Tracer
from app.version import VERSION
from app.weights.cache_file import PACKS, checkpoint_fingerprint
from app.weights.checkpoint import Checkpoint
from app.weights.files import join_names, open_regular, unreadable_message
from app.weights.program import ProgramCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.engine.scheduler.speculation import Speculation
    from app.engine.worker import Engine
    from app.metrics.load_progress import LoadProgress
    from app.text.chat import ChatTemplate
    from app.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
MAX_IDLE_ATTEMPTS = 20  # attempts to time steps while idle; on a busy machine or under load each may fail
STOP_SECONDS = 3.0  # longest wait of a stop for the worker; a step takes less
STOP_LOADING_SECONDS = (
    1.0  # longest wait while loading: it checks for a stop at each percent, and may be ended anywhere
)
_MAX_KEY_BYTES = 2**20  # of a key file
FLUSH_SECONDS = 1.0  # longest wait of a stop for the spans of the last requests to be sent
# What is otherwise imported at the first stream, the first look at the routes, and in the first idle time. An import takes
# time of the event loop, and fails where no more files can be opened.
IMPORTED_LATER = ("anyio._core._sockets", "anyio._core._streams", "pydantic.v1", "app.engine.calibration.idle")
# Instruction sets in order: the first that the machine has is the label.
ISA_RANKS = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "sve2", "sve", "i8mm", "dotprod", "neon")
log = logging.getLogger(__name__)
# Names in generation_config.json that are followed as defaults of requests, and the types of their values. `eos_token_id`
# is read with the tokenizer's files.
FOLLOWED: Mapping[str, type] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float,
}  # fmt: skip
# Names of values that change which tokens are sampled and are not offered as defaults, with those that do not change it.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "top_h": (), "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,), "encoder_no_repeat_ngram_size": (0,), "bad_words_ids": ([],),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (), "guidance_scale": (1.0,), "watermarking_config": (), "penalty_alpha": (0.0,),
    "dola_layers": (), "constraints": ([],), "force_words_ids": ([],), "stop_strings": ([], ""), "token_healing": (False,),
}  # fmt: skip
# The request says how long an answer is and how it is searched. `do_sample` is left to the temperature, as vLLM does. A
# prompt has more than one token, so no first token is forced, and an answer that reaches its limit ends without a forced
# last one. The others are about caches, speed and what is returned.
WITHOUT_EFFECT = frozenset(
    "eos_token_id bos_token_id pad_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id"
    " max_length max_new_tokens min_length min_new_tokens max_time early_stopping do_sample num_beams num_beam_groups"
    " diversity_penalty length_penalty num_return_sequences renormalize_logits remove_invalid_values"
    " use_cache cache_implementation cache_config max_cache_len use_mtp output_attentions output_hidden_states output_scores"
    " output_logits return_dict_in_generate is_assistant num_assistant_tokens num_assistant_tokens_schedule"
    " assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit"
    " assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type compile_config disable_compile"
    " continuous_batching_config low_memory prefill_chunk_size _from_model_config transformers_version trust_remote_code".split()
)


def make_served_decoder(
    name: str,
    limits: ServingLimits,
    tokenizer: Tokenizer,
    chat: ChatTemplate | None,
    checkpoint: Checkpoint,
    settings: Settings,
) -> ServedDecoder:
    template = None if chat is None else chat.evidence
    tools = settings.tool_call_parser
    defaults = sampling_defaults(_generation_config(checkpoint)) if settings.generation_config == "auto" else {}
    return ServedDecoder(
        name,
        limits,
        tokenizer,
        chat,
        sampling_defaults=defaults,
        grammars=GrammarCompiler(tokenizer, limits.vocab_size),
        tool_format=_tool_format(chat, str(checkpoint.config.get("model_type", "")))
        if tools == "auto"
        else TOOL_FORMATS[tools],
        reasoning_format=_reasoning_format(template, settings.reasoning_parser),
    )


def prepare_grammars(model: ServedModel) -> Sequence[Future[None]]:
    """Prepare structured output on another thread while weights are loaded; return what to wait for."""
    if not isinstance(model, ServedDecoder) or model.grammars is None:
        return ()
    pool = ThreadPoolExecutor(1, thread_name_prefix="armature-grammar")
    preparing = pool.submit(model.grammars.prepare)
    pool.shutdown(wait=False)
    return (preparing,)


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters of a generation_config.json as vLLM does. Raises `CheckpointInvalid`."""
    for name, neutral in REFUSED.items():
        if config.get(name) is not None and config[name] not in neutral:
            raise CheckpointInvalid(
                f"generation_config.json: {name} is {str(config[name])[:80]}, which is not offered."
                " --generation-config off serves the model without this file's sampling parameters."
            )
    unknown = sorted(config.keys() - FOLLOWED.keys() - REFUSED.keys() - WITHOUT_EFFECT)
    if unknown:
        log.info(
            "generation_config.json: not known here and without effect: %s", join_names([one[:80] for one in unknown])
        )
    found: dict[str, float] = {}
    for name, kind in FOLLOWED.items():
        value = config.get(name)
        if value is None:
            continue
        try:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidRequest(f"{name} must be a number, not {value!r}.")
            SamplingParams(**{name: kind(value)})
        except InvalidRequest as error:
            log.warning("generation_config.json: %s It is ignored.", error.message)
            continue
        found[name] = kind(value)
    return found


def _generation_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return generation_config.json, or what older checkpoints have of it in config.json."""
    names = FOLLOWED.keys() | REFUSED.keys()
    return checkpoint.generation_config or {name: one for name, one in checkpoint.config.items() if name in names}


def _tool_format(chat: ChatTemplate | None, model_type: str) -> ToolFormat:
    template = chat if chat is None or chat.with_tools is None else chat.with_tools
    if template is not None and template.tool_format is not None:
        return template.tool_format
    return choose_tool_format(None if template is None else template.source, model_type)


def _reasoning_format(template: str | None, setting: str) -> ReasoningFormat | None:
    if setting == "auto":
        return choose_reasoning_format(template)
    return REASONING_FORMATS.get(setting)


def accepts_any_name(settings: Settings, num_keys: int) -> tuple[bool, bool]:
    """Return whether a request may name any model in its body, and in its path.

    By default not where a wrong name may be meant for an adapter, or clients with other keys could expect other models.
    """
    is_clear = not settings.lora and settings.lora_root is None and num_keys <= 1
    on = settings.any_model_name == "on"
    return on or (settings.any_model_name == "auto" and is_clear), on


def read_api_keys(settings: Settings) -> tuple[str, ...]:
    """Return the keys of the setting and of the file, one per line, # for comments. Raises `SettingsInvalid`."""
    if settings.api_key_file is None:
        return settings.api_keys
    try:
        with BufferedReader(open_regular(settings.api_key_file)) as stream:
            lines = stream.read(_MAX_KEY_BYTES).decode("utf-8").splitlines()
    except FileNotFoundError as error:
        raise SettingsInvalid(
            f"api_key_file {settings.api_key_file} does not exist. Is the secret there, and mounted?"
        ) from error
    except OSError as error:
        raise SettingsInvalid(f"api_key_file {unreadable_message(settings.api_key_file, error)}") from error
    except UnicodeDecodeError as error:
        raise SettingsInvalid(
            f"api_key_file {settings.api_key_file} is not UTF-8 text with one key per line."
        ) from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise SettingsInvalid(f"api_key_file {settings.api_key_file} holds no key, so every request would be refused.")
    return (*settings.api_keys, *keys)


def is_local_only(settings: Settings) -> bool:
    """Return True if only programs of this machine reach the server: it listens on loopback addresses and UNIX sockets."""
    hosts = (host for host in settings.host if unix_path_of(host) is None)
    return all(is_loopback_name(host.partition("%")[0]) for host in hosts)


def isa_label(facts: Facts, plan: ServingPlan) -> str:
    """Return the instruction set label: for example `avx512_bf16`, or `sm_90` for a GPU."""
    gpu = plan.gpu(facts)
    if gpu is not None and gpu.capability is not None:
        return "sm_{}{}".format(*gpu.capability)
    if plan.placement.device == "mps":
        return plan.weights.kernels
    return next((name for name in ISA_RANKS if name in facts.isa), "")


def read_tokenizer(
    checkpoint: Checkpoint | ProgramCheckpoint, report_stage: Callable[[str], None], cache: Path | None = None
) -> Tokenizer | None:
    """Try the checkpoint's tokenizer, noted in `cache` if it passes, and read it; None for a program."""
    if isinstance(checkpoint, ProgramCheckpoint):
        return None
    from app.text.tokenizer_check import try_and_load

    report_stage("reading the tokenizer")
    config = checkpoint.model_config
    lowercases = isinstance(config, EncoderConfig) and config.lowercases
    tokenizer = try_and_load(checkpoint.location, cache, lowercases)
    _warn_of_unknown_tokens(tokenizer, config.vocab_size)
    return tokenizer


def _warn_of_unknown_tokens(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Log if the tokenizer has tokens that the model does not know; texts with them are refused."""
    texts = [tokenizer.token_text(token_id) for token_id in range(vocab_size, tokenizer.vocab_size + 1)]
    unknown = [text for text in texts if text]
    if unknown:
        log.warning(
            "the tokenizer has %d tokens that the model does not know, such as %r: texts with them are refused",
            len(unknown),
            unknown[0][:100],
        )


def read_chat_template(prepared: Prepared, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """Read the chat template and start its process; None if the checkpoint has none or does not generate."""
    checkpoint, settings = prepared.checkpoint, prepared.settings
    if tokenizer is None or checkpoint.kind != "decoder":
        return None
    from app.text.chat import open_chat_template
    from app.text.child_process import TemplateLimits

    limits = TemplateLimits(settings.chat_template_cpu_seconds, settings.chat_template_memory_bytes)
    tokens = frozenset(tokenizer.added_tokens.values())
    return open_chat_template(
        checkpoint.location, tokenizer.config, tokenizer.named_tokens, limits, settings.chat_template, tokens
    )


def make_served_model(prepared: Prepared, tokenizer: Tokenizer | None, chat: ChatTemplate | None) -> ServedModel:
    checkpoint, plan, name = prepared.checkpoint, prepared.plan, prepared.model_name
    limits = ServingLimits(
        max_model_len=plan.memory.max_model_len,
        max_running_seqs=plan.memory.max_running_seqs,
        max_waiting_requests=plan.memory.max_waiting_requests,
        request_timeout_seconds=prepared.settings.request_timeout_seconds,
        vocab_size=checkpoint.needs().vocab_size,
        tokenizer_threads=plan.cpu.tokenizer_threads,
        max_held_bytes=max(MIN_HELD_BYTES, prepared.facts.memory_limit_bytes // HELD_BYTES_DIVISOR),
        max_logprobs=prepared.settings.max_logprobs,
        has_priorities=prepared.settings.scheduling_policy == "priority",
    )
    if isinstance(checkpoint, ProgramCheckpoint):
        return ServedProgram(name, limits, checkpoint.signature, checkpoint.sizes)
    assert tokenizer is not None, "a checkpoint other than a program has a tokenizer"
    if isinstance(checkpoint.model_config, EncoderConfig):
        return ServedEncoder(name, limits, tokenizer, checkpoint.model_config)
    from app.server.startup import make_served_decoder

    return make_served_decoder(name, limits, tokenizer, chat, checkpoint, prepared.settings)


def hash_ahead(prepared: Prepared) -> Sequence[Future[str]]:
    """Hash the checkpoint's files on other threads if packs are kept, for `PackFolder.open`, which raises errors."""
    folder, checkpoint = prepared.plan.weights.pack_folder, prepared.checkpoint
    if folder is None or not isinstance(checkpoint, Checkpoint):
        return ()
    pool = ThreadPoolExecutor(1, thread_name_prefix="armature-hash")
    hashing = pool.submit(checkpoint_fingerprint, checkpoint, Path(folder) / PACKS, prepared.plan.cpu.threads)
    pool.shutdown(wait=False)
    return (hashing,)


def bind_service_threads(cpu_ids: tuple[int, ...]) -> None:
    """Restrict all other threads that Python started, and the ones that they start, to these CPUs; empty: none.

    They serve HTTP, tokenize, log and read the power. A refusal is only logged.
    """
    if not cpu_ids:
        return
    here = threading.get_native_id()
    for thread in threading.enumerate():
        if thread.native_id is not None and thread.native_id != here:
            try:
                os.sched_setaffinity(thread.native_id, cpu_ids)
            except ProcessLookupError:
                continue  # it has ended meanwhile
            except (AttributeError, OSError, ValueError) as error:
                log.warning("threads that do not compute cannot be bound to CPUs %s: %s", list(cpu_ids), error)
                return


def use_http_threads(number: int) -> None:
    """Let the event loop run what takes longer in as many threads."""
    pool = ThreadPoolExecutor(number, thread_name_prefix="armature-http")
    asyncio.get_running_loop().set_default_executor(pool)


def save_prefixes(engine: Engine, is_wanted: Callable[[], bool]) -> None:
    """Keep the prefixes that the engine computed, on the worker thread, until `is_wanted` returns True."""
    if isinstance(engine, DecoderEngine):
        engine.save_prefixes(is_wanted)


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What a runtime has from a process with several models: the model's metrics, and the machine's monitors."""

    metrics: Metrics
    power: PowerMonitor
    thermal: ThermalMonitor


class ServerRuntime:
    """The worker, the service and the metrics of one process, connected.

    `on_fatal` is called from the worker thread when the worker cannot continue; `on_ready` when it can serve, with the
    final plan, the seconds since the start, and whether the model has a chat template. `shared` None: it is the only
    model of the process.
    """

    def __init__(
        self,
        start: Prepared | UnfetchedModel,
        on_fatal: Callable[[BaseException], None],
        on_ready: Callable[[Prepared, float, bool], None] = lambda prepared, seconds, has_chat: None,
        tracer: Tracer | None = None,
        shared: SharedParts | None = None,
    ) -> None:
        self._start, self._tracer, self._shared = start, tracer, shared
        self._on_fatal, self._on_ready = on_fatal, on_ready
        self._began = time.monotonic()
        self._stopping = Flag()
        self._cpu_stat = find_cpu_stat(HostFiles(Path("/")))
        self.metrics = Metrics() if shared is None else shared.metrics
        self._step_monitor = StepMonitor(self.metrics)
        self._step_time_model = StepTimeModel()
        self._idle_attempts = 0
        self._speculation: Speculation | None = None
        self._console = StartConsole(has_bars=start.settings.log_format == "text")
        self.worker = Worker(self._build, self._step_monitor)
        self.service = Service(self.worker, self.metrics)
        facts, settings, gpu = start.facts, start.settings, start.plan.gpu(start.facts)
        if shared is None:
            self._power_monitor = PowerMonitor(
                self.metrics, facts.power, lambda: self.service.idle, settings.watts, settings.hourly_price, gpu
            )
            self._thermal_monitor = ThermalMonitor(self.metrics, facts.thermal)
        else:
            self._power_monitor, self._thermal_monitor = shared.power, shared.thermal
        DeploymentGauges(self.metrics, self._deployment)

    @property
    def alive(self) -> bool:
        """True while the worker runs."""
        return self.worker.alive

    @property
    def prepared_start(self) -> Prepared | UnfetchedModel:
        return self._start

    def runtime_among(self, process: ApiRuntime) -> ApiRuntime:
        """Return the runtime of one of several models of a process."""
        names = ModelNames(self._start.settings.served_model_name[1:])
        capacity = self._step_monitor.capacity
        return replace(
            process, service=self.service, metrics=self.metrics, info=self._info, names=names, capacity=capacity
        )

    def runtime(self) -> ApiRuntime:
        settings = self._start.settings
        keys = ApiKeys(lambda: read_api_keys(settings), settings.api_key_file)
        rates, is_local = parse_rate_limit(settings.rate_limit), is_local_only(settings)
        only_loopback = is_local and not keys and not settings.allowed_hosts
        rules = AccessRules(*rates, settings.allowed_hosts, only_loopback, settings.cors_allow_origins)
        names = ModelNames(settings.served_model_name[1:], *accepts_any_name(settings, len(keys)))
        created, page = int(time.time()), settings.page == "on"
        capacity, tracer = self._step_monitor.capacity, self._tracer
        return ApiRuntime(
            self.service, self.metrics, self, self._info, created, keys, rules, names, page, tracer, capacity
        )

    async def start(self) -> None:
        await self.service.start()
        if self._shared is None:
            use_http_threads(self._start.plan.cpu.http_threads)
            self._power_monitor.start()
            self._thermal_monitor.start()
        callbacks = Callbacks(
            self.service.on_events,
            self._worker_failed,
            self.metrics.on_step,
            on_idle=self._use_idle_time,
            on_pause=None if self._start.settings.prompt_cache is None else save_prefixes,
        )
        self.worker.start(callbacks)

    async def stop(self) -> None:
        """Stop everything after responses were sent or cut off, waiting for the worker for limited time."""
        if self._shared is None:
            self._power_monitor.stop()
            self._thermal_monitor.stop()
        self._stopping.set()
        await self.service.stop()
        self.worker.put(Stop())
        patience = STOP_LOADING_SECONDS if self.worker.state == "loading" else STOP_SECONDS
        await asyncio.to_thread(self.worker.join, patience)
        if self._tracer is not None and self._shared is None:  # last: responses that were cut off have ended now
            await asyncio.to_thread(self._tracer.close, FLUSH_SECONDS)

    @property
    def _prepared(self) -> Prepared:
        assert isinstance(self._start, Prepared), "the model is fetched first"
        return self._start

    @_prepared.setter
    def _prepared(self, prepared: Prepared) -> None:
        self._start = prepared

    # ---- on the worker thread --------------------------------------------------------------------------------------

    def _build(self, report: Callable[[str | LoadProgress], None]) -> Engine:
        def report_stage(stage: str | LoadProgress) -> None:
            if self._stopping.is_set():
                raise ServiceStopping("The server received the signal to stop while it was loading.")
            report(stage)
            self._console.show(stage)

        with closing(self._console):
            engine, has_chat = self._build_calibrated(report_stage)
        for name, decision in self._prepared.plan.decisions.items():
            log.debug("plan: %s = %s (%s)", name, decision.value, decision.reason)
        if self._shared is None:  # it would bind the workers of other models too
            bind_service_threads(self._prepared.plan.cpu.service_cpu_ids)
        self._on_ready(self._prepared, time.monotonic() - self._began, has_chat)
        return engine

    def _build_calibrated(self, report_stage: Callable[[str | LoadProgress], None]) -> tuple[Engine, bool]:
        """Measure the machine, and build the engine, again if its quality changes the plan; True: a chat template."""
        if isinstance(self._start, UnfetchedModel):
            self._start = self._start.fetch(report_stage)
        os.environ.update(self._prepared.plan.environment())  # torch's thread pools read it at import
        hashing = hash_ahead(self._prepared)  # while imports use one core
        cache = self._prepared.settings.cache_directory
        tokenizer = read_tokenizer(self._prepared.checkpoint, report_stage, cache)
        if tokenizer is not None and self._prepared.draft is not None:
            from app.server.model_source import check_vocabulary

            check_vocabulary(tokenizer, self._prepared.draft, cache)
        chat = read_chat_template(self._prepared, tokenizer)
        report_stage("importing torch")
        began = time.monotonic()
        with collection_paused():
            import torch  # noqa: F401  # imported here so that the time is logged

            for name in IMPORTED_LATER:
                import_module(name)
        log.debug("torch imported in %.1f s", time.monotonic() - began)
        wait(hashing)  # it would disturb the measurement
        self._prepared = calibrate(self._prepared, report_stage)
        while True:
            try:
                return self._build_planned(tokenizer, chat, report_stage), chat is not None
            except PrecisionTooCostly as found:
                log.warning("%s: loading the weights in %s", found.message, self._prepared.plan.weights.precision)

    def _build_planned(
        self, tokenizer: Tokenizer | None, chat: ChatTemplate | None, report_stage: Callable[[str | LoadProgress], None]
    ) -> Engine:
        """Build the engine of the present plan. Raises `PrecisionTooCostly` if `auto` may not spend its quality."""
        from app.engine.build import BuildRequest, build
        from app.server.startup import prepare_grammars

        prepared = self._prepared
        step_time_model = StepTimeModel(
            prepared.expected_step_times, is_measured=prepared.plan.speed.speed_source == "measured"
        )
        self._watch_drift(prepared, step_time_model)
        model = make_served_model(prepared, tokenizer, chat)
        self.service.serve(model)
        preparing = prepare_grammars(model)
        began = time.monotonic()
        eos_token_ids = () if tokenizer is None else tokenizer.eos_token_ids
        with self._suggest_cpu_on_failure():
            engine = build(
                BuildRequest(
                    prepared.checkpoint,
                    prepared.plan,
                    report_stage,
                    step_time_model,
                    eos_token_ids,
                    self._take_quality_cost,
                    prepared.adapters,
                    prepared.draft,
                )
            )
        if isinstance(engine, DecoderEngine) and isinstance(model, ServedDecoder):
            engine.grammars = model.grammars
        self._speculation = engine.scheduler.speculation if isinstance(engine, DecoderEngine) else None
        slots = getattr(engine, "adapters", None)
        self.service.serve_adapters(adapter_store(prepared.settings, prepared.adapters, prepared.checkpoint, slots))
        wait(preparing)  # the vocabulary is built while no other thread runs Python
        self._step_time_model = step_time_model
        self._step_monitor.watch_slow_steps(self._slow_step_detector(step_time_model))
        log.debug("weights loaded and warmed up in %.1f s", time.monotonic() - began)
        return engine

    def _take_quality_cost(self, cost: float) -> None:
        """Plan again with the measured cost. Raises `PrecisionTooCostly` if the plan chooses another precision."""
        before = self._prepared.plan.decisions["precision"]
        self._prepared = self._prepared.with_quality_cost(cost)
        now = self._prepared.plan.decisions["precision"]
        if now.value != before.value:
            kind = self._prepared.needs.kind
            raise PrecisionTooCostly(f"Weights in {before.value}: {describe_cost(kind, cost)}. {now.reason}")
        log.debug("plan: precision = %s (%s)", now.value, now.reason)

    def _use_idle_time(self, engine: Engine, is_wanted: Callable[[], bool]) -> bool:
        """Time steps of the engine if the start could not, or not well; return True to be called again."""
        prepared = self._prepared
        expected = prepared.estimated_trial if prepared.plan.steps.calibrate else None
        if expected is None:
            return False
        from app.engine.calibration.idle import IdleMeasurement, IdleSubject

        self._idle_attempts += 1
        if isinstance(prepared.checkpoint, ProgramCheckpoint):
            subject = IdleSubject(prepared.plan, expected, program=prepared.checkpoint)
        else:
            config = prepared.checkpoint.model_config
            outputs = config.outputs if isinstance(config, EncoderConfig) else ()
            subject = IdleSubject(prepared.plan, expected, config.vocab_size, outputs)
        trial = IdleMeasurement(subject, engine, is_wanted).run()
        if trial is None:
            return self._idle_attempts < MAX_IDLE_ATTEMPTS
        self._prepared = prepared.with_idle_trial(trial)
        self._step_time_model.use_table(self._prepared.step_time_table)
        self._watch_drift(self._prepared, self._step_time_model)
        log.info("measured while idle: %s", self._prepared.plan.decisions["capacity_tokens_per_second"].reason)
        return False

    @contextmanager
    def _suggest_cpu_on_failure(self) -> Iterator[None]:
        """Log that `device=cpu` remains possible if loading on a GPU fails; the failure itself is raised as usual."""
        device, done = self._prepared.plan.placement.device, False
        try:
            yield
            done = True
        finally:
            if device != "cpu" and not done and not self._stopping.is_set():
                log.error("loading on %s failed; set device=cpu to serve on the processor instead", device)

    def _worker_failed(self, error: BaseException) -> None:
        self.service.on_worker_exit()
        if not self._stopping.is_set():
            self._on_fatal(error)

    # ---- metrics and information ------------------------------------------------------------------------------------

    def _deployment(self) -> DeploymentInfo:
        prepared = self._start
        facts, plan = prepared.facts, prepared.plan
        labels = ServerInfo(
            version=VERSION,
            model=prepared.model_name,
            device=plan.placement.device,
            isa=isa_label(facts, plan),
            precision=plan.weights.precision,
            torch=facts.torch.version if facts.torch else "",
        )
        return DeploymentInfo(
            server=labels,
            threads=plan.cpu.threads,
            cpu_quota_cores=facts.cgroup.quota_cores,
            cpu_stat=self._cpu_stat,
            hourly_price=prepared.settings.hourly_price,
        )

    def _watch_drift(self, prepared: Prepared, model: StepTimeModel) -> None:
        calibration_file, calibration, plan = prepared.calibration_file, prepared.calibration, prepared.plan
        if model.table is None:
            return
        expected = ExpectedSpeed(
            plan.speed.capacity_tokens_per_second,
            plan.speed.roofline_ratio,
            not model.is_measured,
            prepared.calibration_spread,
        )

        def forget() -> None:
            if calibration is not None:
                calibration_file.forget(calibration)

        self._step_monitor.watch_drift(SpeedDrift(model, expected, forget))

    def _slow_step_detector(self, model: StepTimeModel) -> SlowStepDetector:
        return SlowStepDetector(
            model,
            self._step_monitor.gc_control,
            lambda: throttled_seconds(self._cpu_stat),
            first_touch_seconds(),
            self._thermal_monitor.cause,
        )

    def _sampling_defaults(self) -> dict[str, float]:
        model = self.service.model if self.service.ready else None
        return dict(model.sampling_defaults) if isinstance(model, ServedDecoder) else {}

    def _info(self) -> dict[str, Any]:
        prepared, drift = self._start, self._step_monitor.drift
        needs: dict[str, Any] = {}
        calibration = None
        if isinstance(prepared, Prepared):
            needs, calibration = to_json_value(prepared.checkpoint.needs()), prepared.calibration
        return {
            "model": {"name": prepared.model_name, **needs},
            "sampling_defaults": self._sampling_defaults(),
            "adapters": [adapter.name for adapter in self.service.adapters],
            "facts": prepared.facts.to_json(),
            "place": self._power_monitor.to_json(),
            "thermal": self._thermal_monitor.to_json(),
            "plan": prepared.plan.to_json(),
            "calibration": None if calibration is None else calibration.to_json(),
            "speed": None if drift is None else drift.to_json(),
            "steps": self._step_monitor.steps_json(),
            "speculation": None if self._speculation is None else self._speculation.to_json(),
        }
