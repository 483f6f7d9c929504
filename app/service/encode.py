"""Requests to encoders and exported programs, from their texts or tensors to the arrays returned, all at once."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence
from dataclasses import replace

from app.errors import ContextLengthExceeded, InvalidRequest, RequestError, RequestTimeout, WrongModelKind
from app.messages import ArraysReady, Encode, Infer, RunTask, Signature, Text
from app.service.engine_client import OpenRequest
from app.service.program_pictures import picture_rows
from app.service.prompt import SHORT_CHARACTERS, check_embedded, check_ids
from app.service.requests import (
    Encoded,
    EncodingRequest,
    InferenceRequest,
    Inferred,
    TaskRequest,
    TaskResult,
    TextInput,
)
from app.service.served_model import ServedEncoder, ServedModel, ServedProgram, ServedTasks
from app.text.bounds import CHUNK_CHARACTERS, EncodingLimits

MAX_TEXTS = 2_048  # OpenAI's limit
# Hidden states of all tokens are requested for a few texts at a time; those of 2,048 long texts would be gigabytes.
MAX_HIDDEN_BYTES = 256 * 2**20
_HELD_PER_BYTE = 4  # of a task's inputs: as they arrived, and what is read from them
TOKEN_BYTES = 36  # a token id in a tuple: a pointer and an int object
# Bytes of a value by datatype; all others have 4.
VALUE_BYTES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "INT16": 2, "FP16": 2, "BF16": 2, "INT64": 8, "FP64": 8}
# Names of a document prompt in checkpoints, in the order in which sentence-transformers looks for them.
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


async def encode(opened: OpenRequest, model: ServedEncoder, request: EncodingRequest) -> Encoded:
    """Return the arrays of texts. Short ones are tokenized on the event loop: a thread's round trip takes longer."""
    check_texts(model, request)
    opened.admit()
    client, size = opened.client, texts_size(request)
    if size <= SHORT_CHARACTERS:
        texts, size = tokenize_texts(model, request), 0
    else:
        texts = await client.read(size, tokenize_texts, model, request)
    lengths = tuple(len(text.token_ids) for text in texts)
    opened.num_prompt_tokens = sum(lengths)
    await opened.reserve(opened.num_prompt_tokens)
    opened.hold(size + _text_request_bytes(model, request.outputs, lengths))
    request_id = client.unique_id(request.request_id)
    command = Encode(request_id, texts, request.outputs, opened.arrived_at, request.normalize, request.dimensions)
    ready = await _send_and_wait(opened, command, opened.num_prompt_tokens)
    client.metrics.vectors_returned(len(texts), opened.num_prompt_tokens, ready.timings, opened.exemplar)
    return Encoded(ready.arrays, ready.timings, lengths)


async def infer(opened: OpenRequest, program: ServedProgram, request: InferenceRequest) -> Inferred:
    """Return the arrays of a program, with rows of the batch counted as an encoder's tokens are.

    Raises `InvalidRequest` if the program was not exported for these sizes.
    """
    client = opened.client
    if request.pictures:
        opened.admit()
        given = dict(request.inputs)
        for name, files in request.pictures.items():
            size = sum(map(len, files))
            given[name] = await client.read(size, picture_rows, program.description.pictures[name], files)
        request = replace(request, inputs=given)
    if program.sizes is not None:
        program.sizes.check({name: array.shape for name, array in request.inputs.items()})
    num_rows = request.inputs[program.signature.inputs[0].name].shape[0]
    opened.http.rows += num_rows
    if not request.pictures:
        opened.admit()
    opened.hold(_program_request_bytes(program.signature, request, num_rows))
    command = Infer(client.unique_id(request.request_id), request.inputs, request.outputs, opened.arrived_at)
    ready = await _send_and_wait(opened, command, num_rows)
    client.metrics.vectors_returned(num_rows, 0, ready.timings, opened.exemplar)
    return Inferred(ready.arrays, ready.timings)


async def run_task(opened: OpenRequest, model: ServedTasks, request: TaskRequest) -> TaskResult:
    """Return the result of a task. The engine reads the inputs, since the library's readers belong to its model."""
    if request.task not in model.tasks:
        raise WrongModelKind(
            f"{model.name!r} does not do {request.task[:100]!r}; it does {', '.join(model.tasks)}.", field="task"
        )
    opened.admit()
    opened.hold(_HELD_PER_BYTE * request.size)
    client = opened.client
    command = RunTask(
        client.unique_id(request.request_id),
        request.task,
        request.inputs,
        request.parameters,
        opened.arrived_at,
        request.files,
        request.is_batch,
    )
    ready = await _send_and_wait(opened, command, model.expected_tokens(request.size))
    opened.num_prompt_tokens = ready.num_tokens
    client.metrics.vectors_returned(1, ready.num_tokens, ready.timings, opened.exemplar)
    if (audio := ready.arrays.get("audio_seconds")) is not None:
        client.metrics.speech_recognized(struct.unpack("<d", audio.data)[0], client.clock() - opened.arrived_at)
    return TaskResult(ready.arrays["result"].data, ready.timings, ready.num_tokens)


async def _send_and_wait(opened: OpenRequest, command: Encode | Infer | RunTask, size: int) -> ArraysReady:
    opened.send(command, size)
    try:
        timed_event = await opened.next_event()
    except RequestError:  # the worker's single event: it has nothing left to abort
        opened.is_over = True
        raise
    if timed_event is None:
        raise RequestTimeout("The request timed out before its result was ready.")
    event, now = timed_event
    assert isinstance(event, ArraysReady), "an Encode, Infer or RunTask is answered by ArraysReady"
    opened.note_first_result(event.timings, now)
    opened.is_over, opened.outcome = True, "stop"
    return event


def _text_request_bytes(model: ServedEncoder, outputs: Collection[str], lengths: Sequence[int]) -> int:
    """Return the bytes of token ids as Python integers and of the outputs.

    Each output has one FP32 row per text, or per token for `last_hidden_state`.
    """
    rows = {name: sum(lengths) if name == "last_hidden_state" else len(lengths) for name in outputs}
    return TOKEN_BYTES * sum(lengths) + sum(4 * model.sizes[name] * number for name, number in rows.items())


def _program_request_bytes(signature: Signature, request: InferenceRequest, num_rows: int) -> int:
    """Return the bytes of inputs and outputs. A free output dimension is assumed to be the largest input dimension."""
    free = max((size for array in request.inputs.values() for size in array.shape[1:]), default=1)
    rows = (
        math.prod(free if size < 0 else size for size in spec.shape[1:]) * VALUE_BYTES.get(spec.datatype, 4)
        for spec in signature.outputs
        if spec.name in request.outputs
    )
    return sum(len(array.data) for array in request.inputs.values()) + num_rows * sum(rows)


# ---- texts ---------------------------------------------------------------------------------------------------------


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
    asked = request.truncation.max_tokens
    return model.limits.max_model_len if asked == -1 else asked


def _with_prompt(prompt: str, given: str | tuple[str, str]) -> str | tuple[str, str]:
    return prompt + given if isinstance(given, str) else (prompt + given[0], given[1])


def _cut_parts(
    model: ServedEncoder,
    request: EncodingRequest,
    index: int,
    given: str | tuple[str, str],
    limits: EncodingLimits,
) -> str | tuple[str, str]:
    """Cut a query, a document or both to the most tokens that the request gives each."""
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
    """Count characters, or token ids: checking a million ids takes time too."""
    if isinstance(given, tuple):
        return len(given[0]) + len(given[1])
    return len(given) if isinstance(given, str) else len(given.token_ids)


def _checkpoint_prompt(model: ServedEncoder, request: EncodingRequest, index: int) -> str:
    prompts = model.config.pooling.prompts
    if not prompts:
        return ""
    names: Sequence[str | None] = (request.prompt,)
    if request.num_queries:
        names = ("query",) if index < request.num_queries else _DOCUMENT_PROMPTS
    name = next((name for name in names if name in prompts), model.config.pooling.default_prompt)
    return "" if name is None else prompts[name]


def _with_prompt_length(model: ServedEncoder, prompt: str, text: Text) -> Text:
    """Return the text with the number of its prompt's tokens, which pooling skips.

    They are counted as in sentence-transformers: tokens of the prompt alone, without a special token at its end.
    """
    (alone,) = model.tokenizer.encode_texts([prompt])
    ends = bool(alone.token_ids) and not model.tokenizer.has_text(alone.token_ids[-1])
    return replace(text, num_prompt_tokens=min(len(alone.token_ids) - ends, len(text.token_ids) - 1))


def _checked_ids(model: ServedEncoder, request: EncodingRequest, index: int, text: Text) -> Text:
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
    if index < request.num_queries:
        return request.query_field if request.num_queries == 1 else f"{request.query_field}[{index}]"
    return request.field if len(request.inputs) == 1 else f"{request.field}[{index - request.num_queries}]"
