"""From a body in the form of Hugging Face's inference API to the request of its task."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from pydantic_core import to_json

from app.api.schemas import ReportIgnored, parse_body
from app.api.tasks.schemas import BODIES, ZeroShotImageBody
from app.errors import InvalidRequest, WrongModelKind
from app.metrics.instruments import Api
from app.service.requests import TaskRequest
from app.service.served_model import ServedTasks

FILE_TASKS = frozenset({"image-classification", "zero-shot-image-classification", "automatic-speech-recognition"})
_PICTURE = "data:image/"


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
    listed, files = inputs if is_batch else (inputs,), []
    if task in FILE_TASKS:
        listed, files = (0,), [decode_file(inputs, "inputs")]
    elif model.config.reads_pictures:
        listed, files = split_pictures(listed)
    written = to_json(listed)
    size = len(content)
    request = TaskRequest(task, written, to_json(parameters), api, request_id, size, tuple(files), is_batch=is_batch)
    return request, body.model


def file_request(model: ServedTasks, task: str, content: bytes, request_id: str) -> TaskRequest:
    """Return the request of a body that is a file."""
    check_task(model, task)
    if issubclass(BODIES[task], ZeroShotImageBody):
        raise InvalidRequest("Send the picture in base64 as inputs, with parameters.candidate_labels.", "parameters")
    return TaskRequest(task, b"[0]", b"{}", "tasks", request_id, len(content), (content,))


def split_pictures(inputs: Sequence[str]) -> tuple[list[str | int], list[bytes]]:
    """Return inputs with the number of its file in place of each picture, and these files."""
    listed: list[str | int] = []
    files: list[bytes] = []
    for place, given in enumerate(inputs):
        if given.startswith(_PICTURE):
            listed.append(len(files))
            files.append(decode_file(given, "input" if len(inputs) == 1 else f"input[{place}]"))
        else:
            listed.append(given)
    return listed, files


def decode_file(given: str, field: str) -> bytes:
    """Return the bytes of a file in base64, which may be a data URL. Raises `InvalidRequest`."""
    if given.startswith(("http://", "https://")):
        raise InvalidRequest(f"{field} is an address, and this server fetches nothing: send the file in base64.", field)
    head, comma, data = given.partition(",")
    if given.startswith("data:") and not (comma and head.endswith(";base64")):
        raise InvalidRequest(f"{field} is a data URL without ;base64.", field)
    try:
        return base64.b64decode(data if given.startswith("data:") else given, validate=True)
    except ValueError as error:
        raise InvalidRequest(f"{field} is not a file in base64.", field) from error
