"""From the texts that a client sent to token ids that fit an encoder: every refusal that needs no engine, and where a text is cut.

Needs the loaded model alone, and runs in the service's small pool unless the texts are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.encoding import EncodingRequest, TextInput
from app.errors import ContextLengthExceeded, InvalidRequest, WrongModelKind
from app.messages import Text
from app.reading import check_ids
from app.served import ServedEncoder

MAX_TEXTS = 2_048  # OpenAI's own
# Hidden states of all tokens are read by people, a few texts at a time; 2,048 long texts would be gigabytes.
MAX_HIDDEN_BYTES = 256 * 2**20
# Another thread begins after 0.1 ms where a core is idle and after milliseconds where all compute; so many characters are 0.3 ms of work.
SHORT_CHARACTERS = 1_000


def check_texts(model: ServedEncoder, request: EncodingRequest) -> None:
    """What can be refused before anything is tokenised. Raises an `InvalidRequest` that names the field."""
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
            raise InvalidRequest(f"{name} is empty: there is nothing to read.", field=name)


def is_short(request: EncodingRequest) -> bool:
    """Whether the texts are worth no thread of their own."""
    return sum(_characters(given) for given in request.inputs) <= SHORT_CHARACTERS


def read_texts(model: ServedEncoder, request: EncodingRequest) -> tuple[Text, ...]:
    """The texts' ids, in order. Raises an `InvalidRequest` that names the field."""
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
        raise InvalidRequest(f"dimensions must lie in [1, {size}] for this model, not {request.dimensions}.", field="dimensions")


def _something(given: TextInput) -> bool:
    if isinstance(given, Text):
        return bool(given.token_ids)
    return bool(given) if isinstance(given, str) else all(given)


def _characters(given: TextInput) -> int:
    """Or ids: to check a million of them takes a while too."""
    if isinstance(given, tuple):
        return len(given[0]) + len(given[1])
    return len(given) if isinstance(given, str) else len(given.token_ids)


def _prompt(model: ServedEncoder, request: EncodingRequest, index: int) -> str:
    """What the checkpoint wants before a text; a pair has nothing before it."""
    prompts = model.config.pooling.prompts
    if not prompts or isinstance(request.inputs[index], tuple):
        return ""
    wanted: Sequence[str | None] = (request.prompt,)
    if request.num_queries:
        wanted = ("query",) if index < request.num_queries else _DOCUMENT_PROMPTS
    name = next((name for name in wanted if name in prompts), model.config.pooling.default_prompt)
    return "" if name is None else prompts[name]


# What checkpoints call it, as sentence-transformers looks for it.
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


def _not_pooled(model: ServedEncoder, prompt: str, text: Text) -> Text:
    """With the number of its prompt's tokens: as sentence-transformers counts them, without the special token that would end it."""
    (alone,) = model.tokenizer.texts([prompt])
    ends = not model.tokenizer.has_text(alone.token_ids[-1])
    return replace(text, num_prompt_tokens=min(len(alone.token_ids) - ends, len(text.token_ids) - 1))


def _own_ids(model: ServedEncoder, request: EncodingRequest, index: int, text: Text) -> Text:
    """A client's own ids, checked and cut."""
    limit, name = model.limits.max_model_len, _name(request, index)
    check_ids(text.token_ids, model.limits.vocab_size, name)
    check_ids(text.type_ids, max(model.config.num_types, 1), "token_type_ids")
    if not request.truncate:
        return text
    kept = slice(-limit, None) if request.keeps_end else slice(limit)
    return Text(text.token_ids[kept], text.type_ids[kept])


def _check_length(model: ServedEncoder, request: EncodingRequest, index: int, text: Text) -> None:
    """In the words that OpenAI's clients look for."""
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
            f"The hidden states of these texts are {num_bytes >> 20} MiB, and an answer has {MAX_HIDDEN_BYTES >> 20} MiB at the most: "
            "send fewer texts at once.",
            field=request.field,
        )


def _name(request: EncodingRequest, index: int) -> str:
    """What the client called the text."""
    if index < request.num_queries:
        return "query"
    return request.field if len(request.inputs) == 1 else f"{request.field}[{index - request.num_queries}]"
