"""Conversion of a client's prompt or texts to token ids that fit the model.

For a decoder: chat template, tokenizer, and validation. For an encoder: tokenizer, truncation, and validation. Both
depend on the loaded model only. They run in the service's thread pool, except for short texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.errors import ContextLengthExceeded, InvalidRequest, TemplateStopped, UnsupportedParameter, WrongModelKind
from app.messages import SamplingParams, Text
from app.service.requests import EncodingRequest, GenerationRequest, Infill, TextInput
from app.service.served_model import ServedDecoder, ServedEncoder, ServedModel, ServingLimits
from app.text.bounds import CHUNK_CHARACTERS, EncodingLimits
from app.text.chat import ChatOptions
from app.text.infill import InfillFormat, InfillPrompt, find_infill_format, shorten_infill


def tokenize_prompt(model: ServedDecoder, request: GenerationRequest) -> tuple[int, ...]:
    """Return the prompt's token ids. Raises an `InvalidRequest` that names the field."""
    _check_priority(model.limits, request.params)
    wanted = _wanted_tokens(model.limits.max_model_len, request)
    field, ids = _prompt_ids(model, request, wanted)
    if wanted.truncates and wanted.number is not None:
        ids = ids[-wanted.number :] if wanted.keeps_end else ids[: wanted.number]
    if not ids:
        raise InvalidRequest(f"{field} has no tokens: there is nothing to continue.", field=field)
    _check_context_length(model.limits.max_model_len, len(ids), request, field)
    check_embedded(model, ids, field)
    params, vocab_size = request.params, model.limits.vocab_size
    check_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    check_ids(params.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    check_ids([token_id for token_id, _ in params.logit_bias], vocab_size, "logit_bias")
    check_ids(params.logprob_token_ids, vocab_size, "logprob_token_ids")
    return tuple(ids)


def prompt_size(request: GenerationRequest) -> int:
    """Return the length of the prompt in characters or token ids, as a measure of the time to read it."""
    if request.messages is not None:
        return messages_size(request.messages)
    length = len(request.token_ids or ()) if request.prompt is None else len(request.prompt)
    infill = request.infill
    return length if infill is None else length + len(infill.suffix) + sum(len(text) for _, text in infill.files)


def messages_size(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the length of the messages in characters."""
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
) -> list[int]:
    """Return a conversation's token ids.

    The template writes all special tokens, so none are added, as in transformers.
    """
    try:
        text = render_chat(model, messages, arguments, options)
    except TemplateStopped:
        if wanted.number is not None and not wanted.truncates:
            # The number of tokens tells the client more, if it is the reason.
            least = model.tokenizer.least_tokens("".join(map(_content_text, messages)), wanted.number)
            if least > wanted.number:
                raise prompt_too_long(model.limits.max_model_len, "messages", least) from None
        raise
    return _text_ids(model, text, False, wanted, "messages")


def render_chat(
    model: ServedDecoder,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    options: ChatOptions | None = None,
) -> str:
    """Return a conversation as the text that the chat template makes of it."""
    if model.chat is None:
        raise InvalidRequest(
            "This model has no chat template: send a prompt to the completions route instead, or start the server with "
            "--chat-template FILE.",
            field="messages",
        )
    return model.chat.render(messages, arguments, options, model.tool_format)


def _text_ids(model: ServedDecoder, text: str, add_special_tokens: bool, wanted: WantedTokens, field: str) -> list[int]:
    """Return a text's token ids.

    A text that certainly has more than may be is refused before it is tokenized. The tokenization of a long text ends
    soon after the wanted number.
    """
    limits = EncodingLimits(model.limits.max_text_bytes)
    if wanted.truncates:
        limits = replace(limits, enough_tokens=wanted.number, keeps_end=wanted.keeps_end)
    elif wanted.number is not None and len(text) > CHUNK_CHARACTERS:
        least = model.tokenizer.least_tokens(text, wanted.number)
        if least > wanted.number:
            raise prompt_too_long(model.limits.max_model_len, field, least)
        limits = replace(limits, enough_tokens=wanted.number + 1)
    return model.tokenizer.encode(text, add_special_tokens, limits)


def prompt_too_long(context: int, field: str, least: int | None = None, exact: int = 0) -> ContextLengthExceeded:
    """Return the error of a prompt that has `exact` tokens, or at least `least`: a long one is not counted to its end."""
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

    Some tokenizers have tokens that their model does not know, such as those of images.
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


_MAX_TOKEN_CHARACTERS = 64  # few tokens have more, on average over a text


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
    """Return the tokens of a prompt with a gap.

    Texts that may be shortened are cut to a number of characters first: few tokens have more of them.
    """
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


def _prompt_ids(model: ServedDecoder, request: GenerationRequest, wanted: WantedTokens) -> tuple[str, Sequence[int]]:
    if request.infill is not None:
        return "prompt", _infill_ids(model, request, request.infill)
    if request.messages is not None:
        arguments, options = request.template_arguments, request.chat_options
        return "messages", chat_token_ids(model, request.messages, arguments, options, wanted)
    if request.prompt is not None:
        return "prompt", _text_ids(model, request.prompt, request.add_special_tokens, wanted, "prompt")
    ids = request.token_ids or ()
    check_ids(ids, model.limits.vocab_size, "token_ids")
    return "token_ids", ids


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


def _check_context_length(context: int, num_prompt: int, request: GenerationRequest, field: str) -> None:
    """Check the context length. The message has the wording that OpenAI clients look for."""
    limit = f"This model's maximum context length is {context} tokens."
    if num_prompt >= context:
        raise prompt_too_long(context, field, exact=num_prompt)
    max_tokens = request.params.max_tokens
    if max_tokens is not None and num_prompt + max_tokens > context and not request.clips_max_tokens:
        detail = f"However, you requested {num_prompt + max_tokens} tokens ({num_prompt} in the {field}, {max_tokens} in the completion)."
        raise ContextLengthExceeded(
            f"{limit} {detail} Please reduce max_tokens or shorten the {field}.", field="max_tokens"
        )


MAX_TEXTS = 2_048  # OpenAI's limit
# Hidden states of all tokens are requested for a few texts at a time; those of 2,048 long texts would be gigabytes.
MAX_HIDDEN_BYTES = 256 * 2**20
# A pool thread starts after 0.1 ms if a core is idle, and after milliseconds if all cores compute. Tokenizing this
# number of characters takes 0.3 ms.
SHORT_CHARACTERS = 1_000


def check_texts(model: ServedEncoder, request: EncodingRequest) -> None:
    """Check what can be checked before tokenization. Raises an `InvalidRequest` that names the field."""
    field, number = request.field, len(request.inputs)
    if not 1 <= number <= MAX_TEXTS:
        raise InvalidRequest(f"{field} takes 1 to {MAX_TEXTS} texts, not {number}.", field=field)
    for output in request.outputs:
        if output not in model.sizes:
            raise _output_kind_error(model, output)
    _check_dimensions(model, request)
    _check_truncation(model, request.truncation.max_tokens)
    if request.prompt is not None:
        named_prompt(model, request.prompt)
    for index, given in enumerate(request.inputs):
        is_document = 0 < request.num_queries <= index
        if not (is_document or _is_not_empty(given)):
            name = _field_name(request, index)
            raise InvalidRequest(f"{name} is empty: send text.", field=name)


def _check_truncation(model: ServedEncoder, max_tokens: int) -> None:
    limit = model.limits.max_model_len
    if max_tokens != -1 and not 1 <= max_tokens <= limit:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or in [1, {limit}] for this model, not {max_tokens}.",
            field="truncate_prompt_tokens",
        )


def named_prompt(model: ServedModel, name: str) -> str:
    """Return one of the checkpoint's prompts. Raises `InvalidRequest` if it has none of this name."""
    prompts = model.config.pooling.prompts if isinstance(model, ServedEncoder) else {}
    if name not in prompts:
        known = ", ".join(sorted(prompts)) or "none"
        raise InvalidRequest(f"This checkpoint has no prompt {name[:100]!r}; it has: {known}.", field="prompt_name")
    return prompts[name]


def is_short(request: EncodingRequest) -> bool:
    """Return True if the texts are too short to be worth another thread."""
    return texts_size(request) <= SHORT_CHARACTERS


def texts_size(request: EncodingRequest) -> int:
    """Return the length of all texts in characters or token ids."""
    return sum(_num_characters(given) for given in request.inputs)


def tokenize_texts(model: ServedEncoder, request: EncodingRequest) -> tuple[Text, ...]:
    """Return the tokenized texts, in order. Raises an `InvalidRequest` that names the field."""
    prompted = {
        index: (_checkpoint_prompt(model, request, index), given)
        for index, given in enumerate(request.inputs)
        if not isinstance(given, Text)
    }
    longest, truncation = _max_tokens(model, request), request.truncation
    limits = EncodingLimits(model.limits.max_text_bytes)
    full_texts = [
        _with_prompt(prompt, _cut_parts(model, request, index, given, limits))
        for index, (prompt, given) in prompted.items()
    ]
    if not truncation.truncates:
        for index, text in zip(prompted, full_texts, strict=True):
            if _num_characters(text) > CHUNK_CHARACTERS:
                _check_least_tokens(model, request, index, text)
        limits = replace(limits, enough_tokens=longest + 1)
    max_length = longest if truncation.truncates else None
    tokenized = model.tokenizer.encode_texts(full_texts, max_length, truncation.left, limits)
    texts = dict(zip(prompted, tokenized, strict=True))
    for index, given in enumerate(request.inputs):
        if isinstance(given, Text):
            texts[index] = _checked_ids(model, request, index, given)
        else:
            check_embedded(model, texts[index].token_ids, _field_name(request, index))
        _check_text_length(model, request, index, texts[index])
    if model.config.pooling.skips_prompt:
        texts |= {
            index: _with_prompt_length(model, prompt, texts[index]) for index, (prompt, _) in prompted.items() if prompt
        }
    in_order = tuple(texts[index] for index in range(len(texts)))
    _check_hidden(model, request, in_order)
    return in_order


def _max_tokens(model: ServedEncoder, request: EncodingRequest) -> int:
    """Return the most tokens that a text may have, or to which it is cut."""
    asked = request.truncation.max_tokens
    return model.limits.max_model_len if asked == -1 else asked


def _with_prompt(prompt: str, given: str | tuple[str, str]) -> str | tuple[str, str]:
    """Put a prompt before a text, or before the first text of a pair."""
    return prompt + given if isinstance(given, str) else (prompt + given[0], given[1])


def _cut_parts(
    model: ServedEncoder,
    request: EncodingRequest,
    index: int,
    given: str | tuple[str, str],
    limits: EncodingLimits,
) -> str | tuple[str, str]:
    """Return a query, a document or a pair of both, each cut to the most tokens that the request gives it."""
    cut, tokenizer = request.truncation, model.tokenizer
    if isinstance(given, tuple):
        query, document = given
        return (
            tokenizer.first_tokens(query, cut.max_query_tokens, limits),
            tokenizer.first_tokens(document, cut.max_document_tokens, limits),
        )
    most = cut.max_query_tokens if index < request.num_queries else cut.max_document_tokens
    return tokenizer.first_tokens(given, most, limits)


def _output_kind_error(model: ServedEncoder, output: str) -> WrongModelKind:
    if output == "logits":
        return WrongModelKind(
            f"{model.name!r} makes vectors and has no classification head: use /v1/embeddings, /v1/rerank or /embed, "
            "or serve a classifier or a cross-encoder.",
            field="model",
        )
    return WrongModelKind(
        f"{model.name!r} scores texts with a classification head and makes no embeddings: use /v1/classify, or /v1/rerank where it "
        "has one label; or serve an embedding model.",
        field="model",
    )


def _check_dimensions(model: ServedEncoder, request: EncodingRequest) -> None:
    if request.dimensions is None:
        return
    size = model.sizes.get("embedding", 0)
    if not 1 <= request.dimensions <= size:
        raise InvalidRequest(
            f"dimensions must be in [1, {size}] for this model, not {request.dimensions}.", field="dimensions"
        )


def _is_not_empty(given: TextInput) -> bool:
    if isinstance(given, Text):
        return bool(given.token_ids)
    return bool(given) if isinstance(given, str) else any(given)


def _num_characters(given: TextInput) -> int:
    """Return the number of characters, or of token ids: checking a million ids takes time too."""
    if isinstance(given, tuple):
        return len(given[0]) + len(given[1])
    return len(given) if isinstance(given, str) else len(given.token_ids)


def _checkpoint_prompt(model: ServedEncoder, request: EncodingRequest, index: int) -> str:
    """Return the checkpoint's prompt for a text, or for the first of a pair."""
    prompts = model.config.pooling.prompts
    if not prompts:
        return ""
    names: Sequence[str | None] = (request.prompt,)
    if request.num_queries:
        names = ("query",) if index < request.num_queries else _DOCUMENT_PROMPTS
    name = next((name for name in names if name in prompts), model.config.pooling.default_prompt)
    return "" if name is None else prompts[name]


# Names of a document prompt in checkpoints, in the order in which sentence-transformers looks for them.
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


def _with_prompt_length(model: ServedEncoder, prompt: str, text: Text) -> Text:
    """Return the text with the number of its prompt's tokens, which pooling skips.

    They are counted as in sentence-transformers: tokens of the prompt alone, without a special token at its end.
    """
    (alone,) = model.tokenizer.encode_texts([prompt])
    ends = bool(alone.token_ids) and not model.tokenizer.has_text(alone.token_ids[-1])
    return replace(text, num_prompt_tokens=min(len(alone.token_ids) - ends, len(text.token_ids) - 1))


def _checked_ids(model: ServedEncoder, request: EncodingRequest, index: int, text: Text) -> Text:
    """Return token ids that the client sent, checked and truncated."""
    limit, name = _max_tokens(model, request), _field_name(request, index)
    check_ids(text.token_ids, model.limits.vocab_size, name)
    check_ids(text.type_ids, max(model.config.num_types, 1), "token_type_ids")
    if not request.truncation.truncates:
        return text
    window = slice(-limit, None) if request.truncation.left else slice(limit)
    return Text(text.token_ids[window], text.type_ids[window])


def _check_least_tokens(model: ServedEncoder, request: EncodingRequest, index: int, given: TextInput) -> None:
    """Refuse a text or a pair that is certainly too long, before it is tokenized."""
    limit, parts = model.limits.max_model_len, given if isinstance(given, tuple) else (given,)
    least = sum(model.tokenizer.least_tokens(part, limit) for part in parts if isinstance(part, str))
    if least > limit:
        raise _text_too_long(model, request, index, f"at least {least}")


def _check_text_length(model: ServedEncoder, request: EncodingRequest, index: int, text: Text) -> None:
    """Check the length of a text, which was not counted to its end if it is long."""
    number, name = len(text.token_ids), _field_name(request, index)
    if number == 0:
        raise InvalidRequest(f"{name} has no tokens: the tokenizer of this model finds nothing in it.", field=name)
    if request.truncation.truncates and number > _max_tokens(model, request):
        raise InvalidRequest(
            f"{name} cannot be cut to {request.truncation.max_tokens} tokens: the model's special tokens alone are {number}.",
            field="truncate_prompt_tokens",
        )
    if number > model.limits.max_model_len:
        given = request.inputs[index]
        counted = isinstance(given, Text) or _num_characters(given) <= CHUNK_CHARACTERS
        raise _text_too_long(model, request, index, str(number) if counted else f"at least {number}")


def _text_too_long(model: ServedEncoder, request: EncodingRequest, index: int, number: str) -> ContextLengthExceeded:
    """Return the error of a text that is too long. The message has the wording that OpenAI clients look for."""
    limit, name = model.limits.max_model_len, _field_name(request, index)
    sentence = (
        f"This model's maximum context length is {limit} tokens. However, {name} has {number} tokens. Please shorten it"
    )
    return ContextLengthExceeded(f"{sentence}, or ask for it to be truncated where the route offers that.", field=name)


def _check_hidden(model: ServedEncoder, request: EncodingRequest, texts: Sequence[Text]) -> None:
    if "last_hidden_state" not in request.outputs:
        return
    num_bytes = 4 * model.sizes["last_hidden_state"] * sum(len(text.token_ids) for text in texts)
    if num_bytes > MAX_HIDDEN_BYTES:
        raise InvalidRequest(
            f"The hidden states of these texts are {num_bytes >> 20} MiB, and the limit is {MAX_HIDDEN_BYTES >> 20} MiB: "
            "send fewer texts at once.",
            field=request.field,
        )


def _field_name(request: EncodingRequest, index: int) -> str:
    """Return the client's name for the text."""
    if index < request.num_queries:
        return request.query_field if request.num_queries == 1 else f"{request.query_field}[{index}]"
    return request.field if len(request.inputs) == 1 else f"{request.field}[{index - request.num_queries}]"
