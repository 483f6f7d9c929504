"""Objects of JSON schemas are closed, each key is written once, and what a schema says itself stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import InvalidRequest
from app.messages import GrammarSource
from app.text.grammar import GrammarCompiler
from app.text.schema_narrowing import close_schema
from app.text.tokenizer import Tokenizer
from small_tokenizers import byte_level, write_tokenizer

A, B = {"a": {"type": "integer"}}, {"b": {"type": "boolean"}}
OBJECT = {"type": "object", "properties": A}
REFERENCE = {"$ref": "#/$defs/base"}
DEFS = {"$defs": {"base": OBJECT}}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level()))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(write_tokenizer(directory, byte_level()))


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, text: str) -> bool:
    state = compiler.compile(GrammarSource("json_schema", json.dumps(schema), "f")).start()
    ids = tokenizer.encode(text, add_special_tokens=False)
    if state.count_valid(ids) < len(ids) - 1:
        return False
    for token_id in ids:
        state.advance(token_id)
    for end in tokenizer.eos_token_ids if not state.finished else ():
        state.advance(end)
    return not state.error


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (OBJECT, ['{"a": 1}', "{}"], ['{"a": 1, "a": 2}', '{"a": 1, "x": 2}', '{"x": 1}']),
        ({"properties": A}, ['{"a": 1}', "[1]"], ['{"x": 1}']),
        ({"type": "object", "properties": {}}, ["{}"], ['{"x": 1}']),
        ({"type": "object"}, ['{"x": 1, "y": {"z": 1}}'], []),
        ({"type": ["object", "null"], "properties": A}, ["null", '{"a": 1}'], ['{"x": 1}']),
        ({**OBJECT, "required": ["a", "b"]}, ['{"a": 1, "b": "x"}'], ['{"a": 1}', '{"a": 1, "b": 1, "c": 1}']),
        ({**OBJECT, "additionalProperties": True}, ['{"a": 1, "x": 2}'], ['{"a": 1, "a": 2}']),
        ({**OBJECT, "additionalProperties": {"type": "null"}}, ['{"a": 1, "x": null}'], ['{"a": 1, "x": 2}']),
        ({"type": "array", "items": OBJECT}, ['[{"a": 1}, {}]'], ['[{"x": 1}]']),
        ({"properties": {"o": OBJECT}}, ['{"o": {"a": 1}}'], ['{"o": {"x": 1}}']),
        ({"anyOf": [OBJECT, {"type": "null"}]}, ["null", '{"a": 1}'], ['{"x": 1}']),
        ({**DEFS, **REFERENCE}, ['{"a": 1}'], ['{"x": 1}']),
        ({**DEFS, "properties": {"o": REFERENCE}}, ['{"o": {"a": 1}}'], ['{"o": {"x": 1}}']),
        ({"allOf": [OBJECT, {"properties": B}]}, ['{"a": 1, "b": true}', "{}"], ['{"a": 1, "x": 2}']),
        ({**DEFS, "allOf": [REFERENCE, {"properties": B}]}, ['{"a": 1, "b": true}'], ['{"a": 1, "x": 2}']),
        ({**DEFS, **REFERENCE, "properties": B}, ['{"a": 1, "b": true}'], ['{"a": 1, "x": 2}']),
        (
            {**DEFS, "properties": {"o": REFERENCE, "p": {"allOf": [REFERENCE, {"properties": B}]}}},
            ['{"o": {"a": 1}, "p": {"a": 1, "b": true}}'],
            ['{"o": {"a": 1, "b": true}}', '{"p": {"x": 1}}'],
        ),
        ({"allOf": [{**OBJECT, "additionalProperties": True}, {"properties": B}]}, ['{"a": 1, "x": 2}'], []),
        ({"patternProperties": {"^x": {"type": "null"}}, "type": "object"}, ['{"x1": null}'], ['{"y": null}']),
        ({"$defs": {"t": {"properties": {"next": {"$ref": "#/$defs/t"}}, "type": "object"}}, "$ref": "#/$defs/t"},
         ['{"next": {"next": {}}}'], ['{"next": {"x": 1}}']),
        ({"type": "string", "format": "password"}, ['"x"'], []),
        ({"type": "string", "format": "date"}, ['"2026-01-01"'], ['"x"']),
        ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ['"-1.50"', '".5"', '"7."'], ['"-"', '"."', '""']),
        ({"enum": [{"properties": {"x": 1}}]}, ['{"properties": {"x": 1}}'], []),
        (True, ["1"], []),
    ],
    ids=lambda value: json.dumps(value)[:70] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_a_schema_allows(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert accepts(compiler, tokenizer, schema, text), text
    for text in bad:
        assert not accepts(compiler, tokenizer, schema, text), text


def test_a_schema_itself_does_not_change() -> None:
    schema = {**DEFS, "allOf": [REFERENCE, {"properties": B}]}
    text = json.dumps(schema)
    assert close_schema(schema) != schema and json.dumps(schema) == text
    assert close_schema([1]) == [1]


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#/nowhere"}, {"$ref": 3}, {"properties": [1], "allOf": 2}, {"required": 3, "properties": {"a": 4}}],
)
def test_what_is_no_schema_is_refused_by_the_library(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="f cannot be followed"):
        compiler.compile(GrammarSource("json_schema", json.dumps(schema), "f"))
