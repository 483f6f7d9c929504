"""Composition of the server: from a prepared start to a running engine and service."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from app.api.access import AccessRules, ApiKeys, is_loopback_name
from app.api.routing import ApiRuntime, Lifespan, ModelNames
from app.api.tasks.routes import GENERATED
from app.engine.worker import Callbacks, Worker
from app.errors import CheckpointInvalid, InvalidRequest, RequestError, SettingsInvalid, StepFailed
from app.hardware.facts import Facts, to_json_value
from app.hardware.plan.plan import ServingPlan
from app.hardware.plan.precision import QUANTIZED_PRECISIONS, bf16_products
from app.hardware.probe.cgroup import find_cpu_stat
from app.hardware.probe.host_files import HostFiles
from app.messages import Event, SamplingParams
from app.metrics.gauges import DeploymentGauges, DeploymentInfo, ServerInfo
from app.metrics.instruments import Metrics
from app.metrics.power_monitor import PowerMonitor
from app.metrics.step_monitor import MAX_NEW_OBJECTS, StepRecorder
from app.metrics.steps import EngineSnapshot, StepStats
from app.metrics.thermal_monitor import ThermalMonitor
from app.models.decoders.config import ModelConfig
from app.models.decoders.families import DECODER_FAMILIES, reads_pictures
from app.models.encoders.config import EncoderConfig
from app.models.transformers_config import INSTALL, TransformersConfig
from app.models.transformers_tasks import TaskConfig
from app.server.adapters import adapter_store
from app.server.engine_child import CheckpointRecipe
from app.server.engine_host import (
    EngineHost,
    EngineTexts,
    HostMessage,
    HostSurroundings,
    PlanChanged,
    SpeedChanged,
    StageBegun,
    bind_service_threads,
    read_tokenizer,
)
from app.server.engine_process import EngineProcess
from app.server.engine_replicas import EngineReplicas
from app.server.model_source import check_vocabulary
from app.server.prepare import Prepared, UnfetchedModel
from app.server.start_console import StartConsole
from app.service.engine_client import ProcessPlace, WorkerInterface
from app.service.pictures import ChatPictureReader, Tower
from app.service.served_model import (
    HELD_BYTES_DIVISOR,
    MIN_HELD_BYTES,
    ServedDecoder,
    ServedEncoder,
    ServedModel,
    ServedProgram,
    ServedTasks,
    ServingLimits,
)
from app.service.service import Service
from app.settings import Settings, parse_rate_limit, unix_path_of
from app.text.chat import ChatTemplate
from app.text.grammar import GrammarCompiler
from app.text.reasoning import REASONING_FORMATS, ReasoningFormat, choose_reasoning_format
from app.text.source_text import SourceText, generation_defaults
from app.text.tokenizer import Tokenizer
from app.text.tool_formats import TOOL_FORMATS, ToolFormat, choose_tool_format
from app.tracing.request_trace import Tracer
from app.version import VERSION
from app.weights.checkpoint import Checkpoint
from app.weights.files import join_names, open_regular, unreadable_message
from app.weights.onnx_file import OnnxCheckpoint
from app.weights.program import ProgramCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.text.chat import ChatTemplate
    from app.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
STOP_SECONDS = 3.0  # longest wait of a stop for the worker; a step takes less
# Longest wait while loading, which checks for a stop at each percent, and may be ended anywhere.
STOP_LOADING_SECONDS = 1.0
_MAX_KEY_BYTES = 2**20  # of a key file
FLUSH_SECONDS = 1.0  # longest wait of a stop for the spans of the last requests to be sent
# What is otherwise imported at the first stream and the first look at the routes. An import takes time of the event loop,
# and fails where no more files can be opened.
IMPORTED_LATER = ("anyio._core._sockets", "anyio._core._streams", "pydantic.v1")
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
TOKEN_RULES = frozenset(
    "no_repeat_ngram_size encoder_repetition_penalty encoder_no_repeat_ngram_size bad_words_ids suppress_tokens"
    " begin_suppress_tokens sequence_bias exponential_decay_length_penalty".split()
)
# The request says how long an answer is and how it is searched. `do_sample` is left to the temperature, as vLLM does. A
# prompt has more than one token, so no first token is forced, and an answer that reaches its limit ends without a forced
# last one. The others are about caches, speed and what is returned.
SEARCHED = frozenset("num_beams length_penalty early_stopping max_length min_length do_sample".split())
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
    follows, source = settings.generation_config == "auto", source_text(checkpoint, tokenizer)
    config = _generation_config(checkpoint)
    by_library = isinstance(checkpoint.model_config, TransformersConfig)
    defaults: dict[str, Any] = dict(sampling_defaults(config, by_library)) if follows else {}
    if source is not None and follows:
        defaults |= generation_defaults(config, source, limits.max_running_seqs)
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
        source=source,
    )


def source_text(checkpoint: Checkpoint, tokenizer: Tokenizer) -> SourceText | None:
    """Return how source texts of a model with an encoder are written; None for any other."""
    config = checkpoint.model_config
    if not isinstance(config, TransformersConfig) or not config.max_source_len:
        return None
    tasks = checkpoint.config.get("task_specific_params")
    known = {name: one for name, one in tasks.items() if isinstance(one, dict)} if isinstance(tasks, dict) else {}
    return SourceText(tokenizer, config.max_source_len, config.max_target_len, known)


def prepare_grammars(model: ServedModel) -> Sequence[Future[None]]:
    """Prepare structured output on another thread while weights are loaded; return what to wait for."""
    if not isinstance(model, ServedDecoder) or model.grammars is None:
        return ()
    pool = ThreadPoolExecutor(1, thread_name_prefix="armature-grammar")
    preparing = pool.submit(model.grammars.prepare)
    pool.shutdown(wait=False)
    return (preparing,)


def sampling_defaults(config: Mapping[str, Any], by_library: bool = False) -> dict[str, float]:
    """Return the sampling parameters of a generation_config.json as vLLM does. Raises `CheckpointInvalid`.

    `by_library`: transformers computes the model, and its own processors follow the rules about tokens.
    """
    for name, neutral in REFUSED.items():
        if by_library and name in TOKEN_RULES:
            continue
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
    names = FOLLOWED.keys() | REFUSED.keys() | SEARCHED
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


def warn_of_unknown_tokens(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Log if the tokenizer has tokens that the model does not know; texts with them are refused."""
    texts = [tokenizer.token_text(token_id) for token_id in range(vocab_size, tokenizer.vocab_size + 1)]
    unknown = [text for text in texts if text]
    if unknown:
        log.warning(
            "the tokenizer has %d tokens that the model does not know, such as %r: texts with them are refused",
            len(unknown),
            unknown[0][:100],
        )


# Of PaliGemma, whose files have no template: it answers in the form of its training, and knows no conversations.
_PICTURES_FIRST = (
    "{% for message in messages if message.content is not string %}{% for part in message.content if part.type == 'image' %}"
    "<image>{% endfor %}{% endfor %}{{ bos_token }}{% for message in messages %}{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)


def read_chat_template(prepared: Prepared, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """Read the chat template and start its process; None if the checkpoint has none or does not generate."""
    checkpoint, settings = prepared.checkpoint, prepared.settings
    if tokenizer is None or checkpoint.kind != "decoder":
        return None
    from app.text.chat import open_chat_template
    from app.text.child_process import TemplateLimits

    limits = TemplateLimits(settings.chat_template_cpu_seconds, settings.chat_template_memory_bytes)
    assert isinstance(checkpoint, Checkpoint), "a program generates no text"
    tokens, config = frozenset(tokenizer.added_tokens.values()), checkpoint.model_config
    joins = isinstance(config, ModelConfig) and DECODER_FAMILIES[config.architecture].joins_prompt
    values = {"chat_template": _PICTURES_FIRST, **tokenizer.config} if joins else tokenizer.config
    return open_chat_template(
        checkpoint.location, values, tokenizer.named_tokens, limits, settings.chat_template, tokens
    )


def make_served_model(prepared: Prepared, tokenizer: Tokenizer | None, chat: ChatTemplate | None) -> ServedModel:
    checkpoint, plan, name = prepared.checkpoint, prepared.plan, prepared.model_name
    limits = ServingLimits(
        max_model_len=plan.memory.max_model_len,
        max_running_seqs=plan.memory.max_running_seqs * plan.steps.data_parallel,
        max_waiting_requests=plan.memory.max_waiting_requests * plan.steps.data_parallel,
        request_timeout_seconds=prepared.settings.request_timeout_seconds,
        vocab_size=checkpoint.needs().vocab_size,
        tokenizer_threads=plan.cpu.tokenizer_threads,
        max_held_bytes=max(MIN_HELD_BYTES, prepared.facts.memory_limit_bytes // HELD_BYTES_DIVISOR),
        max_logprobs=prepared.settings.max_logprobs,
        has_priorities=prepared.settings.scheduling_policy == "priority",
    )
    if isinstance(checkpoint, ProgramCheckpoint):
        platform = "onnxruntime_onnx" if isinstance(checkpoint, OnnxCheckpoint) else "pytorch_export"
        return ServedProgram(name, limits, checkpoint.signature, checkpoint.sizes, checkpoint.description, platform)
    if isinstance(checkpoint.model_config, TaskConfig):
        return ServedTasks(name, limits, checkpoint.model_config)
    assert tokenizer is not None, "a checkpoint other than a program has a tokenizer"
    if isinstance(checkpoint.model_config, EncoderConfig):
        return ServedEncoder(name, limits, tokenizer, checkpoint.model_config)
    decoder = make_served_decoder(name, limits, tokenizer, chat, checkpoint, prepared.settings)
    reader = picture_reader(prepared)
    return replace(decoder, no_pictures=reader) if isinstance(reader, str) else replace(decoder, pictures=reader)


def _unread_pictures(config: ModelConfig, values: Mapping[str, Any]) -> str | None:
    """Return why the pictures of a family cannot be read with these values of config.json."""
    family = DECODER_FAMILIES[config.architecture]
    if family.sections and not any(rope is not None and rope.axes for rope in config.ropes):
        return "its config.json has no mrope_section, which says where they are"
    if config.altup is not None and values.get("text_config", {}).get("pad_token_id"):
        return "its config.json has another pad_token_id than 0, whose inputs of layers the tokens of pictures have"
    return None


def picture_reader(prepared: Prepared) -> ChatPictureReader | str:
    """Return what reads pictures for this model, or why none can be read. Nothing is loaded before the first one."""
    checkpoint, settings = prepared.checkpoint, prepared.settings
    assert isinstance(checkpoint, Checkpoint), "a program generates no text"
    config, part = checkpoint.model_config, checkpoint.picture_part
    if checkpoint.gguf is not None and part is None:
        return "this GGUF model has no file mmproj that is used (docs/gguf.md)"
    if not isinstance(config, ModelConfig) or (part is None and not reads_pictures(config.architecture)):
        return f"this server reads only text with this model ({config.architecture}; docs/families.md)"
    if reason := _unread_pictures(config, checkpoint.config):
        return reason
    if settings.max_images == 0:
        return "this server reads none (max_images=0)"
    if not all(map(find_spec, ("transformers", "PIL"))):
        return f"the library that reads them is not installed here: {INSTALL}"
    # Granite multiplies all inputs of its first layer, and other families the embeddings alone.
    scales = "embedding_multiplier" in checkpoint.config.get("text_config", {})
    scale = config.embedding_scale if scales else 1.0
    precision = prepared.plan.weights.precision
    dtype = "float32" if precision == "fp32" or bf16_products(prepared.facts) is None else "bfloat16"
    is_quantized = precision in QUANTIZED_PRECISIONS

    def load() -> Tower:
        from app.engine.transformers.tower import PictureTower

        if part is not None:
            from app.engine.transformers.mmproj import GgufTower

            return GgufTower(part, checkpoint.location, config, scale, dtype, is_quantized)
        return PictureTower(checkpoint.directory, config, scale, dtype, is_quantized)

    return ChatPictureReader(load, settings.max_images, settings.allow_image_urls)


def use_http_threads(number: int) -> None:
    """Let the event loop run what takes longer in as many threads."""
    pool = ThreadPoolExecutor(number, thread_name_prefix="armature-http")
    asyncio.get_running_loop().set_default_executor(pool)


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What a runtime has from a process with several models: the model's metrics, and the machine's monitors."""

    metrics: Metrics
    power: PowerMonitor
    thermal: ThermalMonitor


class ModelFront:
    """The half of a model that serves: its texts, and the service of its requests. Each API process has one."""

    def __init__(self, worker: WorkerInterface, metrics: Metrics, place: ProcessPlace | None = None) -> None:
        self.metrics = metrics
        self.service = Service(worker, metrics, place=place)
        self.tokenizer: Tokenizer | None = None
        self.chat: ChatTemplate | None = None
        self.model: ServedModel | None = None
        self.preparing: Sequence[Future[None]] = ()  # what to wait for before requests

    def take_plan(self, message: PlanChanged) -> None:
        """Read the texts of the model's files and serve it, once its plan is final, on any thread."""
        prepared = message.prepared
        cache = prepared.settings.cache_directory
        if self.tokenizer is None and (tokenizer := read_tokenizer(prepared.checkpoint, cache)) is not None:
            assert isinstance(prepared.checkpoint, Checkpoint), "a program has no tokenizer"
            self.tokenizer = tokenizer
            warn_of_unknown_tokens(tokenizer, prepared.checkpoint.model_config.vocab_size)
            if prepared.draft is not None and not prepared.draft.decoder.is_draft_head:
                check_vocabulary(tokenizer, prepared.draft, cache)
            self.chat = read_chat_template(prepared, tokenizer)
            for name in IMPORTED_LATER:
                import_module(name)
        if not message.is_loading:
            return
        model = make_served_model(prepared, self.tokenizer, self.chat)
        if self.model is not None and self.model.limits == model.limits:
            return  # the engine is loaded again
        self.model = model
        if isinstance(model, ServedDecoder) and model.pictures is not None:
            model.pictures.report = self.metrics.picture_read
        self.service.serve(model)
        self.preparing = prepare_grammars(model)

    def engine_texts(self) -> EngineTexts:
        """Return what an engine in this process needs of the texts, which are read already."""
        eos_token_ids = () if self.tokenizer is None else self.tokenizer.eos_token_ids
        grammars = self.model.grammars if isinstance(self.model, ServedDecoder) else None
        return EngineTexts(eos_token_ids, grammars, self.preparing)

    def settle(self, prepared: Prepared, is_alone: bool) -> None:
        """Do what a host does in the engine's process: bind the threads, unless there are other models, and freeze the heap."""
        if is_alone:
            bind_service_threads(prepared.plan.cpu.service_cpu_ids)
        settle_heap()


def settle_heap() -> None:
    """Freeze the loaded objects, and collect new ones less often: that takes a tenth of a short request otherwise."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_NEW_OBJECTS)


def api_runtime(settings: Settings, front: ModelFront, lifetime: Lifespan, keys: ApiKeys | None = None) -> ApiRuntime:
    """Return what the API needs of a model; `keys` None: the keys of the settings."""
    if keys is None:
        files = () if settings.api_key_file is None else (settings.api_key_file,)
        keys = ApiKeys(lambda: read_api_keys(settings), *files)
    rates, is_local = parse_rate_limit(settings.rate_limit), is_local_only(settings)
    only_loopback = is_local and not keys and not settings.allowed_hosts
    return ApiRuntime(
        front.service,
        front.metrics,
        lifetime,
        dict,
        int(time.time()),
        keys,
        AccessRules(*rates, settings.allowed_hosts, only_loopback, settings.cors_allow_origins),
        ModelNames(settings.served_model_name[1:], *accepts_any_name(settings, len(keys))),
        settings.page == "on",
    )


@dataclass(frozen=True, slots=True)
class ServedDescription:
    """What is known of a model: the name that answers have, the kind, what it can do, and its context."""

    name: str
    kind: str
    tasks: frozenset[str]
    max_model_len: int


class ServedStart(Protocol):
    """What an API process beside the main one serves once an engine is ready."""

    def serve(self, front: ModelFront) -> None:
        """Read the model's texts and serve it, on a thread."""

    def describe(self) -> ServedDescription: ...


@dataclass(frozen=True, slots=True)
class EngineBeside:
    """What the API processes beside the main one need of an engine: its address, the counts of its model, and news.

    `on_ready` is called on a thread whenever the engine is ready, and `on_lost` on the event loop when it is no more.
    """

    address: str
    place: ProcessPlace
    on_ready: Callable[[ServedStart], None]
    on_lost: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ServedCheckpoint:
    """A model that an API process beside the main one serves; `is_alone`: it is the only one."""

    prepared: Prepared
    is_alone: bool

    def serve(self, front: ModelFront) -> None:
        prepared = self.prepared
        front.take_plan(PlanChanged(prepared, is_loading=True))
        wait(front.preparing)
        if prepared.settings.lora_root is None:  # otherwise the main process knows which are loaded
            front.service.serve_adapters(adapter_store(prepared.settings, prepared.adapters, _read_elsewhere))
        front.settle(prepared, self.is_alone)

    def describe(self) -> ServedDescription:
        prepared = self.prepared
        context = prepared.plan.memory.max_model_len
        return ServedDescription(prepared.model_name, prepared.needs.kind, tasks_of(prepared), context)


def _read_elsewhere(path: str, slot: int) -> None:
    raise AssertionError("the main process reads adapters")


def tasks_of(start: Prepared) -> frozenset[str]:
    if not isinstance(start.checkpoint, Checkpoint):
        return frozenset({"infer"})
    config = start.checkpoint.model_config
    if isinstance(config, TaskConfig):
        return frozenset({"infer", *config.tasks})
    if not isinstance(config, EncoderConfig):
        has_encoder = isinstance(config, TransformersConfig) and config.max_source_len
        return frozenset({"generate", *(GENERATED if has_encoder else ())})
    if not config.labels:
        return frozenset({"encode", "embed", "infer", "feature-extraction", "sentence-similarity"})
    names = "encode", "classify", "infer", "text-classification"
    return frozenset({*names, *(("rerank",) if len(config.labels) == 1 else ())})


class ServerRuntime:
    """The serving half of one model in the main process, and its engine in a thread of it or in a process of its own.

    `on_fatal` is called when the engine cannot continue, and `on_ready` when it can serve, with the final plan, the
    seconds since the start, and whether the model has a chat template; both on the engine's threads. `shared` None: it
    is the only model of the process. `beside` None: no other process serves it.
    """

    def __init__(
        self,
        start: Prepared | UnfetchedModel,
        on_fatal: Callable[[BaseException], None],
        on_ready: Callable[[Prepared, float, bool], None] = lambda prepared, seconds, has_chat: None,
        tracer: Tracer | None = None,
        shared: SharedParts | None = None,
        beside: EngineBeside | None = None,
    ) -> None:
        self._start, self._tracer, self._shared, self._beside = start, tracer, shared, beside
        self._on_fatal, self._on_ready = on_fatal, on_ready
        self._began = time.monotonic()
        self._is_stopping = self._is_served = False
        self._speculation: dict[str, Any] | None = None
        self._console = StartConsole(has_bars=start.settings.log_format == "text")
        self._cpu_stat = find_cpu_stat(HostFiles(Path("/")))
        self.metrics = Metrics() if shared is None else shared.metrics
        self._steps = StepRecorder(self.metrics)
        facts, settings, gpu = start.facts, start.settings, start.plan.gpu(start.facts)
        self._thermal_monitor = ThermalMonitor(self.metrics, facts.thermal) if shared is None else shared.thermal
        self.host: EngineHost | None = None  # in this process
        self.worker: Worker | EngineProcess | EngineReplicas
        if (number := start.plan.steps.data_parallel) > 1:
            self.worker = EngineReplicas(number, self._recipe, self._take, self._steps, self.metrics, start.model_name)
        elif start.plan.steps.engine_process:
            address = "" if beside is None else beside.address
            self.worker = EngineProcess(
                self._recipe, self._take, self._steps, self._fail_requests, start.model_name, address
            )
        else:
            surroundings = HostSurroundings(
                self._take,
                lambda prepared: self._front.engine_texts(),
                self._steps.record,
                self._steps.began[0],
                self._thermal_monitor.cause,
                is_alone=shared is None,
            )
            self.host = EngineHost(start, surroundings)
            self.worker = Worker(self.host.build, self.host.monitor)
        self._front = ModelFront(self.worker, self.metrics, None if beside is None else beside.place)
        self.service = self._front.service
        self._power_monitor = (
            PowerMonitor(
                self.metrics, facts.power, lambda: self.service.idle, settings.watts, settings.hourly_price, gpu
            )
            if shared is None
            else shared.power
        )
        DeploymentGauges(self.metrics, self._deployment)

    @property
    def alive(self) -> bool:
        """True while the worker runs."""
        return self.worker.alive

    @property
    def reported_metrics(self) -> Mapping[int, Metrics]:
        return {0: self.metrics}

    @property
    def prepared_start(self) -> Prepared | UnfetchedModel:
        return self._start

    def runtime_among(self, process: ApiRuntime) -> ApiRuntime:
        """Return the runtime of one of several models of a process."""
        names = ModelNames(self._start.settings.served_model_name[1:])
        capacity = self._steps.capacity
        return replace(
            process, service=self.service, metrics=self.metrics, info=self._info, names=names, capacity=capacity
        )

    def runtime(self, keys: ApiKeys | None = None) -> ApiRuntime:
        made = api_runtime(self._start.settings, self._front, self, keys)
        return replace(made, info=self._info, tracer=self._tracer, capacity=self._steps.capacity)

    async def start(self) -> None:
        await self.service.start()
        if self._shared is None:
            use_http_threads(self._start.plan.cpu.http_threads)
            self._power_monitor.start()
            self._thermal_monitor.start()
        if self.host is None:
            self.worker.start(Callbacks(self._take_output, self._engine_failed))
        else:
            self.worker.start(self.host.callbacks(self._take_output, self._engine_failed))

    async def stop(self) -> None:
        """Stop everything after responses were sent or cut off, waiting for the worker for limited time."""
        if self._shared is None:
            self._power_monitor.stop()
            self._thermal_monitor.stop()
        self._is_stopping = True
        await self.service.stop()
        patience = STOP_LOADING_SECONDS if self.worker.state == "loading" else STOP_SECONDS
        if self.host is not None:
            self.host.stopping.set()
        await self.worker.stop(patience)
        self._console.close()
        if self._tracer is not None and self._shared is None:  # last: responses that were cut off have ended now
            await asyncio.to_thread(self._tracer.close, FLUSH_SECONDS)

    # ---- from the engine's threads -----------------------------------------------------------------------------------

    def _recipe(self, engine: int = 0) -> CheckpointRecipe:
        return CheckpointRecipe(self._start if engine == 0 else self._prepared.for_engine(engine))

    def _take_output(self, events: Sequence[Event], snapshot: EngineSnapshot, stats: StepStats | None) -> None:
        if events:
            self.service.on_events(events)
        if stats is not None:
            self.metrics.on_step(stats, snapshot)

    def _take(self, message: HostMessage) -> None:
        if isinstance(message, StageBegun):
            self._console.show(message.stage)
        elif isinstance(message, PlanChanged):
            self._start = message.prepared
            self._front.take_plan(message)
        elif isinstance(message, SpeedChanged):
            self._steps.speed, self._speculation = message.speed, message.speculation
        else:
            self._become_ready()

    def _become_ready(self) -> None:
        prepared = self._prepared
        wait(self._front.preparing)
        read = self._host_adapter if isinstance(self.worker, Worker) else self.worker.read_adapter
        self._console.close()
        if not isinstance(self.worker, Worker):
            self._front.settle(prepared, is_alone=self._shared is None)
        if self._beside is not None:
            self._beside.on_ready(ServedCheckpoint(prepared, is_alone=self._shared is None))
        if self._is_served:
            log.info("the engine was started again")
            self.service.adapters.load_again()
            return
        self._is_served = True
        self.service.serve_adapters(adapter_store(prepared.settings, prepared.adapters, read))
        self._on_ready(prepared, time.monotonic() - self._began, self._front.chat is not None)

    def _host_adapter(self, path: str, slot: int) -> None:
        assert self.host is not None, "the engine is in this process"
        self.host.read_adapter(path, slot)

    def _fail_requests(self, error: RequestError) -> None:
        if self._beside is not None:
            self._beside.on_lost()
        self.service.on_worker_exit(error)

    def _engine_failed(self, error: BaseException) -> None:
        self._console.close()
        self.service.on_worker_exit(StepFailed("The engine has stopped; the server is about to end."))
        if not self._is_stopping:
            self._on_fatal(error)

    @property
    def _prepared(self) -> Prepared:
        assert isinstance(self._start, Prepared), "the model is fetched first"
        return self._start

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

    def _sampling_defaults(self) -> dict[str, float]:
        model = self.service.model if self.service.ready else None
        return dict(model.sampling_defaults) if isinstance(model, ServedDecoder) else {}

    def _info(self) -> dict[str, Any]:
        prepared, speed = self._start, self._steps.speed
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
            "speed": None if speed is None else speed.to_json(),
            "steps": self._steps.steps_json(),
            "speculation": self._speculation,
            "states": to_json_value(self.service.snapshot.states),
        }
