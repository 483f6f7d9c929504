"""From a body in the form of Hugging Face's inference API to the request of its task."""

from __future__ import annotations

from pydantic_core import to_json

from app.api.schemas import ReportIgnored, parse_body
from app.api.tasks.schemas import BODIES
from app.errors import WrongModelKind
from app.metrics.instruments import Api
from app.service.requests import TaskRequest
from app.service.served_model import ServedTasks


def check_task(model: ServedTasks, task: str) -> None:
    if task not in model.tasks:
        raise WrongModelKind(f"{model.name!r} does not do {task[:100]!r}; it does {', '.join(model.tasks)}.", "task")


def read_task(
    model: ServedTasks, task: str, content: bytes | bytearray, api: Api, request_id: str, report: ReportIgnored
) -> tuple[TaskRequest, str | None]:
    """Return the request of a JSON body, and the model that it names. Raises an `InvalidRequest` that names the field."""
    check_task(model, task)
    body = parse_body(BODIES[task], content, report)
    inputs, is_batch = body.inputs, isinstance(body.inputs, tuple)
    parameters = {} if body.parameters is None else body.parameters.model_dump(exclude_none=True)
    if (truncate := getattr(body, "truncate", None)) is not None:
        parameters["truncate"] = truncate
    written = to_json(inputs if is_batch else (inputs,))
    request = TaskRequest(task, written, to_json(parameters), api, request_id, len(content), is_batch=is_batch)
    return request, body.model
