"""Chat templates of checkpoints: convert a conversation to the text that the model was trained on.

A template is untrusted code that came with the checkpoint. It runs in `sandbox.py`, and its faults are errors of
the request that used it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from app.errors import CheckpointInvalid, InvalidRequest, UnsupportedParameter
from app.text.sandbox import ConversationRefused, Sandbox, render_bounded

_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents", "range"})
# Exceptions that faulty template code raises: jinja's, and Python's for arithmetic, look-ups and calls.
_TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    MemoryError,
)
_TOO_DEEP = (TypeError, ValueError, RecursionError)


class ChatTemplate:
    """A compiled chat template; any thread may render it.

    `named_tokens` (bos_token, eos_token, …) are variables of the template. The rendered text contains all special
    tokens that it needs: it is encoded without adding any, as transformers does.
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        self._named_tokens = dict(named_tokens)
        try:
            self._template = Sandbox().from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointInvalid(
                f"the checkpoint's chat template has an error in line {error.lineno}: {error.message}"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None) -> str:
        """Return the prompt's text, up to where the assistant's answer begins.

        Args:
            messages: The conversation.
            arguments: Further variables of the template.

        Raises:
            InvalidRequest: The messages do not fit the template, or the template fails on them.
        """
        if not messages:
            raise InvalidRequest("messages must have at least one message.", field="messages")
        extra = _plain(dict(arguments or {}), "chat_template_kwargs")
        taken = extra.keys() & (_RESERVED | self._named_tokens.keys())
        if taken:
            raise InvalidRequest(f"{min(taken)} cannot be an argument of the chat template.", field="chat_template_kwargs")
        plain = [_with_text(_plain(dict(message), f"messages[{place}]"), place) for place, message in enumerate(messages)]
        fixed = {"messages": plain, "add_generation_prompt": True, "tools": None, "documents": None}
        return self._render(self._named_tokens | extra | fixed)

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            return render_bounded(self._template, variables)
        except ConversationRefused as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error.message}", field="messages") from error
        except SecurityError as error:
            raise InvalidRequest(f"the sandbox stopped the checkpoint's chat template: {error}", field="messages") from error
        except _TEMPLATE_FAULTS as error:
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"the checkpoint's chat template fails on these messages: {reason}", field="messages") from error


def open_chat_template(directory: Path, config: Mapping[str, Any], named_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Return the checkpoint's chat template, or None if it has none.

    It is chat_template.jinja, or else `chat_template` in tokenizer_config.json.
    """
    path = directory / "chat_template.jinja"
    try:
        source: object = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        source = _default_of(config.get("chat_template"))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointInvalid(f"{path} cannot be read: {error}") from error
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointInvalid(
            "chat_template in tokenizer_config.json must be a string or a list of objects with name and template."
        )
    return ChatTemplate(source, named_tokens)


def _default_of(source: object) -> object:
    """Return the template called default, or else the first, of several named templates."""
    if not isinstance(source, list) or not all(isinstance(item, dict) and {"name", "template"} <= item.keys() for item in source):
        return source
    named = {item["name"]: item["template"] for item in source}
    return named.get("default", next(iter(named.values()), None))


def _plain(value: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a copy as plain JSON values.

    So a template can neither reach nor change an object of this process.
    """
    try:
        copy: dict[str, Any] = json.loads(json.dumps(value))
    except _TOO_DEEP as error:
        raise InvalidRequest(f"{field} must be plain JSON: {error}", field=field.partition("[")[0]) from error
    return copy


def _with_text(message: dict[str, Any], place: int) -> dict[str, Any]:
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
