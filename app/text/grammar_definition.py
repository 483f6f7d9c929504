"""Sources of grammars, and their conversion to the library's definitions.

Conversion and compilation run on a client's text, so they run in a process with limits (`text/grammar_process.py`).
JSON is written with one separator style, `", "` and `": "`, and no other white space, so a model cannot fill the
context with spaces, and most of what a schema prescribes is forced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from json import JSONDecodeError
from typing import Any

import llguidance
from llguidance import LLMatcher, LLParserLimits

from app.errors import InvalidRequest
from app.messages import GrammarSource
from app.text.gbnf import gbnf_to_lark, is_gbnf
from app.text.schema_narrowing import close_schema, narrow_schema

MAX_SCHEMA_CHARACTERS = 2**18
MAX_GRAMMAR_CHARACTERS = 2**16
MAX_CHOICES = 1500  # the library's limit on alternatives at one place is 2,000
MAX_PROPERTIES = 1000  # of one object; the library's time grows with their square
# The library follows references recursively. 1,000 rules need less than 8 MiB of stack, and so do 256 references of
# objects to objects.
MAX_RULES = 512
MAX_REFERENCES = 256
# The library's defaults for the work of one step allow 14 ms; a step of the server takes as long.
LIMITS = LLParserLimits(
    step_lexer_fuel=100_000, max_lexer_states=20_000, max_grammar_size=250_000, verbose_errors=False
)
STACK_BYTES = 64 * 2**20
# Escapes such as `\u4f60` are allowed wherever no pattern says what a string contains.
_JSON_STYLE: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allow_general_unicode_escapes": True,
}

_SCHEMA_IN_LARK = '%json {"x-guidance": '  # as `json.dumps` writes what `json_style` returns


def json_style(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema for use inside a Lark grammar, after `%json `. `define` makes it ready for the library."""
    own = {word: value for word, value in schema.items() if word != "x-guidance"}
    return {"x-guidance": dict(_JSON_STYLE), **own}


def literal(text: str) -> str:
    """Return a text that is not empty as Lark has it."""
    return json.dumps(text, ensure_ascii=False)


def define(source: GrammarSource) -> str:
    """Return the library's definition of a grammar. Raises an `InvalidRequest` if the source cannot be converted."""
    try:
        body = _library_grammar(source)
    except (ValueError, RecursionError) as error:
        raise refusal(source, str(error)) from error
    if not (source.after or source.alternative or source.answer):
        return body
    # the library writes JSON for the kinds that it converts, and leaves Lark as it is
    inner = json.loads(body)["grammars"][0] if body.startswith("{") else {"lark_grammar": body}
    grammars = [{**inner, "name": "body"}]
    first = "inner: " + (literal(source.answer) + " " if source.answer else "") + "@body"
    if source.alternative:
        grammars.append({"name": "other", "lark_grammar": _with_ready_schemas(source.alternative)})
        first += " | @other"
    if source.after:
        opening = literal(source.opening) + " " if source.opening else ""
        first += f"\nstart: {opening}before space? inner" + (" | inner" if source.opening else "")
        first += f"\nbefore[suffix={literal(source.after)}]: /(?s:.*)/\nspace: /[ \\n]{{1,4}}/\n"
    else:
        first += "\nstart: inner\n"
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": first}, *grammars]})


def check_source(source: GrammarSource) -> None:
    """Check the bounds of a grammar. Raises an `InvalidRequest` that names its field."""
    is_schema = source.kind in ("json_schema", "lark")
    size, limit = (
        len(source.text) + len(source.alternative),
        MAX_SCHEMA_CHARACTERS if is_schema else MAX_GRAMMAR_CHARACTERS,
    )
    references = len({*_REFERENCE.findall(source.text), *_REFERENCE.findall(source.alternative)})
    found = [("characters", size, limit), ("references", references, MAX_REFERENCES)]
    if source.kind == "grammar":
        for name in ("%json", "%lark", "%regex"):
            if name in source.text:
                raise InvalidRequest(f"{source.field} cannot be followed: it uses {name}.", field=source.field)
        found.append(("rules", len(_RULE.findall(source.text)), MAX_RULES))
    if is_schema:
        found.append(("properties of one object", _most_properties(source), MAX_PROPERTIES))
    for what, count, most in found:
        if count > most:
            raise InvalidRequest(f"{source.field} has {count} {what}, and the limit is {most}.", field=source.field)


_REFERENCE = re.compile(r'"\$ref"\s*+:\s*+("[^"]*+")')
# References for which `json_repeats.py` does not look.
_OTHER_REFERENCE = re.compile(r'"\$(?:dynamicRef|recursiveRef|anchor)"|"\$ref"\s*+:\s*+"(?!#"|#/)')
# The head of a rule in Lark or GBNF. A colon inside of a text may be counted too.
# Each character is read a bounded number of times.
_RULE = re.compile(r"(?<![\w-])[A-Za-z_][\w-]*+\s*+(?:\[[^\[\]]*+\]\s*+)?+:")


def _most_properties(source: GrammarSource) -> int:
    """Return the largest number of members of any object in a schema; 0 if it is no JSON."""
    try:
        pending = [json.loads(source.text)] if source.kind == "json_schema" else []
    except (ValueError, RecursionError):
        return 0
    most = 0
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            most = max(most, len(value))
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return most


def _library_grammar(source: GrammarSource) -> str:
    if source.kind == "json_schema":
        return _schema_grammar(source.text, source.is_open)
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.text)
    if source.kind == "choice":
        return llguidance.grammar_from("choice", source.text)
    if source.kind == "lark":
        return LLMatcher.grammar_from_lark(_with_ready_schemas(source.text))
    return LLMatcher.grammar_from_lark(gbnf_to_lark(source.text) if is_gbnf(source.text) else source.text)


def _with_ready_schemas(grammar: str) -> str:
    """Return a Lark grammar of ours with narrowed and closed schemas.

    Texts of clients in it have their quotes escaped, so they never look like `json_style`.
    """
    done, place = "", 0
    while (start := grammar.find(_SCHEMA_IN_LARK, place)) >= 0:
        start += len("%json ")
        schema, end = json.JSONDecoder().raw_decode(grammar, start)
        style = schema.pop("x-guidance")
        with suppress(TypeError, AttributeError, KeyError):  # the library says what is no schema
            schema = close_schema(narrow_schema(schema))
        done += grammar[place:start] + json.dumps({**schema, "x-guidance": style})
        place = end
    return done + grammar[place:]


def _schema_grammar(text: str, is_open: bool) -> str:
    with suppress(JSONDecodeError, TypeError, AttributeError, KeyError):  # the library says what is no schema
        schema = json.loads(text)
        text = (
            "{}"
            if schema is True
            else json.dumps(close_schema(narrow_schema(schema, is_open, not _OTHER_REFERENCE.search(text)), is_open))
        )
    return LLMatcher.grammar_from_json_schema(text, overrides=dict(_JSON_STYLE))  # type: ignore[arg-type]


def refusal(source: GrammarSource, reason: str) -> InvalidRequest:
    if source.kind == "lark":  # our own text, which says nothing to a client
        reason = re.sub(r"^at \d+\(\d+\): ", "", reason.partition("\n")[0])
    sentence = " ".join(reason.split())
    return InvalidRequest(f"{source.field} cannot be followed: {sentence[:500]}", field=source.field)
