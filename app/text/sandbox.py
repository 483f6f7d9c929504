"""Sandbox of chat templates, and the process that renders in it. `TemplateProcess` in `text/chat.py` starts it.

A template is untrusted code that came with the checkpoint. It runs in jinja2's sandbox with the environment of Hugging
Face chat templates. Bounds on loops, numbers and output give clear errors. What they miss is ended by the limits of the
process: its CPU time by a timer of the kernel, which also ends a call within C code, and its memory by `RLIMIT_AS`.
This module imports neither torch nor numpy nor the server, so the process takes about 20 MB.
"""

from __future__ import annotations

import codecs
import json
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from app.text.child_process import (
    MAX_RENDERED_CHARACTERS,
    MEMORY_MESSAGE,
    Reply,
    ReplyStatus,
    give_up_rights,
    limit_memory,
    receive_request,
    send_reply,
    serve_requests,
)

# Elements of all ranges of one rendering, summed. jinja2's limit of 100,000 is per range, and loops nest.
MAX_RANGE_ELEMENTS = 200_000

_MAX_LENGTH = 10**6  # characters or elements of a text or list made by `*`

_MAX_BITS = 4096  # bits of a number made by `*` or `**`

_MAX_EXPONENT = 64

_MAX_ERROR_CHARACTERS = 400  # of a message, which the template may choose

# Exceptions that faulty template code raises: jinja's, and Python's for arithmetic, look-ups, calls and compilation.
_TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    SyntaxError,
    OSError,
    ImportError,
)


def main() -> None:
    """Serve requests from standard input, which is a socket, until it is closed.

    The first request has the template's source and the limits, in bytes and CPU seconds. Each further request has the
    variables of one rendering.
    """
    connection = socket.socket(fileno=0)
    start = json.loads(receive_request(connection))
    _load_lazy_modules()
    limit_memory(start["memory_bytes"])
    give_up_rights()
    signal.setitimer(signal.ITIMER_PROF, start["compile_seconds"])  # the kernel ends the process: it has no handler
    template, reply = _compile(start["source"])
    send_reply(connection, reply)
    if template is not None:
        serve_requests(connection, start["render_seconds"], lambda request: _render(template, request))


def _load_lazy_modules() -> None:
    """Load what Python and jinja2 import at its first use: no file can be opened afterwards."""
    time.localtime()  # the time zone's file
    filters = "tojson(indent=1) | trim | pprint | wordwrap | striptags | length | string"
    for source in (f"{{% set x = '&amp;é\\n' %}}{{{{ x | {filters} }}}}", "{{ 1 + 'a' }}"):
        with suppress(TypeError):
            Sandbox().from_string(source).render()
    for encoding in ("ascii", "latin-1", "utf-8", "utf-16", "unicode_escape", "raw_unicode_escape"):
        codecs.lookup(encoding)


def _compile(source: str) -> tuple[Template | None, Reply]:
    try:
        return Sandbox().from_string(source), (ReplyStatus.TEXT, "")
    except MemoryError:
        return None, (ReplyStatus.MEMORY, MEMORY_MESSAGE)
    except TemplateSyntaxError as error:
        return None, (ReplyStatus.FAILED, f"error in line {error.lineno}: {error.message}"[:_MAX_ERROR_CHARACTERS])
    except _TEMPLATE_FAULTS as error:
        return None, (ReplyStatus.FAILED, f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS])


def _render(template: Template, request: bytearray) -> Reply:
    try:
        return ReplyStatus.TEXT, render_bounded(template, json.loads(request.decode("utf-8", "surrogatepass")))
    except MemoryError:
        return ReplyStatus.MEMORY, MEMORY_MESSAGE
    except ConversationRefused as error:
        return ReplyStatus.REFUSED, str(error.message)[:_MAX_ERROR_CHARACTERS]
    except SecurityError as error:
        return ReplyStatus.STOPPED, str(error)[:_MAX_ERROR_CHARACTERS]
    except _TEMPLATE_FAULTS as error:
        return ReplyStatus.FAILED, f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]


class ConversationRefused(TemplateError):
    """The template called `raise_exception`: its author considers the conversation invalid."""


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
    """Render a template of this sandbox. Raises `SecurityError` if it exceeds the bounds."""
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
