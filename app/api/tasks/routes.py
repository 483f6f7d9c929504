"""Routes of tasks in the form of Hugging Face's inference API, as its client `InferenceClient` calls them.

The task is in the path, or it is the model's own. A native encoder does what its own routes do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from app.api.encoders import routes as encoders
from app.api.encoders.schemas import TEI_ERRORS, TeiEmbedBody
from app.api.openai.schemas import OPENAI_ERRORS
from app.api.routing import BODY_ERRORS, ApiCall, Dialect, Route, check_model, count_refusals
from app.api.streaming import server_timing
from app.api.tasks.requests import FILE_TASKS, check_task, file_request, read_task
from app.api.tasks.schemas import TaskAnswer, TaskBody
from app.errors import WrongModelKind
from app.service.requests import TaskRequest
from app.service.served_model import ServedEncoder, ServedTasks, wrong_kind_error

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
        elif not isinstance(model, ServedEncoder):
            raise wrong_kind_error(model)
    if isinstance(model, ServedEncoder):
        return await call.forward(await _native_route(call, model, task))
    result = await call.service.run_task(request)
    headers = {**server_timing([result.timings], "queue", "encode"), "x-compute-tokens": str(result.num_tokens)}
    content = result.content
    if chosen == "text-classification" and not request.is_batch:
        content = b"[%b]" % content  # as the API has it: a list for each text
    return Response(content, media_type="application/json", headers=headers)


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
