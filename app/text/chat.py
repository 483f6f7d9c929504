"""Chat templates of checkpoints: convert a conversation to the text that the model was trained on.

A template is untrusted code that came with the checkpoint. It is compiled and rendered in a process of its own, in
jinja2's sandbox, within limits of CPU time and memory (`text/template_process.py`). Faults of a template are errors of
the request that used it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid, InvalidRequest, TemplateStopped, UnsupportedParameter
from app.text.system_messages import SystemRules, find_system_rules, fold_system_messages
from app.text.template_messages import ReplyStatus
from app.text.template_process import TemplateLimits, TemplateProcess
from app.text.tool_formats import ToolFormat, find_tool_format
from app.weights.files import file_in, read_text

_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents", "range"})

TRIAL_CPU_SECONDS = TemplateLimits().cpu_seconds
MAX_TEMPLATE_BYTES = 2**20  # the longest in use have about 20 kB


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a template gets besides the messages.

    `tools` and `documents` are in the form of OpenAI's API and of transformers. With `continue_final_message`, the
    text ends with the content of the last message, which the model continues.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False


_JSON_FAULTS = (TypeError, ValueError, RecursionError)


class ChatTemplate:
    """A compiled chat template; any thread may render it.

    `named_tokens` (bos_token, eos_token, …) are variables of the template. The rendered text contains all special
    tokens that it needs: it is encoded without adding any, as transformers does.
    """

    def __init__(
        self, source: str, named_tokens: Mapping[str, str], limits: TemplateLimits | None = None, name: str = ""
    ) -> None:
        """Start the template's process and wait until it has compiled the template.

        Args:
            source: The template.
            named_tokens: Variables of the template.
            limits: CPU time and memory of one rendering.
            name: Where the template comes from, for messages.

        Raises:
            CheckpointInvalid: The template has an error, or exceeds its limits already when it is compiled.
        """
        self._named_tokens = dict(named_tokens)
        self.source = source
        limits = limits or TemplateLimits()
        self._process = TemplateProcess(source, limits)
        status, message = self._process.check()
        if status is not ReplyStatus.TEXT:
            self.close()
            where = f" ({name})" if name else ""
            raise CheckpointInvalid(f"the checkpoint's chat template{where} cannot be used: {message.rstrip('.')}.")
        self._system_rules, self._tool_format = self._try_messages(limits)

    @property
    def system_rules(self) -> SystemRules:
        """Where the template writes system messages. Others are folded into messages of the user."""
        return self._system_rules

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format in which the template writes calls of tools; None if it writes none, or in an unknown one."""
        return self._tool_format

    def _try_messages(self, limits: TemplateLimits) -> tuple[SystemRules, ToolFormat | None]:
        """Return where the template writes system messages, and how it writes calls, found by trial conversations.

        A trial has the usual limits, also if the operator allows a request hours: the server waits for it.
        """
        usual = TemplateLimits(min(limits.cpu_seconds, TRIAL_CPU_SECONDS), limits.memory_bytes)
        process = self._process if usual == limits else TemplateProcess(self.source, usual)

        def written(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
            fixed = {"messages": messages, "add_generation_prompt": True, "tools": tools or None, "documents": None}
            status, text = process.render(_dates() | self._named_tokens | fixed)
            return text if status is ReplyStatus.TEXT else None

        try:
            return find_system_rules(written), find_tool_format(written) if "tool_calls" in self.source else None
        finally:
            if process is not self._process:
                process.close()

    def close(self) -> None:
        """End the template's process. A rendering in another thread ends with `ServiceStopping`."""
        self._process.close()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any] | None = None,
        options: ChatOptions | None = None,
    ) -> str:
        """Return the prompt's text, up to where the assistant's answer begins.

        Args:
            messages: The conversation.
            arguments: Further variables of the template.
            options: Tools, documents, and where the text ends.

        Raises:
            InvalidRequest: The messages do not fit the template, or the template fails on them.
            TemplateStopped: The template needs too much time or memory.
        """
        if not messages:
            raise InvalidRequest("messages must have at least one message.", field="messages")
        extra = _plain_json_copy(dict(arguments or {}), "chat_template_kwargs")
        taken = extra.keys() & (_RESERVED | self._named_tokens.keys())
        if taken:
            raise InvalidRequest(
                f"{min(taken)} cannot be an argument of the chat template.", field="chat_template_kwargs"
            )
        plain = [
            _with_joined_text(_plain_json_copy(dict(message), f"messages[{place}]"), place)
            for place, message in enumerate(messages)
        ]
        plain = fold_system_messages(plain, self._system_rules)
        options = options or ChatOptions()
        end = ""
        if options.continue_final_message:
            end = f"<{secrets.token_hex(16)}> "
            plain[-1] = _ended_by(plain[-1], end)
        lists = _plain_json_copy({"tools": options.tools, "documents": options.documents}, "tools")
        fixed = {
            "messages": plain,
            "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
            "tools": lists["tools"] or None,
            "documents": lists["documents"] or None,
        }
        text = self._render(_dates() | self._named_tokens | extra | fixed)
        return _text_before(text, end) if end else text

    def _render(self, variables: Mapping[str, Any]) -> str:
        status, text = self._process.render(variables)
        if status is ReplyStatus.TEXT:
            return text
        kind = TemplateStopped if status in (ReplyStatus.STOPPED, ReplyStatus.MEMORY) else InvalidRequest
        raise kind(f"{_FAILURES[status]}: {text.rstrip('.')}.", field="messages")


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
    now = datetime.now()
    return {
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.astimezone(UTC).strftime("%b %d %Y %H:%M:%S GMT"),
    }


_NOT_CONTINUED = "continue_final_message needs a last message whose content the chat template writes at its end"


def _ended_by(message: dict[str, Any], end: str) -> dict[str, Any]:
    """Return the last message with a text that marks its end."""
    if message.get("tool_calls"):
        raise InvalidRequest(f"{_NOT_CONTINUED}; it has tool calls.", field="continue_final_message")
    return message | {"content": (message.get("content") or "") + end}


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
) -> ChatTemplate | None:
    """Return the checkpoint's chat template, or None if it has none.

    It is chat_template.jinja, or else `chat_template` in tokenizer_config.json or in the metadata of a GGUF file.

    Raises:
        CheckpointInvalid: The template cannot be read or used; the message names its file.
    """
    path = location if location.is_file() else file_in(location, "chat_template.jinja")
    source: object
    if path != location and path.exists():
        source = read_text(path, MAX_TEMPLATE_BYTES)
    else:
        path = location if path == location else location / "tokenizer_config.json"
        source = _default_of(config.get("chat_template"))
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointInvalid(
            f"chat_template in {path.name} must be a string or a list of objects with name and template."
        )
    return ChatTemplate(source, named_tokens, limits, name=str(path))


def _default_of(source: object) -> object:
    """Return the template called default, or else the first, of several named templates."""
    if not isinstance(source, list) or not all(
        isinstance(item, dict) and {"name", "template"} <= item.keys() for item in source
    ):
        return source
    by_name = {item["name"]: item["template"] for item in source}
    return by_name.get("default", next(iter(by_name.values()), None))


def _plain_json_copy(value: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a copy as plain JSON values.

    So a template can neither reach nor change an object of this process.
    """
    try:
        copy: dict[str, Any] = json.loads(json.dumps(value))
    except _JSON_FAULTS as error:
        raise InvalidRequest(f"{field} must be plain JSON: {error}", field=field.partition("[")[0]) from error
    return copy


def _with_joined_text(message: dict[str, Any], place: int) -> dict[str, Any]:
    """Join a list of text parts into one text, one part per line, as templates of text models expect."""
    content = message.get("content")
    if isinstance(content, list):
        return message | {"content": "\n".join(_text_of(part, place) for part in content)}
    if content is None or isinstance(content, str):
        return message
    raise InvalidRequest(f"messages[{place}].content must be a string or a list of text parts.", field="messages")


def _text_of(part: object, place: int) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if kind == "text" and isinstance(text, str):
        return text
    if isinstance(kind, str) and kind != "text":
        raise UnsupportedParameter(
            f"messages[{place}].content has a part of type {kind!r}; this model reads text only.", field="messages"
        )
    raise InvalidRequest(f'messages[{place}].content parts must be {{"type": "text", "text": "…"}}.', field="messages")
