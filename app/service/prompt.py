"""Conversion of a generation request to what the worker computes: token ids, bad words, a grammar, bounds on scores.

It runs in the service's thread pool, since a template and a tokenizer take time, except for short texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.errors import ContextLengthExceeded, InvalidRequest, TemplateStopped, UnsupportedParameter
from app.messages import (
    ALL_LOGPROBS,
    FIRST_VECTOR_ID,
    MAX_LOGPROBS,
    Generate,
    GrammarSource,
    LoadedAdapter,
    SamplingParams,
    ThinkingLimit,
)
from app.service.pictures import PlacedPictures, ReadPicture, place_pictures, surrounded
from app.service.requests import MEDIA_MARKER, GenerationRequest, Infill, Tool
from app.service.served_model import ServedDecoder, ServedEncoder, ServingLimits
from app.text.bounds import CHUNK_CHARACTERS, EncodingLimits
from app.text.chat import ChatOptions
from app.text.grammar_definition import check_source
from app.text.infill import InfillFormat, InfillPrompt, find_infill_format, shorten_infill
from app.text.reasoning import ReasoningFormat, closes_reasoning, opens_reasoning, thinking_limit
from app.text.source_text import SourceText
from app.text.tool_formats import begun_answer
from app.text.tool_grammars import forced_calls_grammar

# A pool thread starts after 0.1 ms if a core is idle, and after milliseconds if all cores compute. Tokenizing this
# number of characters takes 0.3 ms.
SHORT_CHARACTERS = 1_000
_MAX_TOKEN_CHARACTERS = 64  # few tokens have more, on average over a text
THINKING_LIMIT = "thinking_token_budget"  # the field's name, as in vLLM
_END_TOKENS = 64  # tokens of a prompt's end in which the first tag of reasoning is looked for
# In one response, if a request asks for more than `MAX_LOGPROBS` at a token: those of one token with the largest
# vocabularies in use.
MAX_SCORES = 2**18
SCORE_BYTES = 600  # of a token's text, bytes and log-probability, as objects and as JSON


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized request.

    `params` are the request's, with numbers of log-probabilities and further end tokens from the model. `num_scores` is
    how many log-probabilities the response may have; 0 if there are few at each token. `literals` are the special
    tokens that are part of the text, by id. `opens_reasoning`: the text begins inside of reasoning. `begun`: the text
    before an answer that ends the prompt, as far as it is there. `grammar` is not compiled yet. `thinking`: the limit of
    the reasoning.
    """

    placed: PlacedPictures
    params: SamplingParams
    num_scores: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarSource | None = None
    literals: Mapping[int, str] = field(default_factory=dict)
    opens_reasoning: bool = False
    begun: str = ""
    thinking: ThinkingLimit | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.placed.token_ids

    def most_tokens(self, max_model_len: int) -> int:
        """Return the most tokens of the prompt and all choices of its completion together."""
        rest = max_model_len - len(self.token_ids)
        longest = rest if self.params.max_tokens is None else min(self.params.max_tokens, rest)
        return len(self.token_ids) + max(self.params.n, self.params.beam_width, 1) * max(longest, 0)

    def command(
        self,
        request_id: str,
        arrived_at: float,
        adapter: LoadedAdapter | None = None,
        cache_salt: str | None = None,
        definition: str = "",
    ) -> Generate:
        tokens = self.placed.engine_ids, self.params, arrived_at, self.bad_word_ids
        more = self.thinking, self.placed.vectors
        salt = f"{cache_salt or ''}\0{self.placed.salt}" if self.placed.salt else cache_salt
        return Generate(request_id, *tokens, self.grammar, adapter, salt, definition, *more)


def read_prompt(model: ServedDecoder, request: GenerationRequest, pictures: Sequence[ReadPicture] = ()) -> Prompt:
    """Return the tokenized request. Raises an `InvalidRequest` that names the field."""
    placed = tokenize_prompt(model, request, pictures)
    token_ids = placed.token_ids
    params, num_scores = resolve_logprobs(model.limits, request.params, len(token_ids))
    if model.source is not None:
        params = replace(params, forced_bos_token_id=model.source.forced_bos_token_id(request.target_lang))
    if request.infill is not None and not params.ignore_eos:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *infill_format(model).end_ids))
    form = model.reasoning_format if request.separates_reasoning else None
    reads_end = form is not None or (request.messages is not None and model.tool_format.around)
    end = model.tokenizer.decode(token_ids[-_END_TOKENS:], skip_special_tokens=False) if reads_end else ""
    begun = begun_answer(model.tool_format, end) if end else ""
    is_open = form is not None and opens_reasoning(form, end)
    if form is not None and (closes_reasoning(form, end) or (begun and begun == model.tool_format.answer)):
        form = None
    source = _grammar_source(model, request, form, is_open, begun)
    literals = _literals(model, request)
    if source is not None and model.grammars is not None:
        literals |= model.grammars.tokens_in(source)
    bad_word_ids = _bad_word_ids(model, request.params.bad_words)
    thinking = None
    if form is not None and request.thinking_budget is not None:
        if params.beam_width > 1:
            raise InvalidRequest(
                "a limit of thinking tokens cannot be combined with a beam search.", field=THINKING_LIMIT
            )
        thinking = thinking_limit(form, model.tokenizer, request.thinking_budget, is_open)
    return Prompt(placed, params, num_scores, bad_word_ids, source, literals, is_open, begun, thinking)


def resolve_logprobs(
    limits: ServingLimits, params: SamplingParams, num_prompt_tokens: int
) -> tuple[SamplingParams, int]:
    """Replace -1 by the size of the vocabulary, and return how many log-probabilities the response may have.

    The number is 0 if there are few at each token. Raises `InvalidRequest` if the server gives fewer, at a token or in
    the response.
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
    model: ServedDecoder, request: GenerationRequest, form: ReasoningFormat | None, is_open: bool, begun: str
) -> GrammarSource | None:
    """Return the grammar of a request. It begins after the reasoning, where the model writes any (`form`)."""
    source, tools = request.grammar, request.tools
    if source is not None and form is not None:
        source = replace(source, answer=form.answer)
    if source is not None and request.messages is not None and model.tool_format.answer:
        source = replace(source, answer=model.tool_format.answer.removeprefix(begun))
    if tools is not None and tools.forced:
        source = GrammarSource("lark", _calls_grammar(model, tools.forced, tools.parallel, begun), "tool_choice")
    elif tools is not None and source is not None:
        source = replace(source, alternative=_calls_grammar(model, tools.tools, tools.parallel, begun))
    if source is None:
        return None
    if model.grammars is None:
        raise InvalidRequest("Structured output is not possible with this model.", field=source.field)
    if form is not None:
        source = replace(source, opening="" if is_open else form.start, after=form.end + form.then)
    return source


def _calls_grammar(model: ServedDecoder, tools: tuple[Tool, ...], parallel: bool, begun: str) -> str:
    for tool in tools:
        check_source(GrammarSource("json_schema", json.dumps(tool.parameters), "tools"))
    return forced_calls_grammar(model.tool_format, [(tool.name, tool.parameters) for tool in tools], parallel, begun)


def _literals(model: ServedDecoder, request: GenerationRequest) -> dict[int, str]:
    """Return the special tokens that are part of the text: all, or the markers that the parsers need."""
    if not request.params.skip_special_tokens:
        return dict(model.tokenizer.special_tokens)
    markers: set[str] = set()
    if request.tools is not None or (request.messages is not None and model.tool_format.around):
        markers.update(model.tool_format.markers)
    if request.separates_reasoning and model.reasoning_format is not None:
        markers.update(model.reasoning_format.markers)
    if not markers:
        return {}
    return {token_id: text for token_id, text in model.tokenizer.special_tokens.items() if text in markers}


# ---- token ids -----------------------------------------------------------------------------------------------------


def tokenize_prompt(
    model: ServedDecoder, request: GenerationRequest, pictures: Sequence[ReadPicture] = ()
) -> PlacedPictures:
    """Return the prompt's tokens. Raises an `InvalidRequest` that names the field."""
    _check_priority(model.limits, request.params)
    _check_languages(model, request)
    if pictures:
        _check_with_pictures(request)
    wanted = _wanted_tokens(model.context, request)
    if pictures and request.prompt is not None:
        request = replace(request, prompt=_with_placeholders(request.prompt, pictures))
    field, ids = _prompt_ids(model, request, wanted, pictures)
    if wanted.truncates and wanted.number is not None:
        ids = ids[-wanted.number :] if wanted.keeps_end else ids[: wanted.number]
    if not ids:
        raise InvalidRequest(f"{field} has no tokens: there is nothing to continue.", field=field)
    placed = place_pictures(ids, pictures) if pictures else PlacedPictures(tuple(ids), tuple(ids))
    _check_context_length(model, len(placed.token_ids), request, field)
    check_embedded(model, [token for token in placed.engine_ids if token < FIRST_VECTOR_ID] if pictures else ids, field)
    params, vocab_size = request.params, model.limits.vocab_size
    check_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    check_ids(params.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    check_ids([token_id for token_id, _ in params.logit_bias], vocab_size, "logit_bias")
    check_ids(params.logprob_token_ids, vocab_size, "logprob_token_ids")
    return placed


def _check_with_pictures(request: GenerationRequest) -> None:
    given = {
        "prompt_logprobs": request.params.prompt_logprobs is not None,
        "truncate_prompt_tokens": request.truncate_prompt_tokens is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise UnsupportedParameter(f"{name} cannot be combined with pictures: leave it out.", field=name)


def _with_placeholders(prompt: str, pictures: Sequence[ReadPicture]) -> str:
    """Return a prompt with the token that stands for a picture in place of each marker."""
    if (count := prompt.count(MEDIA_MARKER)) != len(pictures):
        raise InvalidRequest(
            f"The prompt has {count} places for {len(pictures)} pictures: write {MEDIA_MARKER} for each.",
            field="prompt",
        )
    return surrounded(prompt.replace(MEDIA_MARKER, pictures[0].placeholder), pictures)


def prompt_size(request: GenerationRequest) -> int:
    """Return the prompt's characters or token ids, as a measure of the time to read it."""
    if request.messages is not None:
        return messages_size(request.messages)
    length = len(request.token_ids or ()) if request.prompt is None else len(request.prompt)
    infill = request.infill
    return length if infill is None else length + len(infill.suffix) + sum(len(text) for _, text in infill.files)


def is_read_at_once(request: GenerationRequest, size: int) -> bool:
    """Return True if the prompt is a short text, which takes less time to read than to hand to a thread."""
    others = (
        *(request.messages, request.infill, request.grammar, request.tools),
        *(request.params.bad_words or None, request.pictures or None),
    )
    return size <= SHORT_CHARACTERS and others == (None,) * len(others)


def messages_size(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(_content_text(message)) for message in messages)


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content or ())


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """Number of tokens of a text that are wanted; None: all of them.

    A text with more is refused, or with `truncates` returned in part, with at least this number of tokens of its
    beginning, or of its end with `keeps_end`.
    """

    number: int | None = None
    truncates: bool = False
    keeps_end: bool = False


ALL_TOKENS = WantedTokens()


def chat_token_ids(
    model: ServedDecoder,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    options: ChatOptions | None = None,
    wanted: WantedTokens = ALL_TOKENS,
    pictures: Sequence[ReadPicture] = (),
) -> list[int]:
    """Return a conversation's token ids. The template writes all special tokens: none are added, as in transformers."""
    try:
        text = render_chat(model, messages, arguments, options)
    except TemplateStopped:
        if wanted.number is not None and not wanted.truncates:
            # The number of tokens tells the client more, if it is the reason.
            least = model.tokenizer.least_tokens("".join(map(_content_text, messages)), wanted.number)
            if least > wanted.number:
                raise prompt_too_long(model.context, "messages", least) from None
        raise
    return _text_ids(model, surrounded(text, pictures) if pictures else text, False, wanted, "messages")


def render_chat(
    model: ServedDecoder,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    options: ChatOptions | None = None,
) -> str:
    if model.chat is None:
        raise InvalidRequest(
            "This model has no chat template: send a prompt to the completions route instead, or start the server with "
            "--chat-template FILE.",
            field="messages",
        )
    return model.chat.render(messages, arguments, options, model.tool_format)


def _text_ids(model: ServedDecoder, text: str, add_special_tokens: bool, wanted: WantedTokens, field: str) -> list[int]:
    """Return a text's token ids.

    A text that certainly has too many is refused before it is tokenized. The tokenization of a long text ends soon
    after the wanted number.
    """
    limits = EncodingLimits(model.limits.max_text_bytes)
    if wanted.truncates:
        limits = replace(limits, enough_tokens=wanted.number, keeps_end=wanted.keeps_end)
    elif wanted.number is not None and len(text) > CHUNK_CHARACTERS:
        least = model.tokenizer.least_tokens(text, wanted.number)
        if least > wanted.number:
            raise prompt_too_long(model.context, field, least)
        limits = replace(limits, enough_tokens=wanted.number + 1)
    return model.tokenizer.encode(text, add_special_tokens, limits)


def prompt_too_long(context: int, field: str, least: int | None = None, exact: int = 0) -> ContextLengthExceeded:
    """Return the error of a prompt of `exact` tokens, or at least `least`: a long one is not counted to its end."""
    number = str(exact) if least is None else f"at least {least}"
    has = "has" if field in ("prompt", "suffix") else "have"
    return ContextLengthExceeded(
        f"This model's maximum context length is {context} tokens. However, the {field} {has} {number} tokens, and the "
        f"answer needs one at least. Please shorten the {field}.",
        field=field,
    )


def check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Check that every id is in the vocabulary. Raises an `InvalidRequest` that names `field`."""
    wrong = (
        next((token_id for token_id in (min(ids), max(ids)) if not 0 <= token_id < vocab_size), None) if ids else None
    )
    if wrong is not None:
        raise InvalidRequest(f"{field} must be in [0, {vocab_size}), not {wrong}.", field=field)


def check_embedded(model: ServedDecoder | ServedEncoder, ids: Sequence[int], field: str) -> None:
    """Check that the embedding has a row for every token of a text. Raises an `InvalidRequest` that names `field`.

    Some tokenizers have tokens that their model does not know, such as image tokens.
    """
    largest, rows = max(ids, default=0), model.limits.vocab_size
    if largest >= rows:
        token = model.tokenizer.token_text(largest)[:100]
        raise InvalidRequest(
            f"{field} has the token {token!r} with the id {largest}, which this model does not know: its tokens are those "
            f"below {rows}.",
            field=field,
        )


def _check_priority(limits: ServingLimits, params: SamplingParams) -> None:
    if params.priority and not limits.has_priorities:
        raise UnsupportedParameter(
            "priority must be 0 here: this server computes requests in order of arrival, unless its operator sets "
            "scheduling_policy=priority.",
            field="priority",
        )


def infill_format(model: ServedDecoder) -> InfillFormat:
    """Return the format of prompts with a gap. Raises `UnsupportedParameter` if the model was not trained with them."""
    found = find_infill_format(model.tokenizer)
    if found is None:
        raise UnsupportedParameter(
            f"suffix needs a model with fill-in-the-middle tokens, such as a coder of Qwen; {model.name!r} has none.",
            field="suffix",
        )
    return found


def _infill_ids(model: ServedDecoder, request: GenerationRequest, infill: Infill) -> Sequence[int]:
    """Return the tokens of a prompt with a gap. Long texts are cut to a number of characters first."""
    form, tokenizer, longest = infill_format(model), model.tokenizer, model.limits.max_model_len - 1
    if request.truncate_prompt_tokens is not None:
        raise InvalidRequest("truncate_prompt_tokens cannot be combined with suffix.", field="truncate_prompt_tokens")
    room = longest * _MAX_TOKEN_CHARACTERS if infill.fits else None
    before, after = request.prompt or "", infill.suffix
    wanted = ALL_TOKENS if infill.fits else WantedTokens(longest)
    prompt = InfillPrompt(
        request.token_ids or _text_ids(model, before if room is None else before[-room:], False, wanted, "prompt"),
        _text_ids(model, after[:room], False, wanted, "suffix"),
        [one for name, text in infill.files for one in form.file_ids(tokenizer, name, text[:room])],
    )
    check_ids(request.token_ids or (), model.limits.vocab_size, "token_ids")
    begin = [] if tokenizer.bos_token_id is None or not request.add_special_tokens else tokenizer.encode("")[:1]
    if infill.fits:
        completion = min(longest // 4 if request.params.max_tokens is None else request.params.max_tokens, longest // 2)
        prompt = shorten_infill(prompt, longest - completion - len(form.prompt_ids(InfillPrompt((), ()), begin)))
    return form.prompt_ids(prompt, begin)


def _prompt_ids(
    model: ServedDecoder, request: GenerationRequest, wanted: WantedTokens, pictures: Sequence[ReadPicture]
) -> tuple[str, Sequence[int]]:
    if request.infill is not None:
        return "prompt", _infill_ids(model, request, request.infill)
    if model.source is not None:
        return _source_ids(model, model.source, request, wanted)
    if request.messages is not None:
        arguments, options = request.template_arguments, request.chat_options
        return "messages", chat_token_ids(model, request.messages, arguments, options, wanted, pictures)
    if request.prompt is not None:
        return "prompt", _text_ids(model, request.prompt, request.add_special_tokens, wanted, "prompt")
    ids = request.token_ids or ()
    check_ids(ids, model.limits.vocab_size, "token_ids")
    return "token_ids", ids


def _source_ids(
    model: ServedDecoder, source: SourceText, request: GenerationRequest, wanted: WantedTokens
) -> tuple[str, Sequence[int]]:
    """Return the tokens of a source text: the prompt, or a conversation's last message of the user."""
    if request.token_ids is not None:
        check_ids(request.token_ids, model.limits.vocab_size, "token_ids")
        return "token_ids", request.token_ids
    field, text = "prompt", request.prompt
    if text is None:
        users = [one for one in request.messages or () if one.get("role") == "user"]
        if not users or request.tools is not None:
            said = "the last message of the user is the source, and there is none" if not users else "it calls no tools"
            raise InvalidRequest(f"This model reads a source text: {said}.", field="messages" if not users else "tools")
        field, text = "messages", _content_text(users[-1])
    text = source.prefix(request.task, request.source_lang, request.target_lang) + text
    ids = _text_ids(model, text, request.add_special_tokens or field == "messages", wanted, field)
    return field, source.with_language(ids, request.source_lang)


def _check_languages(model: ServedDecoder, request: GenerationRequest) -> None:
    if model.source is not None:
        model.source.check_languages(request.source_lang, request.target_lang)
        return
    for name in ("source_lang", "target_lang"):
        if getattr(request, name) is not None:
            raise UnsupportedParameter(
                f"{name} needs a model with an encoder that translates; {model.name!r} has none.", field=name
            )


def _wanted_tokens(context: int, request: GenerationRequest) -> WantedTokens:
    """Return which tokens of the prompt are wanted: at most the context without one for the completion."""
    longest, count = context - 1, request.truncate_prompt_tokens
    if count is None:
        return WantedTokens(longest)
    limit = longest if count == -1 else count
    if limit < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or at least 1, not {count}.", field="truncate_prompt_tokens"
        )
    return WantedTokens(limit, truncates=True, keeps_end=not request.truncate_right)


def _check_context_length(model: ServedDecoder, num_prompt: int, request: GenerationRequest, field: str) -> None:
    """Check the context length. The message has the wording that OpenAI clients look for."""
    context = model.context
    limit = f"This model's maximum context length is {context} tokens."
    if num_prompt >= context:
        raise prompt_too_long(context, field, exact=num_prompt)
    max_tokens = request.params.max_tokens
    if model.source is not None:
        longest = min(model.source.max_target_len, model.limits.max_model_len - num_prompt) - 1
        if max_tokens is not None and max_tokens > longest and not request.clips_max_tokens:
            raise ContextLengthExceeded(
                f"This model's completions have at most {longest} tokens, not {max_tokens}. Please reduce max_tokens.",
                field="max_tokens",
            )
        return
    if max_tokens is not None and num_prompt + max_tokens > context and not request.clips_max_tokens:
        detail = f"However, you requested {num_prompt + max_tokens} tokens ({num_prompt} in the {field}, {max_tokens} in the completion)."
        raise ContextLengthExceeded(
            f"{limit} {detail} Please reduce max_tokens or shorten the {field}.", field="max_tokens"
        )
