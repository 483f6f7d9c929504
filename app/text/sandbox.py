"""The environment that Hugging Face's chat templates are written for, as a sandbox with bounds on counting, multiplying and writing.

What a template means for a conversation is `chat.py`'s business. Texts that a template joins to themselves again and again are not bounded.
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

# Far more than any context: 1 Mi tokens of four characters. Ends a template that writes without end.
MAX_RENDERED_CHARACTERS = 4 * 2**20
# Elements of all ranges of one rendering together; the sandbox's own limit is 100,000 for each, and loops nest.
MAX_RANGE_ELEMENTS = 200_000
_MAX_LENGTH = 10**6  # of a text or list made by `*`
_MAX_BITS = 4096  # of a number made by `*` or `**`
_MAX_EXPONENT = 64


class ConversationRefused(TemplateError):
    """The template called `raise_exception`: in its author's eyes it is the conversation that is wrong."""


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with the whitespace rules, tags and functions that transformers gives to chat templates."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _namespace}
        del self.globals["lipsum"]  # writes as many words as it is asked for

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" and not (numbers and abs(right) <= _MAX_EXPONENT):
            raise SecurityError("it raises to a power beyond reason")
        if operator == "*" and not numbers and _length(left) * _length(right) > _MAX_LENGTH:
            raise SecurityError("it multiplies a text or list beyond reason")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > _MAX_BITS:
            raise SecurityError("it counts beyond reason")
        return result


def render_bounded(template: Any, variables: Mapping[str, Any]) -> str:
    """What a template of this sandbox writes. Raises `SecurityError` where it goes beyond the bounds."""
    written: list[str] = []
    size = 0
    for chunk in template.generate({**variables, "range": _RangeBudget().range}):
        size += len(chunk)
        if size > MAX_RENDERED_CHARACTERS:
            raise SecurityError(f"it writes more than {MAX_RENDERED_CHARACTERS} characters")
        written.append(chunk)
    return "".join(written)


class _RangeBudget:
    """`range` for one rendering, with a sum over all its calls."""

    def __init__(self) -> None:
        self._left = MAX_RANGE_ELEMENTS

    def range(self, *bounds: int) -> range:
        elements = range(*bounds)
        self._left -= len(elements)
        if self._left < 0:
            raise SecurityError(f"its loops count more than {MAX_RANGE_ELEMENTS} elements")
        return elements


class _Names(Namespace):
    """jinja's `namespace()`, which by itself would also take `__class__` and its kin."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace takes no {name!r}")
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> _Names:
    names = _Names()
    for name, value in dict(*args, **kwargs).items():
        names[name] = value
    return names


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; in serving it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own interface)

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
    """Without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
