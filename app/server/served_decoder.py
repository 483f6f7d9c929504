"""The torch-free part of a decoder: its tokenizer, templates, formats of its answers, and sampling defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from app.errors import InvalidRequest
from app.messages import SamplingParams
from app.service.served_model import ServedDecoder, ServedModel, ServingLimits
from app.settings import Settings
from app.text.chat import ChatTemplate
from app.text.grammar import GrammarCompiler
from app.text.reasoning import REASONING_FORMATS, ReasoningFormat, choose_reasoning_format
from app.text.tokenizer import Tokenizer
from app.text.tool_formats import TOOL_FORMATS, ToolFormat, choose_tool_format
from app.weights.checkpoint import Checkpoint

log = logging.getLogger(__name__)

# Names in generation_config.json, and the types of their values.
_DEFAULTED: Mapping[str, type] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float,
}  # fmt: skip


def make_served_decoder(
    name: str,
    limits: ServingLimits,
    tokenizer: Tokenizer,
    chat: ChatTemplate | None,
    checkpoint: Checkpoint,
    settings: Settings,
) -> ServedDecoder:
    """Return the description of a decoder for the service."""
    template = None if chat is None else chat.source
    tools = settings.tool_call_parser
    defaults = sampling_defaults(checkpoint.generation_config) if settings.generation_config == "auto" else {}
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
    """Return the sampling parameters of a generation_config.json, as vLLM reads it. Values out of range are left out."""
    found: dict[str, float] = {}
    for name, kind in _DEFAULTED.items():
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
