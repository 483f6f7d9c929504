"""Conversion of a client's texts to token ids that fit an encoder: tokenizer, truncation, and validation.

It depends on the loaded model only. It runs in the service's thread pool unless the texts are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.encoding import EncodingRequest, TextInput
from app.errors import ContextLengthExceeded, InvalidRequest, WrongModelKind
from app.messages import Text
from app.reading import check_ids
from app.served import ServedEncoder

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
            raise _wrong_output(model, output)
    _check_dimensions(model, request)
    prompts = model.config.pooling.prompts
    if request.prompt is not None and request.prompt not in prompts:
        known = ", ".join(sorted(prompts)) or "none"
        raise InvalidRequest(f"This checkpoint has no prompt {request.prompt[:100]!r}; it has: {known}.", field="prompt_name")
    for index, given in enumerate(request.inputs):
        if not _something(given):
            name = _name(request, index)
            raise InvalidRequest(f"{name} is empty: send text.", field=name)


def is_short(request: EncodingRequest) -> bool:
    """Return True if the texts are too short to be worth another thread."""
    return sum(_characters(given) for given in request.inputs) <= SHORT_CHARACTERS


def read_texts(model: ServedEncoder, request: EncodingRequest) -> tuple[Text, ...]:
    """Return the tokenized texts, in order. Raises an `InvalidRequest` that names the field."""
    written = {
        index: (_prompt(model, request, index), given)
        for index, given in enumerate(request.inputs)
        if not isinstance(given, Text)
    }
    behind = [prompt + given if isinstance(given, str) else given for prompt, given in written.values()]
    cut_at = model.limits.max_model_len if request.truncate else None
    texts = dict(zip(written, model.tokenizer.texts(behind, cut_at, request.keeps_end), strict=True))
    for index, given in enumerate(request.inputs):
        if isinstance(given, Text):
            texts[index] = _own_ids(model, request, index, given)
        _check_length(model, request, index, texts[index])
    if model.config.pooling.skips_prompt:
        texts |= {index: _not_pooled(model, prompt, texts[index]) for index, (prompt, _) in written.items() if prompt}
    in_order = tuple(texts[index] for index in range(len(texts)))
    _check_hidden(model, request, in_order)
    return in_order


def _wrong_output(model: ServedEncoder, output: str) -> WrongModelKind:
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
        raise InvalidRequest(f"dimensions must be in [1, {size}] for this model, not {request.dimensions}.", field="dimensions")


def _something(given: TextInput) -> bool:
    if isinstance(given, Text):
        return bool(given.token_ids)
    return bool(given) if isinstance(given, str) else all(given)


def _characters(given: TextInput) -> int:
    """Return the number of characters, or of token ids: checking a million ids takes time too."""
    if isinstance(given, tuple):
        return len(given[0]) + len(given[1])
    return len(given) if isinstance(given, str) else len(given.token_ids)


def _prompt(model: ServedEncoder, request: EncodingRequest, index: int) -> str:
    """Return the checkpoint's prompt for a text. A pair has none."""
    prompts = model.config.pooling.prompts
    if not prompts or isinstance(request.inputs[index], tuple):
        return ""
    wanted: Sequence[str | None] = (request.prompt,)
    if request.num_queries:
        wanted = ("query",) if index < request.num_queries else _DOCUMENT_PROMPTS
    name = next((name for name in wanted if name in prompts), model.config.pooling.default_prompt)
    return "" if name is None else prompts[name]


# Names of a document prompt in checkpoints, in the order in which sentence-transformers looks for them.
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


def _not_pooled(model: ServedEncoder, prompt: str, text: Text) -> Text:
    """Return the text with the number of its prompt's tokens, which pooling skips.

    They are counted as in sentence-transformers: tokens of the prompt alone, without a special token at its end.
    """
    (alone,) = model.tokenizer.texts([prompt])
    ends = not model.tokenizer.has_text(alone.token_ids[-1])
    return replace(text, num_prompt_tokens=min(len(alone.token_ids) - ends, len(text.token_ids) - 1))


def _own_ids(model: ServedEncoder, request: EncodingRequest, index: int, text: Text) -> Text:
    """Return token ids that the client sent, checked and truncated."""
    limit, name = model.limits.max_model_len, _name(request, index)
    check_ids(text.token_ids, model.limits.vocab_size, name)
    check_ids(text.type_ids, max(model.config.num_types, 1), "token_type_ids")
    if not request.truncate:
        return text
    kept = slice(-limit, None) if request.keeps_end else slice(limit)
    return Text(text.token_ids[kept], text.type_ids[kept])


def _check_length(model: ServedEncoder, request: EncodingRequest, index: int, text: Text) -> None:
    """Check the length of a text. The message has the wording that OpenAI clients look for."""
    limit, number = model.limits.max_model_len, len(text.token_ids)
    if number > limit:
        name = _name(request, index)
        sentence = (
            f"This model's maximum context length is {limit} tokens. However, {name} has {number} tokens. Please shorten it"
        )
        raise ContextLengthExceeded(f"{sentence}, or ask for it to be truncated where the route offers that.", field=name)


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


def _name(request: EncodingRequest, index: int) -> str:
    """Return the client's name for the text."""
    if index < request.num_queries:
        return "query"
    return request.field if len(request.inputs) == 1 else f"{request.field}[{index - request.num_queries}]"
