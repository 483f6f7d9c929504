"""OpenAI's routes of speech to text: forms with a sound, and texts, subtitles or segments of what is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import from_json, to_json
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from app.api.forms import read_form
from app.api.openai.schemas import OPENAI_ERRORS
from app.api.routing import BODY_ERRORS, ApiCall, Dialect, check_model, count_refusals, renamed_fields, run_beside_loop
from app.api.schemas import LEAVE_OUT, Body, Refusal, parse_body, refused
from app.api.streaming import server_timing
from app.api.tasks.requests import check_task
from app.errors import InvalidRequest
from app.metrics.instruments import Api
from app.models.transformers_tasks import SPEECH
from app.service.requests import TaskRequest

AUDIO = Dialect("OpenAI", OPENAI_ERRORS)
_FIELDS = {f"parameters.{name}": name for name in ("language", "prompt", "temperature", "task", "return_timestamps")}
_NUMBERS = ("temperature",)
_LISTS = ("timestamp_granularities", "include")


class TranslationBody(Body):
    """Fields of the form of `POST /v1/audio/translations`, besides `file`."""

    API: ClassVar[Api] = "tasks"

    model: str | None = None
    prompt: Annotated[str, Field(max_length=10_000)] | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = None


class TranscriptionBody(TranslationBody):
    """Fields of the form of `POST /v1/audio/transcriptions`, besides `file`."""

    REFUSED: ClassVar[Mapping[str, Refusal]] = refused(
        LEAVE_OUT, include=(), chunking_strategy="auto", known_speaker_names=(), known_speaker_references=()
    )

    language: Annotated[str, Field(pattern=r"^[a-z]{2,3}$")] | None = None
    timestamp_granularities: tuple[Literal["segment", "word"], ...] | None = None
    stream: bool | None = None


class SpokenSegment(TypedDict, total=False):
    """A part of what is said, with its time in seconds."""

    id: int
    start: float
    end: float
    text: str


class Transcription(TypedDict, total=False):
    """What is said; the rest is in `verbose_json`."""

    text: str
    task: str
    language: str | None
    duration: float
    segments: list[SpokenSegment]
    words: list[SpokenSegment]


_ROUTE: Mapping[str, Any] = {
    "response": Transcription,
    "statuses": (*BODY_ERRORS, 404, 504),
    "operation": "transcription",
    "task": SPEECH,
}


def _form_schema(body: str) -> Mapping[str, Any]:
    file = {"type": "string", "format": "binary", "description": "WAV, FLAC, OGG or MP3."}
    return {"openapi_extra": {"requestBody": {"required": True, "content": {"multipart/form-data": {
        "schema": {"type": "object", "required": ["file"], "properties": {"file": file}, "description": body}
    }}}}}  # fmt: skip


@AUDIO.post(
    "/v1/audio/transcriptions", "OpenAI: what is said in a sound", openapi=_form_schema("transcription"), **_ROUTE
)
async def transcriptions(call: ApiCall) -> Response:
    """Write what is said, in the language of the sound."""
    return await _recognize(call, TranscriptionBody, "transcribe")


@AUDIO.post(
    "/v1/audio/translations",
    "OpenAI: what is said in a sound, in English",
    openapi=_form_schema("translation"),
    **_ROUTE,
)
async def translations(call: ApiCall) -> Response:
    """Write what is said in English."""
    return await _recognize(call, TranslationBody, "translate")


async def _recognize(call: ApiCall, kind: type[TranslationBody], task: str) -> Response:
    with renamed_fields({**_FIELDS, "inputs": "file"}):
        with count_refusals(call.runtime.metrics, "tasks"):
            model = call.service.tasks
            check_task(model, SPEECH)
            if "origin" in call.request.headers:  # a browser asks nobody before a page of another site sends a form
                raise InvalidRequest(
                    "Forms from web pages are not taken: send JSON to /pipeline/automatic-speech-recognition."
                )
            content, form_type = await call.read(), call.request.headers.get("content-type", "")
            fields = dict(await run_beside_loop(len(content), read_form, form_type, content))
            files = fields.pop("file", [])
            if len(files) != 1 or not files[0]:
                raise InvalidRequest("file is missing or empty: send one sound.", "file")
            body = parse_body(kind, to_json(_values(fields)), call.report_ignored)
            if body.model is not None:
                check_model(call.runtime, body.model)
            parameters = _parameters(body, task)
        size = len(files[0])
        request = TaskRequest(SPEECH, b"[0]", to_json(parameters), "tasks", call.id, size, (files[0],))
        result = await call.service.run_task(request)
    return _response(body, task, from_json(result.content), server_timing([result.timings], "queue", "encode"))


def _values(fields: Mapping[str, list[bytes]]) -> dict[str, Any]:
    """Return a form's texts as JSON has them."""
    values: dict[str, Any] = {}
    for name, given in fields.items():
        plain, texts = name.removesuffix("[]"), [one.decode("utf-8", "replace") for one in given]
        value: Any = texts if plain in _LISTS else texts[-1]
        if plain == "stream":
            value = {"true": True, "false": False, "1": True, "0": False}.get(texts[-1].lower(), texts[-1])
        if plain in _NUMBERS:
            value = _number(texts[-1])
        values[plain] = value
    return values


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _parameters(body: TranslationBody, task: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {"details": True}
    for name in ("language", "prompt", "temperature"):
        if getattr(body, name, None) is not None:
            parameters[name] = getattr(body, name)
    if task == "translate":
        parameters["task"] = task
    words = "word" in (getattr(body, "timestamp_granularities", None) or ())
    if words and body.response_format != "verbose_json":
        raise InvalidRequest("timestamp_granularities needs response_format=verbose_json.", "timestamp_granularities")
    if words:
        parameters["return_timestamps"] = "word"
    elif body.response_format in ("srt", "vtt", "verbose_json") or getattr(body, "stream", False):
        parameters["return_timestamps"] = True
    return parameters


def _response(body: TranslationBody, task: str, found: dict[str, Any], headers: Mapping[str, str]) -> Response:
    kind, text, chunks = body.response_format or "json", found["text"], found.get("chunks", [])
    if getattr(body, "stream", False):
        deltas = [each["text"] for each in chunks] or [text]
        return StreamingResponse(iter(_events(deltas, text)), media_type="text/event-stream", headers=headers)
    if kind in ("text", "srt", "vtt"):
        content = text + "\n" if kind == "text" else _SUBTITLES[kind](chunks, found["duration"])
        return Response(content, media_type="text/plain", headers=headers)
    answer: dict[str, Any] = {"text": text}
    if kind == "verbose_json":
        parts = [
            {"id": place, "start": each["timestamp"][0], "end": _end(each, found["duration"]), "text": each["text"]}
            for place, each in enumerate(chunks)
        ]
        words = "word" in (getattr(body, "timestamp_granularities", None) or ())
        answer |= {"task": task, "language": getattr(body, "language", None), "duration": found["duration"]}
        answer["segments"] = _joined(parts, text) if words else parts
        if words:
            answer["words"] = [
                {"word": part["text"].strip(), "start": part["start"], "end": part["end"]} for part in parts
            ]
    return Response(to_json(answer), media_type="application/json", headers=headers)


def _joined(words: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return all words as one segment."""
    return [{"id": 0, "start": words[0]["start"], "end": words[-1]["end"], "text": text}] if words else []


def _end(chunk: Mapping[str, Any], duration: float) -> float:
    """Return the end of a chunk: that of the sound if the model wrote none."""
    end = chunk["timestamp"][1]
    return float(duration if end is None else end)


def _events(deltas: Sequence[str], text: str) -> Iterator[bytes]:
    for delta in deltas:
        yield b"data: %b\n\n" % to_json({"type": "transcript.text.delta", "delta": delta})
    yield b"data: %b\n\n" % to_json({"type": "transcript.text.done", "text": text})
    yield b"data: [DONE]\n\n"


def _clock(seconds: float, mark: str) -> str:
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{mark}{whole % 1000:03}"


def _srt(chunks: Sequence[Mapping[str, Any]], duration: float) -> str:
    return "".join(
        f"{place}\n{_clock(each['timestamp'][0], ',')} --> {_clock(_end(each, duration), ',')}\n{each['text'].strip()}\n\n"
        for place, each in enumerate(chunks, 1)
    )


def _vtt(chunks: Sequence[Mapping[str, Any]], duration: float) -> str:
    return "WEBVTT\n\n" + "".join(
        f"{_clock(each['timestamp'][0], '.')} --> {_clock(_end(each, duration), '.')}\n{each['text'].strip()}\n\n"
        for each in chunks
    )


_SUBTITLES: Mapping[str, Callable[[Sequence[Mapping[str, Any]], float], str]] = {"srt": _srt, "vtt": _vtt}
