"""Chat templates of checkpoints: convert a conversation to the text that the model was trained on.

A template is untrusted code that came with the checkpoint. It runs in a process of its own, in jinja2's sandbox, within
limits of CPU time and memory (`text/sandbox.py`). Its faults are errors of the request that used it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from app.errors import (
    CheckpointInvalid,
    InvalidRequest,
    NotReady,
    ServiceStopping,
    TemplateStopped,
    UnsupportedParameter,
)
from app.text.child_process import ChildProcess, ProcessKind, Reply, ReplyStatus, TemplateLimits
from app.text.template_form import PICTURE, TemplateForm, ThinkingVariables, find_template_form
from app.text.tool_formats import TOOL_FORMATS, TRIAL_CALL, TRIAL_TOOL, ToolFormat, find_tool_format
from app.weights.files import file_in, files_in, folder_in, read_text, unreadable_message

log = logging.getLogger(__name__)

_ROLES = ("system", "user", "assistant", "tool")
_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents", "range"})

TRIAL_CPU_SECONDS = TemplateLimits().cpu_seconds
MAX_TEMPLATE_BYTES = 2**20  # the longest in use have about 20 kB

# Sum of a request and its copies (bytes, text, values) when the process has parsed it, per byte.
_COPIES = 4
_CLOSE_SECONDS = 0.05
# Created once: `json.dumps` with non-default arguments creates an encoder per call, which takes as long as encoding.
_SHAPES, _REQUESTS = json.JSONEncoder(sort_keys=True), json.JSONEncoder(ensure_ascii=False)
_TEMPLATE = ProcessKind("The chat template's process", "app.text.sandbox", ("app", "jinja2", "markupsafe"))

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a template gets besides the messages.

    `tools` and `documents` are in the form of OpenAI's API and of transformers. With `continue_final_message`, the text
    ends with the content of the last message, which the model continues.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False


_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_CHATML = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_MAX_TRIAL_SECONDS = 20.0  # of all trials; those of templates in use take less than half a second
_EXCEEDED = (ReplyStatus.STOPPED, ReplyStatus.MEMORY)
_MAX_SHAPES = 4096
_JSON_FAULTS = (TypeError, ValueError, RecursionError)


class ChatTemplate:
    """A compiled chat template; any thread may render it.

    `named_tokens` (bos_token, eos_token, …) are variables of the template. The text has all special tokens that it
    needs, so it is encoded without adding any, as transformers does.
    """

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str],
        limits: TemplateLimits | None = None,
        name: str = "",
    ) -> None:
        """Compile the template in its process. `limits` are of one rendering; `name` is for messages.

        Raises `CheckpointInvalid` if the template has an error, or exceeds its limits already when it is compiled.
        """
        self._named_tokens = dict(named_tokens)
        self.source = source
        self.with_tools: ChatTemplate | None = None  # the checkpoint's other template, for conversations with tools
        limits = limits or TemplateLimits()
        self._process = TemplateProcess(source, limits)
        status, message = self._process.check()
        if status is not ReplyStatus.TEXT:
            self.close()
            where = f" ({name})" if name else ""
            raise CheckpointInvalid(f"the checkpoint's chat template{where} cannot be used: {message.rstrip('.')}.")
        # The format in which the template writes calls: None if it writes none, or in an unknown one.
        self.tool_format: ToolFormat | None = None
        # Where marks of formats are looked for: the source, and what it writes for a call, since it may compose them.
        self.evidence = source
        self.form = self._find_form(limits)
        self._whole: set[bytes] = set()  # shapes of conversations that were found to be written whole

    def _find_form(self, limits: TemplateLimits) -> TemplateForm:
        """Return the form that the template wants, found by trial conversations.

        A trial has the usual limits, also if the operator allows a request hours: the server waits for it. Nothing more
        is tried after one that exceeds them, or after a time that only a template needs that is made to take it.
        """
        usual = TemplateLimits(min(limits.cpu_seconds, TRIAL_CPU_SECONDS), limits.memory_bytes)
        process = self._process if usual == limits else TemplateProcess(self.source, usual)

        latest = time.monotonic() + _MAX_TRIAL_SECONDS

        def rendered(variables: Mapping[str, Any]) -> str | None:
            status, text = process.render({**_dates(), **self._named_tokens, **variables})
            if status in _EXCEEDED or process.num_ended or time.monotonic() > latest:
                raise _TrialStopped
            return text if status is ReplyStatus.TEXT else None

        try:
            form = find_template_form(rendered)
            if form.calls:
                messages = form.fit(TRIAL_CALL, [TRIAL_TOOL], TOOL_FORMATS["hermes"])
                fixed = {"messages": messages, "add_generation_prompt": True, "documents": None}
                written = rendered(fixed | form.tool_variables([TRIAL_TOOL])) or ""
                self.tool_format = find_tool_format(written)
                self.evidence += written
            return form
        except _TrialStopped:
            return TemplateForm()
        finally:
            if process is not self._process:
                process.close()

    def close(self) -> None:
        """End the template's process. A rendering in another thread ends with `ServiceStopping`."""
        self._process.close()
        if self.with_tools is not None:
            self.with_tools.close()

    def chosen(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None) -> ChatTemplate:
        """Return the template for a conversation: the one for tools, if there is one and the conversation has any."""
        has_tools = options is not None and bool(options.tools)
        if self.with_tools is None or not (has_tools or any(one.get("tool_calls") for one in messages)):
            return self
        return self.with_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any] | None = None,
        options: ChatOptions | None = None,
        syntax: ToolFormat = TOOL_FORMATS["hermes"],
    ) -> str:
        """Return the prompt's text, up to where the assistant's answer begins.

        A template that knows no calls gets them in the form `syntax`. Raises `InvalidRequest` if the messages do not
        fit the template, it fails on them, or it leaves out a part of them, and `TemplateStopped` if it needs too much
        time or memory.
        """
        template = self.chosen(messages, options)
        return template._render_all(messages, arguments or {}, options or ChatOptions(), syntax)

    def _render_all(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        options: ChatOptions,
        syntax: ToolFormat,
    ) -> str:
        if not messages:
            raise InvalidRequest("messages must have at least one message.", field="messages")
        extra = _plain_json_copy(dict(arguments), "chat_template_kwargs")
        taken = extra.keys() & (_RESERVED | self._named_tokens.keys())
        if taken:
            raise InvalidRequest(
                f"{min(taken)} cannot be an argument of the chat template.", field="chat_template_kwargs"
            )
        plain = [
            _with_text_parts(_plain_json_copy(dict(message), f"messages[{place}]"), place)
            for place, message in enumerate(messages)
        ]
        lists: dict[str, Any] = {"tools": [], "documents": []}
        if options.tools or options.documents:
            lists = _plain_json_copy({"tools": options.tools, "documents": options.documents}, "tools")
        plain = self.form.fit(plain, lists["tools"], syntax, ThinkingVariables.wanted(extra))
        plain = [_with_reasoning(message) for message in plain]
        fixed = {
            **self._named_tokens,
            **self.form.thinking.arguments(extra),
            "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
            **self.form.tool_variables(lists["tools"]),
            "documents": lists["documents"] or None,
        }
        end = ""
        last = plain[-1]
        if options.continue_final_message:
            end = f"<{secrets.token_hex(16)}> "
            last = _ended_by(last, end)
        text = self._render(_dates() | fixed | {"messages": [*plain[:-1], last]})
        text = _text_before(text, end) if end else text
        self._check_whole(plain, fixed)
        return text

    def _check_whole(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> None:
        """Raise an `InvalidRequest` that names a part of the conversation that the template leaves out.

        The conversation is rendered once more with a word in place of each text, and all words must be found. The
        result holds for all conversations of the same shape.
        """
        marked = MarkedTexts(messages, variables)
        shape = hashlib.sha256(_SHAPES.encode([marked.variables, marked.messages]).encode()).digest()
        if shape in self._whole:
            return
        status, text = self._process.render(_dates() | marked.variables | {"messages": marked.messages})
        lost = marked.lost(text)
        # A template that refuses the words, and has written the texts, looks at what they say: nothing can be known.
        if status is ReplyStatus.TEXT and lost is not None:
            raise InvalidRequest(f"the chat template of this model leaves out {lost}.", field=lost.partition("[")[0])
        if len(self._whole) >= _MAX_SHAPES:
            self._whole.clear()
        self._whole.add(shape)

    def _render(self, variables: Mapping[str, Any]) -> str:
        status, text = self._process.render(variables)
        if status is ReplyStatus.TEXT:
            return text
        kind = TemplateStopped if status in _EXCEEDED else InvalidRequest
        raise kind(f"{_FAILURES[status]}: {text.rstrip('.')}.", field="messages")


class TemplateProcess:
    """A template in a process of its own. Any thread may render; renderings happen one after the other."""

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self._source, self._limits = source, limits
        self._lock = Lock()
        self._closed = False
        self.num_ended = 0  # processes that a rendering has ended
        self._child = self._start()

    def check(self) -> Reply:
        """Return `TEXT` once the template is compiled, or why it cannot be used."""
        with self._lock:
            return self._child.compiled()

    def render(self, variables: Mapping[str, Any]) -> Reply:
        """Return the rendered text, or why there is none.

        Raises `NotReady` if the process could not be started, and `ServiceStopping` after `close`.
        """
        request = _REQUESTS.encode(variables).encode("utf-8", "surrogatepass")
        if _COPIES * len(request) > self._limits.memory_bytes:
            return ReplyStatus.MEMORY, f"{len(request)} bytes of messages do not fit into the memory that it may take"
        with self._lock:
            if self._child.ended:
                self._child = self._start()
            reply = self._child.compiled()
            if reply[0] is ReplyStatus.TEXT:
                reply = self._child.ask(request)
            if self._child.ended and not self._closed:
                self.num_ended += 1
                log.warning("the chat template's process ended and is started again")
                with suppress(NotReady):  # the next request tries again
                    self._child = self._start()
        if self._closed:
            raise ServiceStopping("The server is stopping.")
        return reply

    def close(self) -> None:
        """End the process, and with it a rendering that another thread waits for. Nothing is rendered afterwards."""
        self._closed = True
        self._child.kill()
        while not self._lock.acquire(timeout=_CLOSE_SECONDS):
            self._child.kill()  # one that was started in the meantime
        self._child.end()
        self._lock.release()

    def _start(self) -> ChildProcess:
        if self._closed:
            raise ServiceStopping("The server is stopping.")
        return ChildProcess(_TEMPLATE, self._limits, {"source": self._source})


class MarkedTexts:
    """A conversation, in the form that a template gets, with words in place of its texts.

    `words` says what each word stands for, as a path in the request. Reasoning is no such text: templates leave it out
    of earlier turns, as models were trained.
    """

    def __init__(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> None:
        self.words: dict[str, str] = {}
        self.messages = [self._message(message, f"messages[{place}]") for place, message in enumerate(messages)]
        documents = variables.get("documents") or ()
        self.variables = dict(variables)
        if documents:
            self.variables["documents"] = [self._document(one, f"documents[{at}]") for at, one in enumerate(documents)]

    def lost(self, text: str) -> str | None:
        """Return the path of the first part that is not in a rendered text; None if all are there."""
        return next((path for word, path in self.words.items() if word not in text), None)

    def _word(self, text: str, path: str) -> str:
        if not text.strip():
            return text
        word = f"zq{len(self.words)}qz"
        self.words[word] = path
        return word

    def _message(self, message: Message, path: str) -> dict[str, Any]:
        marked = dict(message)
        for name in ("content", "tool_plan"):
            if name in marked:
                known = message["role"] in _ROLES
                label = "" if known else f", of the role {message['role']}"
                marked[name] = self._content(marked[name], f"{path}.content{label}")
        if marked.get("tool_calls"):
            calls = enumerate(marked["tool_calls"])
            marked["tool_calls"] = [self._call(call, f"{path}.tool_calls[{place}]") for place, call in calls]
        return marked | {name: "reasoning" for name in ("reasoning_content", "thinking") if marked.get(name)}

    def _content(self, content: Any, path: str) -> Any:
        if isinstance(content, str):
            return self._word(content, path)
        if isinstance(content, list):
            return [
                part | {"text": self._word(part["text"], f"{path}[{at}].text")} if "text" in part else part
                for at, part in enumerate(content)
            ]
        return content

    def _call(self, call: Message, path: str) -> dict[str, Any]:
        function = call["function"]
        arguments, path = function.get("arguments"), f"{path}.function.arguments"
        if isinstance(arguments, dict):
            arguments = self._arguments(arguments, path)
        elif isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                found = json.loads(arguments)
                arguments = json.dumps(self._arguments(found, path)) if isinstance(found, dict) else arguments
        return {**call, "function": {**function, "arguments": arguments}}

    def _arguments(self, arguments: Mapping[str, Any], path: str) -> dict[str, str]:
        return {name: self._word(name, f"{path}.{name}") for name in arguments}

    def _document(self, document: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return a document's longest text as a word: a template may leave out its other fields, such as a title."""
        texts = {name: text for name, text in document.items() if isinstance(text, str)}
        name = max(texts, key=lambda one: len(texts[one]), default=None)
        return {**document} if name is None else {**document, name: self._word(texts[name], f"{path}.{name}")}


class _TrialStopped(Exception):
    """A trial conversation has exceeded the template's limits."""


_FAILURES: Mapping[ReplyStatus, str] = {
    ReplyStatus.REFUSED: "the chat template refuses these messages",
    ReplyStatus.STOPPED: "the checkpoint's chat template was stopped",
    ReplyStatus.MEMORY: "the checkpoint's chat template was stopped",
    ReplyStatus.FAILED: "the checkpoint's chat template fails on these messages",
}


def _dates() -> dict[str, str]:
    """Return the time under the names by which templates of Llama 3 and of FireFunction ask for it.

    llama.cpp gives both. Without `date_string`, Llama 3's templates write a day of 2024. An argument of the request
    replaces them. Newer templates call `strftime_now`.
    """
    return dict(_dates_at(int(time.time())))


@lru_cache(maxsize=1)
def _dates_at(second: int) -> dict[str, str]:
    now = datetime.fromtimestamp(second)
    return {
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.astimezone(UTC).strftime("%b %d %Y %H:%M:%S GMT"),
    }


_NOT_CONTINUED = "continue_final_message needs a last message whose content the chat template writes at its end"


def _ended_by(message: dict[str, Any], end: str) -> dict[str, Any]:
    if message.get("tool_calls"):
        raise InvalidRequest(f"{_NOT_CONTINUED}; it has tool calls.", field="continue_final_message")
    content = message.get("content") or ""
    if isinstance(content, list):
        *parts, last = content
        if "text" not in last:
            raise InvalidRequest(f"{_NOT_CONTINUED}; it ends with a picture.", field="continue_final_message")
        return message | {"content": [*parts, last | {"text": last["text"] + end}]}
    return message | {"content": content + end}


def _text_before(text: str, end: str) -> str:
    """Return a rendered text up to the mark that ends the last message's content, as transformers does.

    The mark ends with a space. A template that trims the content would have trimmed the content's own white space.
    """
    place = text.rfind(end.rstrip())
    if place < 0:
        raise InvalidRequest(f"{_NOT_CONTINUED}.", field="continue_final_message")
    return text[:place] if text.startswith(end, place) else text[:place].rstrip()


def open_chat_template(
    location: Path,
    config: Mapping[str, Any],
    named_tokens: Mapping[str, str],
    limits: TemplateLimits | None = None,
    file: Path | None = None,
    tokens: Container[str] = (),
) -> ChatTemplate | None:
    """Return the checkpoint's chat template, or None if it has none.

    It is `file`, if the operator names one; else chat_template.jinja with additional_chat_templates; else
    `chat_template` in tokenizer_config.json or in the metadata of a GGUF file, which may be several by their names. Of
    these, `default` is used, and `tool_use` for conversations with tools, as transformers does. A GGUF file without any
    gets ChatML's, if its `tokens` are ChatML's. Raises a `CheckpointInvalid` that names the file if the template cannot
    be read or used.
    """
    origin, sources = _template_sources(location, config, file)
    if not sources and location.is_file() and all(token in tokens for token in _CHATML_TOKENS):
        log.warning(
            "%s has no chat template: ChatML is used, whose tokens it has (chat_template=FILE for another)", origin
        )
        sources = {"default": _CHATML}
    if not sources:
        return None
    for_tools = sources.get("tool_use")
    default = sources.get("default", next(iter(sources.values())))
    template = ChatTemplate(default, named_tokens, limits, name=str(origin))
    if for_tools is not None and for_tools != default:
        try:
            template.with_tools = ChatTemplate(for_tools, named_tokens, limits, name=f"tool_use of {origin}")
        except CheckpointInvalid:
            template.close()
            raise
    return template


def _template_sources(location: Path, config: Mapping[str, Any], file: Path | None) -> tuple[Path, dict[str, str]]:
    if file is not None:
        try:
            return file, {"default": read_text(file, MAX_TEMPLATE_BYTES)}
        except OSError as error:
            raise CheckpointInvalid(f"chat_template: {unreadable_message(file, error)}") from error
    if location.is_file():
        return location, _named_sources(config.get("chat_template"), location)
    path = file_in(location, "chat_template.jinja")
    others = files_in(folder_in(location, "additional_chat_templates"), "*.jinja")
    found = {one.stem: read_text(one, MAX_TEMPLATE_BYTES) for one in others}
    if path.exists():
        found["default"] = read_text(path, MAX_TEMPLATE_BYTES)
    if found:
        return path, found
    origin = location / "tokenizer_config.json"
    return origin, _named_sources(config.get("chat_template"), origin)


def _named_sources(given: object, origin: Path) -> dict[str, str]:
    """Return the templates of a checkpoint's `chat_template`: a text, named ones as an object, or as a list."""
    found: object = {"default": given} if isinstance(given, str) else {} if given is None else given
    if isinstance(found, list) and all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in found):
        found = {one["name"]: one["template"] for one in found}
    if not isinstance(found, dict) or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise CheckpointInvalid(
            f"chat_template in {origin.name} must be a string, or several by their names: an object, or a list of objects "
            "with name and template."
        )
    return found


def _plain_json_copy(value: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a copy as plain JSON values: a template can neither reach nor change an object of this process."""
    if not value:
        return {}
    try:
        copy: dict[str, Any] = json.loads(json.dumps(value))
    except _JSON_FAULTS as error:
        raise InvalidRequest(f"{field} must be plain JSON: {error}", field=field.partition("[")[0]) from error
    return copy


def _with_text_parts(message: dict[str, Any], place: int) -> dict[str, Any]:
    """Return a message with a text, null, or a list of text parts alone as its content."""
    content = message.get("content")
    if isinstance(content, list):
        return message | {"content": [_plain_part(part, place) for part in content]}
    if content is None or isinstance(content, str):
        return message
    raise InvalidRequest(f"messages[{place}].content must be a string or a list of text parts.", field="messages")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under the other name that templates read (gpt-oss), as transformers does."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _plain_part(part: object, place: int) -> dict[str, str]:
    return PICTURE if part == PICTURE else {"type": "text", "text": _text_of(part, place)}


def _text_of(part: object, place: int) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if kind == "text" and isinstance(text, str):
        return text
    if isinstance(kind, str) and kind != "text":
        raise UnsupportedParameter(
            f"messages[{place}].content has a part of type {kind!r}; this model reads text only.", field="messages"
        )
    raise InvalidRequest(f'messages[{place}].content parts must be {{"type": "text", "text": "…"}}.', field="messages")
