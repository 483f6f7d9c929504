"""Chat templates of checkpoints: convert a conversation to the text that the model was trained on.

A template is untrusted code that came with the checkpoint. It runs in a jinja2 sandbox with the environment of Hugging
Face chat templates and with bounds on loops, numbers and output; repeated string concatenation is not bounded. Faults
of a template are errors of the request that used it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from app.errors import CheckpointInvalid, InvalidRequest, UnsupportedParameter

# More than any context: 1 Mi tokens of four characters. It ends a template that writes without end.
MAX_RENDERED_CHARACTERS = 4 * 2**20

# Elements of all ranges of one rendering, summed. jinja2's limit of 100,000 is per range, and loops nest.
MAX_RANGE_ELEMENTS = 200_000

_MAX_LENGTH = 10**6  # characters or elements of a text or list made by `*`

_MAX_BITS = 4096  # bits of a number made by `*` or `**`

_MAX_EXPONENT = 64

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

_JSON_FAULTS = (TypeError, ValueError, RecursionError)


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
        fixed = {"messages": plain, "add_generation_prompt": True, "tools": None, "documents": None}
        return self._render(self._named_tokens | extra | fixed)

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            return render_bounded(self._template, variables)
        except ConversationRefused as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error.message}", field="messages"
            ) from error
        except SecurityError as error:
            raise InvalidRequest(
                f"the sandbox stopped the checkpoint's chat template: {error}", field="messages"
            ) from error
        except _TEMPLATE_FAULTS as error:
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequest(
                f"the checkpoint's chat template fails on these messages: {reason}", field="messages"
            ) from error


def open_chat_template(
    directory: Path, config: Mapping[str, Any], named_tokens: Mapping[str, str]
) -> ChatTemplate | None:
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


class ConversationRefused(TemplateError):
    """Raised when the template calls `raise_exception`: its author considers the conversation invalid."""


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with the white-space rules, tags and functions that transformers gives to chat templates."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _namespace}
        del self.globals["lipsum"]  # generates text of any length

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `*` and `**`, within bounds on the operands and the result."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" and not (numbers and abs(right) <= _MAX_EXPONENT):
            raise SecurityError("it uses a power that is too large")
        if operator == "*" and not numbers and _length(left) * _length(right) > _MAX_LENGTH:
            raise SecurityError("it multiplies a text or list to a length that is too large")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > _MAX_BITS:
            raise SecurityError("it computes a number that is too large")
        return result


def render_bounded(template: Any, variables: Mapping[str, Any]) -> str:
    """Render a template of this sandbox.

    Raises:
        SecurityError: The template exceeds the bounds.
    """
    written: list[str] = []
    size = 0
    for chunk in template.generate({**variables, "range": _RangeBudget().range}):
        size += len(chunk)
        if size > MAX_RENDERED_CHARACTERS:
            raise SecurityError(f"it writes more than {MAX_RENDERED_CHARACTERS} characters")
        written.append(chunk)
    return "".join(written)


class _RangeBudget:
    """`range` for one rendering, with a limit on the sum over all its calls."""

    def __init__(self) -> None:
        self._remaining = MAX_RANGE_ELEMENTS

    def range(self, *bounds: int) -> range:
        elements = range(*bounds)
        self._remaining -= len(elements)
        if self._remaining < 0:
            raise SecurityError(f"its loops count more than {MAX_RANGE_ELEMENTS} elements")
        return elements


class _Names(Namespace):
    """jinja's `namespace()`, which alone would also accept names such as `__class__`."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> _Names:
    names = _Names()
    for name, value in dict(*args, **kwargs).items():
        names[name] = value
    return names


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _length(value: Any) -> int:
    return abs(value) if isinstance(value, int) else len(value)


def _raise_exception(message: str) -> NoReturn:
    raise ConversationRefused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without the HTML escapes of jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
