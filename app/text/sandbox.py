"""A jinja2 sandbox with the environment of Hugging Face chat templates, and bounds on loops, numbers and output.

Conversations are handled in `chat.py`. Repeated string concatenation in a template is not bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# More than any context: 1 Mi tokens of four characters. It ends a template that writes without end.
MAX_RENDERED_CHARACTERS = 4 * 2**20
# Elements of all ranges of one rendering, summed. jinja2's limit of 100,000 is per range, and loops nest.
MAX_RANGE_ELEMENTS = 200_000
_MAX_LENGTH = 10**6  # characters or elements of a text or list made by `*`
_MAX_BITS = 4096  # bits of a number made by `*` or `**`
_MAX_EXPONENT = 64


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
        self._left = MAX_RANGE_ELEMENTS

    def range(self, *bounds: int) -> range:
        elements = range(*bounds)
        self._left -= len(elements)
        if self._left < 0:
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
