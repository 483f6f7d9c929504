"""The torch-free part of a decoder: its tokenizer, templates, formats of its answers, and sampling defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from app.errors import CheckpointInvalid, InvalidRequest
from app.messages import SamplingParams
from app.service.served_model import ServedDecoder, ServedModel, ServingLimits
from app.settings import Settings
from app.text.chat import ChatTemplate
from app.text.grammar import GrammarCompiler
from app.text.reasoning import REASONING_FORMATS, ReasoningFormat, choose_reasoning_format
from app.text.tokenizer import Tokenizer
from app.text.tool_formats import TOOL_FORMATS, ToolFormat, choose_tool_format
from app.weights.checkpoint import Checkpoint
from app.weights.files import join_names

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
        tool_format=_tool_format(chat, _model_type(checkpoint)) if tools == "auto" else TOOL_FORMATS[tools],
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
    """Return the sampling parameters of a generation_config.json, as vLLM reads it, without values out of range.

    Raises `CheckpointInvalid` if it asks for a way of sampling that is not offered.
    """
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


def _model_type(checkpoint: Checkpoint) -> str:
    return str(checkpoint.config.get("model_type", ""))


def _tool_format(chat: ChatTemplate | None, model_type: str) -> ToolFormat:
    template = chat if chat is None or chat.with_tools is None else chat.with_tools
    if template is not None and template.tool_format is not None:
        return template.tool_format
    return choose_tool_format(None if template is None else template.source, model_type)


def _reasoning_format(template: str | None, setting: str) -> ReasoningFormat | None:
    if setting == "auto":
        return choose_reasoning_format(template)
    return REASONING_FORMATS.get(setting)
