"""Conversion of a generation request to what the worker computes: token ids, bad words and a compiled grammar.

It runs in the service's thread pool, since a template, a tokenizer and a grammar take time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from app.errors import InvalidRequest
from app.messages import Generate, Grammar, LoadedAdapter, SamplingParams
from app.service.inputs import infill_format, tokenize_prompt
from app.service.requests import GenerationRequest, Tool
from app.service.served_model import ServedDecoder
from app.text.grammar import GrammarSource, check_source
from app.text.reasoning import opens_reasoning
from app.text.tool_calls import forced_calls_grammar

_END_TOKENS = 8  # tokens of a prompt's end in which the first tag of reasoning is looked for


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized request.

    `literals` are the special tokens that are part of the text, by id. `opens_reasoning`: the text begins inside of
    reasoning. `end_ids` end the completion, besides the checkpoint's end tokens.
    """

    token_ids: tuple[int, ...]
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    literals: Mapping[int, str] = field(default_factory=dict)
    opens_reasoning: bool = False
    end_ids: tuple[int, ...] = ()

    def command(
        self, request_id: str, params: SamplingParams, arrived_at: float, adapter: LoadedAdapter | None = None
    ) -> Generate:
        """Return the request for the worker."""
        if self.end_ids:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *self.end_ids))
        return Generate(request_id, self.token_ids, params, arrived_at, self.bad_word_ids, self.grammar, adapter)


def read_prompt(model: ServedDecoder, request: GenerationRequest) -> Prompt:
    """Return the tokenized request. Raises an `InvalidRequest` that names the field."""
    token_ids = tokenize_prompt(model, request)
    is_open = False
    if request.separates_reasoning and model.reasoning_format is not None:
        end = model.tokenizer.decode(token_ids[-_END_TOKENS:], skip_special_tokens=False)
        is_open = opens_reasoning(model.reasoning_format, end)
    return Prompt(
        token_ids,
        _bad_word_ids(model, request.params.bad_words),
        _grammar(model, request, is_open),
        _literals(model, request),
        is_open,
        () if request.infill is None or request.params.ignore_eos else infill_format(model).end_ids,
    )


def _bad_word_ids(model: ServedDecoder, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words, each at the beginning of a text and after a space, as vLLM does."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(model.tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(model.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        found |= dict.fromkeys(ids for ids in (bare, spaced) if ids)
    return tuple(found)


def _grammar(model: ServedDecoder, request: GenerationRequest, is_open: bool) -> Grammar | None:
    source, tools = request.grammar, request.tools
    if tools is not None and tools.forced:
        source = GrammarSource("lark", _calls_grammar(model, tools.forced, tools.parallel), "tools")
    elif tools is not None and source is not None:
        source = replace(source, alternative=_calls_grammar(model, tools.tools, tools.parallel))
    if source is None:
        return None
    if model.grammars is None:
        raise InvalidRequest("Structured output is not possible with this model.", field=source.field)
    if is_open and model.reasoning_format is not None:
        source = replace(source, after=model.reasoning_format.end)
    return model.grammars.compile(source)


def _calls_grammar(model: ServedDecoder, tools: tuple[Tool, ...], parallel: bool) -> str:
    for tool in tools:
        check_source(GrammarSource("json_schema", json.dumps(tool.parameters), "tools"))
    special_ids = {text: token_id for token_id, text in model.tokenizer.special_tokens.items()}
    return forced_calls_grammar(
        model.tool_format, [(tool.name, tool.parameters) for tool in tools], parallel, special_ids
    )


def _literals(model: ServedDecoder, request: GenerationRequest) -> dict[int, str]:
    """Return the special tokens that are part of the text: all, or the markers that the parsers need."""
    if not request.params.skip_special_tokens:
        return dict(model.tokenizer.special_tokens)
    markers: set[str] = set()
    if request.tools is not None:
        markers.update(model.tool_format.markers)
        markers.add("[ARGS]")
    if request.separates_reasoning and model.reasoning_format is not None:
        markers.update(model.reasoning_format.markers)
    if not markers:
        return {}
    return {token_id: text for token_id, text in model.tokenizer.special_tokens.items() if text in markers}
