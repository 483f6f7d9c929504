"""Conversion of a generation request to what the worker computes: token ids, bad words, a grammar, and bounds on scores.

It runs in the service's thread pool, since a template and a tokenizer take time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from app.errors import InvalidRequest
from app.messages import ALL_LOGPROBS, MAX_LOGPROBS, Generate, Grammar, LoadedAdapter, SamplingParams
from app.service.inputs import infill_format, tokenize_prompt
from app.service.requests import GenerationRequest, Tool
from app.service.served_model import ServedDecoder, ServingLimits
from app.text.grammar_definition import GrammarSource, check_source
from app.text.reasoning import ReasoningFormat, closes_reasoning, opens_reasoning
from app.text.tool_grammars import forced_calls_grammar

_END_TOKENS = 64  # tokens of a prompt's end in which the first tag of reasoning is looked for
# In one response, if a request asks for more than `MAX_LOGPROBS` at a token: those of one token with the largest
# vocabularies in use.
MAX_SCORES = 2**18
SCORE_BYTES = 600  # of a token's text, bytes and log-probability, as objects and as JSON


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized request.

    `params` are the request's, with what the model decides: numbers of log-probabilities and further end tokens.
    `num_scores` is how many log-probabilities the response may have; 0 if there are few at each token. `literals` are
    the special tokens that are part of the text, by id. `opens_reasoning`: the text begins inside of reasoning.
    `grammar_source` is compiled next, in threads of its own.
    """

    token_ids: tuple[int, ...]
    params: SamplingParams
    num_scores: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar_source: GrammarSource | None = None
    literals: Mapping[int, str] = field(default_factory=dict)
    opens_reasoning: bool = False

    def most_tokens(self, max_model_len: int) -> int:
        """Return the number of tokens that the prompt and all choices of its completion may have together."""
        rest = max_model_len - len(self.token_ids)
        longest = rest if self.params.max_tokens is None else min(self.params.max_tokens, rest)
        return len(self.token_ids) + max(self.params.n, self.params.beam_width, 1) * max(longest, 0)

    def command(
        self,
        request_id: str,
        arrived_at: float,
        adapter: LoadedAdapter | None = None,
        grammar: Grammar | None = None,
        cache_salt: str | None = None,
    ) -> Generate:
        """Return the request for the worker. `grammar` is the compiled one of `grammar_source`."""
        tokens = self.token_ids, self.params, arrived_at, self.bad_word_ids
        return Generate(request_id, *tokens, grammar, adapter, cache_salt)


def read_prompt(model: ServedDecoder, request: GenerationRequest) -> Prompt:
    """Return the tokenized request. Raises an `InvalidRequest` that names the field."""
    token_ids = tokenize_prompt(model, request)
    params, num_scores = resolve_logprobs(model.limits, request.params, len(token_ids))
    if request.infill is not None and not params.ignore_eos:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *infill_format(model).end_ids))
    form = model.reasoning_format if request.separates_reasoning else None
    end = "" if form is None else model.tokenizer.decode(token_ids[-_END_TOKENS:], skip_special_tokens=False)
    is_open = form is not None and opens_reasoning(form, end)
    if form is not None and closes_reasoning(form, end):
        form = None
    source = _grammar_source(model, request, form, is_open)
    literals = _literals(model, request)
    if source is not None and model.grammars is not None:
        literals |= model.grammars.tokens_in(source)
    bad_word_ids = _bad_word_ids(model, request.params.bad_words)
    return Prompt(token_ids, params, num_scores, bad_word_ids, source, literals, is_open)


def resolve_logprobs(
    limits: ServingLimits, params: SamplingParams, num_prompt_tokens: int
) -> tuple[SamplingParams, int]:
    """Return the parameters with numbers of tokens, where -1 asks for those of the whole vocabulary, and their scores.

    The number of scores is how many log-probabilities the response may have; 0 if there are few at each token.

    Raises:
        InvalidRequest: More log-probabilities are asked for than the server gives, at a token or in the response.
    """
    sampled = _number(limits, "logprobs", params.logprobs)
    of_prompt = _number(limits, "prompt_logprobs", params.prompt_logprobs)
    if params.beam_width > 1 and (sampled or 0) > MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs of a beam search must be at most {MAX_LOGPROBS}.", field="logprobs")
    resolved = params
    if (sampled, of_prompt) != (params.logprobs, params.prompt_logprobs):
        resolved = replace(params, logprobs=sampled, prompt_logprobs=of_prompt)
    if (number := _num_scores(limits, resolved, num_prompt_tokens)) > MAX_SCORES:
        name = "logprobs" if (sampled or 0) > MAX_LOGPROBS else "prompt_logprobs"
        raise InvalidRequest(
            f"This request asks for up to {number} log-probabilities, and a response has at most {MAX_SCORES}: lower "
            f"{name}, max_tokens or n, or shorten the prompt.",
            field=name,
        )
    return resolved, number


def _num_scores(limits: ServingLimits, params: SamplingParams, num_prompt_tokens: int) -> int:
    rest = limits.max_model_len - num_prompt_tokens
    places = params.n * (rest if params.max_tokens is None else min(params.max_tokens, rest))
    asked = ((params.logprobs, places), (params.prompt_logprobs, num_prompt_tokens))
    return sum(count * number for count, number in asked if count is not None and count > MAX_LOGPROBS)


def _number(limits: ServingLimits, name: str, asked: int | None) -> int | None:
    if asked is None:
        return None
    number = limits.vocab_size if asked == ALL_LOGPROBS else asked
    if limits.max_logprobs != ALL_LOGPROBS and number > limits.max_logprobs:
        every = f", which asks for all {number} tokens of the vocabulary" if asked == ALL_LOGPROBS else ""
        raise InvalidRequest(
            f"{name} must be at most {limits.max_logprobs}, this server's max_logprobs, not {asked}{every}.", field=name
        )
    return min(number, limits.vocab_size)


def _bad_word_ids(model: ServedDecoder, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words, each at the beginning of a text and after a space, as vLLM does."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(model.tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(model.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        found |= dict.fromkeys(ids for ids in (bare, spaced) if ids)
    return tuple(found)


def _grammar_source(
    model: ServedDecoder, request: GenerationRequest, form: ReasoningFormat | None, is_open: bool
) -> GrammarSource | None:
    """Return the grammar of a request. It begins after the reasoning, where the model writes any (`form`)."""
    source, tools = request.grammar, request.tools
    if source is not None and form is not None:
        source = replace(source, answer=form.answer)
    if tools is not None and tools.forced:
        source = GrammarSource("lark", _calls_grammar(model, tools.forced, tools.parallel), "tool_choice")
    elif tools is not None and source is not None:
        source = replace(source, alternative=_calls_grammar(model, tools.tools, tools.parallel))
    if source is None:
        return None
    if model.grammars is None:
        raise InvalidRequest("Structured output is not possible with this model.", field=source.field)
    if form is not None:
        source = replace(source, opening="" if is_open else form.start, after=form.end + form.then)
    return source


def _calls_grammar(model: ServedDecoder, tools: tuple[Tool, ...], parallel: bool) -> str:
    for tool in tools:
        check_source(GrammarSource("json_schema", json.dumps(tool.parameters), "tools"))
    return forced_calls_grammar(model.tool_format, [(tool.name, tool.parameters) for tool in tools], parallel)


def _literals(model: ServedDecoder, request: GenerationRequest) -> dict[int, str]:
    """Return the special tokens that are part of the text: all, or the markers that the parsers need."""
    if not request.params.skip_special_tokens:
        return dict(model.tokenizer.special_tokens)
    markers: set[str] = set()
    if request.tools is not None:
        markers.update(model.tool_format.markers)
    if request.separates_reasoning and model.reasoning_format is not None:
        markers.update(model.reasoning_format.markers)
    if not markers:
        return {}
    return {token_id: text for token_id, text in model.tokenizer.special_tokens.items() if text in markers}
