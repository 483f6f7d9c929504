"""Routes of tasks in the form of Hugging Face's inference API, as its client `InferenceClient` calls them.

The task is in the path, or it is the model's own. A native encoder does what its own routes do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal, cast

from starlette.responses import Response

from app.api.encoders import routes as encoders
from app.api.encoders.schemas import TEI_ERRORS, TeiEmbedBody
from app.api.openai.schemas import OPENAI_ERRORS
from app.api.routing import BODY_ERRORS, ApiCall, Dialect, Route, check_model, count_refusals, sampling_defaults
from app.api.schemas import SamplingFields
from app.api.streaming import CollectedCompletion, EventEncoding, Generation, GenerationStream, server_timing
from app.api.tasks.requests import FILE_TASKS, check_task, file_request, read_task
from app.api.tasks.schemas import SourceAnswer, SourceBody, SourceGeneration, SourceParameters, TaskAnswer, TaskBody
from app.errors import WrongModelKind
from app.service.requests import GenerationRequest, TaskRequest
from app.service.served_model import ServedDecoder, ServedEncoder, ServedModel, ServedTasks, wrong_kind_error

HUGGING_FACE = Dialect("Hugging Face", TEI_ERRORS)
MODELS = Dialect("Hugging Face", OPENAI_ERRORS)  # errors of its paths have OpenAI's format otherwise
ROOT = Dialect("text-embeddings-inference")  # errors of its path have the native format otherwise
_TASK_ROUTE: Mapping[str, Any] = {
    "body": TaskBody,
    "response": TaskAnswer | list[TaskAnswer] | list[list[TaskAnswer]] | list[list[float]],
    "statuses": (*BODY_ERRORS, 404, 504),
    "operation": "",
}
# Content types of files. A browser asks before its scripts may send them.
_FILES = ("image/", "audio/", "video/", "application/octet-stream")
# What a native encoder does: its route, and True if it needs labels, False if it needs vectors.
_NATIVE: Mapping[str, tuple[Route, bool]] = {
    "feature-extraction": (encoders.embed, False),
    "sentence-similarity": (encoders.similarity, False),
    "text-classification": (encoders.predict, True),
}


@HUGGING_FACE.post(
    "/pipeline/{task}", "Hugging Face: a task that the model does, such as token-classification", **_TASK_ROUTE
)
async def run_task(call: ApiCall) -> Response:
    """Do the task in the path, or else the model's own."""
    await call.choose_errors()
    name = call.request.path_params.get("name")
    if name is not None:
        check_model(call.runtime, name, in_path=True)
    return await _respond(call, call.request.path_params.get("task"))


# Tasks of models with an encoder that generate text, and the field of their result.
GENERATED: Mapping[str, Literal["summary_text", "translation_text", "generated_text"]] = {
    "summarization": "summary_text",
    "translation": "translation_text",
    "text2text-generation": "generated_text",
}


@HUGGING_FACE.generates(
    tuple(f"/pipeline/{task}" for task in GENERATED),
    "Hugging Face: a translation or a summary",
    operation="text_completion",
    prompts=("inputs",),
    encoding=EventEncoding(TEI_ERRORS),
    event=None,
)
async def generate(call: ApiCall, body: SourceBody, name: str) -> Generation[list[SourceAnswer], SourceAnswer]:
    """Translate or summarize texts with a model that has an encoder."""
    model, parameters = call.service.decoder, body.parameters or SourceParameters()
    if model.source is None:
        raise WrongModelKind(f"{model.name!r} has no encoder: send the text with an instruction as a chat.", "model")
    asked = parameters.generate_parameters or SourceGeneration()
    params = SamplingFields().params(
        sampling_defaults(call.runtime),
        max_tokens=asked.max_new_tokens,
        beam_width=asked.num_beams,
        length_penalty=asked.length_penalty,
        temperature=asked.temperature,
    )
    task = call.request.path_params.get("task") or call.request.url.path.rpartition("/")[2]
    texts = (body.inputs,) if isinstance(body.inputs, str) else body.inputs
    requests = [
        GenerationRequest(
            params=params,
            api=call.route.api,
            request_id=call.id,
            prompt=text,
            task=task if task in GENERATED else None,
            source_lang=parameters.src_lang,
            target_lang=parameters.tgt_lang,
        )
        for text in texts
    ]
    return Generation(requests, _SourceFormat(task), streams=False)


class _SourceFormat:
    def __init__(self, task: str) -> None:
        self._fields = (GENERATED[task],) if task in GENERATED else tuple(GENERATED.values())

    async def events(self, stream: GenerationStream) -> AsyncIterator[SourceAnswer]:
        raise AssertionError("these routes have no streams")
        yield

    def whole(self, completion: CollectedCompletion) -> list[SourceAnswer]:
        return [cast(SourceAnswer, dict.fromkeys(self._fields, choice.text)) for choice in completion.choices]


MODELS.post(
    ("/models/{name:path}/pipeline/{task}", "/models/{name:path}"),
    "Hugging Face: a task of the model in the path",
    other_errors=TEI_ERRORS,
    **_TASK_ROUTE,
)(run_task.serve)


@ROOT.post(
    "/",
    "Hugging Face and text-embeddings-inference: what the model does, for its embeddings, labels or tasks",
    other_errors=TEI_ERRORS,
    **{**_TASK_ROUTE, "body": TeiEmbedBody},
)
async def run_own_task(call: ApiCall) -> Response:
    """Embed, classify, or do the model's own task."""
    await call.choose_errors()
    return await _respond(call, None)


async def _respond(call: ApiCall, task: str | None) -> Response:
    with count_refusals(call.runtime.metrics, "tasks"):
        model = call.service.model
        if isinstance(model, ServedTasks):
            chosen = task or await _own_task(call, model)
            request = await _task_request(call, model, chosen)
        elif not isinstance(model, ServedEncoder) and not _generates(model, task):
            raise wrong_kind_error(model)
    if isinstance(model, ServedDecoder):
        return await call.forward(generate)
    if isinstance(model, ServedEncoder):
        return await call.forward(await _native_route(call, model, task))
    result = await call.service.run_task(request)
    headers = {**server_timing([result.timings], "queue", "encode"), "x-compute-tokens": str(result.num_tokens)}
    content = result.content
    if chosen == "text-classification" and not request.is_batch:
        content = b"[%b]" % content  # as the API has it: a list for each text
    return Response(content, media_type="application/json", headers=headers)


def _generates(model: ServedModel, task: str | None) -> bool:
    return isinstance(model, ServedDecoder) and model.source is not None and (task is None or task in GENERATED)


async def _own_task(call: ApiCall, model: ServedTasks) -> str:
    """Return the task of a body that does not name one."""
    wanted = "zero-shot-" if await call.has_field("candidate_labels") else ""
    return next((name for name in model.tasks if name.startswith(wanted)), model.tasks[0])


async def _task_request(call: ApiCall, model: ServedTasks, task: str) -> TaskRequest:
    check_task(model, task)
    kind = call.request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_file = kind.startswith(_FILES) or (not kind and "origin" not in call.request.headers)
    if task in FILE_TASKS and is_file:
        return file_request(model, task, bytes(await call.read()), call.id)
    call.check_json()
    request, name = await call.translate(
        lambda content: read_task(model, task, content, "tasks", call.id, call.report_ignored)
    )
    if name is not None:
        check_model(call.runtime, name)
    return request


async def _native_route(call: ApiCall, model: ServedEncoder, task: str | None) -> Route:
    """Return the route of a native encoder that does the task. Raises `WrongModelKind` if it has none."""
    if task is None and await call.has_field("source_sentence"):
        task = "sentence-similarity"
    has_labels = bool(model.labels)
    own = "text-classification" if has_labels else "feature-extraction"
    route, needs_labels = _NATIVE.get(task or own, (None, False))
    if route is None or needs_labels != has_labels:
        known = ", ".join(name for name, (_, labels) in _NATIVE.items() if labels == has_labels)
        reason = f"{model.name!r} does not do {str(task)[:100]!r} with this package's own engine; it does {known}."
        raise WrongModelKind(f"{reason} Serving it with --engine transformers may do more.", "task")
    return route
