"""Grammars of structured output: JSON schemas, regular expressions, choices and context-free grammars.

The library llguidance compiles a grammar and computes the tokens that may come next. Compilation runs in the text pool
and is bounded: by the size of the source here, and by the library's limits on the work for a grammar and for each of
its steps. JSON is written with one separator style, `", "` and `": "`, and no other white space, so a model cannot fill
the context with spaces, and most of what a schema prescribes is forced.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from app.errors import InvalidRequest
from app.text.rust_panics import ConvertRustErrors

MAX_SCHEMA_CHARACTERS = 2**17
MAX_GRAMMAR_CHARACTERS = 2**16
MAX_CHOICES = 1500  # the library's limit on alternatives at one place is 2,000
MAX_PROPERTIES = 1000  # of one object; the library's time grows with their square
# The library follows references recursively. 1,000 rules need less than 8 MiB of stack, and so do 256 references of
# objects to objects.
MAX_RULES = 512
MAX_REFERENCES = 256
_STACK_BYTES = 64 * 2**20
MAX_KEPT_GRAMMARS = 16
# The library's defaults for the work of one step allow 14 ms; a step of the server takes as long.
_LIMITS = LLParserLimits(
    step_lexer_fuel=100_000, max_lexer_states=20_000, max_grammar_size=250_000, verbose_errors=False
)
_JSON_STYLE: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Texts in JSON strings by length: the library keeps the masks of the tokens that match each. With more lengths than its
# own, 10 and 30, masks in strings of limited length take a third of the time.
_SLICES = (*(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (3, 6, 9, 12, 16, 30)), r'[^"\\\x00-\x1F\x7F]+')
_UNFOLLOWED = "no token that the grammar allows was possible"

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as a client gives it.

    `text` is a JSON schema, a regular expression, a JSON list of strings, a grammar in Lark or GBNF syntax, or a grammar
    in llguidance's Lark syntax. `field` is the client's name for it, used in error messages. If `after` is not empty,
    the grammar begins after the first occurrence of this text, and any text may come before it. `alternative` is
    another grammar, in llguidance's Lark syntax, which the text may follow instead.
    """

    kind: GrammarKind
    text: str
    field: str
    after: str = ""
    alternative: str = ""


def json_style(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema for use inside a Lark grammar, with the server's separator style."""
    return {**schema, "x-guidance": dict(_JSON_STYLE)}


class CompiledGrammar:
    """A grammar for one vocabulary. Any thread may use it."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._eos_token_ids = matcher, eos_token_ids

    def start(self) -> MatcherState:
        """Return the state before the first token of a sequence."""
        return MatcherState(self._matcher.deep_copy(), self._eos_token_ids)


class MatcherState:
    """The place in a grammar that one sequence has reached; see `messages.GrammarState`."""

    __slots__ = ("_eos_token_ids", "_matcher", "error", "finished")

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._eos_token_ids = matcher, eos_token_ids
        self.finished = False
        self.error = ""

    def fill_masks(self, address: int, row_bytes: int, draft_ids: Sequence[int]) -> None:
        """Write the mask of the next token, and of the one after each draft token."""
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(address, row_bytes)
        for place, token_id in enumerate(draft_ids, 1):
            matcher.consume_token(token_id)
            matcher.unsafe_compute_mask_ptr(address + place * row_bytes, row_bytes)
        if draft_ids:
            matcher.rollback(len(draft_ids))
        self._check()

    def advance(self, token_id: int) -> None:
        """Take a sampled token."""
        if self.finished or self.error:
            return
        if token_id in self._eos_token_ids:
            self.finished = True
            if not self._matcher.is_accepting():
                self.error = _UNFOLLOWED
            return
        self._matcher.consume_token(token_id)
        self._check()
        self.finished = not self.error and self._matcher.is_stopped()

    def count_valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may follow in order and leave the text unfinished."""
        known = next((place for place, one in enumerate(token_ids) if one in self._eos_token_ids), len(token_ids))
        count = self._matcher.try_consume_tokens(list(token_ids[:known]))
        stopped = self._matcher.is_stopped()
        if count:
            self._matcher.rollback(count)
        self._check()
        return max(count - stopped, 0)

    def forced_tokens(self) -> Sequence[int]:
        """Return the tokens of the text that must follow."""
        return [] if self.finished or self.error else self._matcher.compute_ff_tokens()

    def _check(self) -> None:
        if self._matcher.is_error():
            self.error = self._matcher.get_error().partition("\n")[0] or _UNFOLLOWED


class GrammarCompiler:
    """Compiler of grammars for one vocabulary, with the compiled grammars that were used last.

    `tokenizer_json` returns the text of tokenizer.json. `vocab_size` is the number of logits. The library's form of the
    vocabulary is built at the first request, which takes about 10 µs per token.
    """

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer_json, self._vocab_size, self._eos_token_ids = tokenizer_json, vocab_size, eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compile a grammar, or return it if it was compiled before.

        Raises:
            InvalidRequest: The source is too large, is not valid, or has something that the library cannot do, which
                the message names.
        """
        with self._lock:
            kept = self._kept.get(source)
            if kept is not None:
                self._kept.move_to_end(source)
                return kept
        vocabulary = self._vocabulary()
        check_source(source)
        matcher = _on_large_stack(
            lambda: LLMatcher(vocabulary, _definition(source), log_level=0, limits=_LIMITS), source
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is too much work for the first token is refused before it is admitted
        if matcher.is_error():
            raise _refusal(source, matcher.get_error())
        compiled = CompiledGrammar(matcher, self._eos_token_ids)
        with self._lock:
            self._kept[source] = compiled
            if len(self._kept) > MAX_KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return compiled

    def _vocabulary(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    eos = sorted(self._eos_token_ids) or None
                    self._tokenizer = LLTokenizer(
                        self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=eos, slices=list(_SLICES)
                    )
                except ValueError as error:
                    raise InvalidRequest(
                        f"Structured output is not possible with this checkpoint's tokenizer: {error}"
                    ) from error
            return self._tokenizer


def _on_large_stack(make: Callable[[], LLMatcher], source: GrammarSource) -> LLMatcher:
    """Return the result of `make`, which runs on a thread whose stack the recursion of large grammars fits."""
    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="armature-grammar")
            made = pool.submit(make)
        finally:
            threading.stack_size(before)
    pool.shutdown(wait=False)
    try:
        return made.result()
    except (ValueError, RecursionError, GbnfToLarkError) as error:
        raise _refusal(source, str(error)) from error


_STACK_LOCK = threading.Lock()


def _definition(source: GrammarSource) -> str:
    """Return the library's definition of a grammar."""
    body = _library_grammar(source)
    if not source.after and not source.alternative:
        return body
    # the library writes JSON for the kinds that it converts, and leaves Lark as it is
    inner = json.loads(body)["grammars"][0] if body.startswith("{") else {"lark_grammar": body}
    grammars = [{**inner, "name": "body"}]
    first = "start: inner\ninner: @body\n"
    if source.alternative:
        grammars.append({"name": "other", "lark_grammar": source.alternative})
        first = "start: inner\ninner: @body | @other\n"
    if source.after:
        first = first.replace("start: inner", "start: before inner")
        first += f"before[suffix={json.dumps(source.after)}]: /(?s:.*)/\n"
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": first}, *grammars]})


def check_source(source: GrammarSource) -> None:
    """Check the bounds of a grammar. Raises an `InvalidRequest` that names its field."""
    is_schema = source.kind in ("json_schema", "lark")
    size, limit = (
        len(source.text) + len(source.alternative),
        MAX_SCHEMA_CHARACTERS if is_schema else MAX_GRAMMAR_CHARACTERS,
    )
    references = source.text.count('"$ref"') + source.alternative.count('"$ref"')
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


# The head of a rule in Lark or GBNF. A colon inside of a text may be counted too.
_RULE = re.compile(r"[A-Za-z_][\w-]*\s*(?:\[[^\]]*\])?\s*::?=?")


def _most_properties(source: GrammarSource) -> int:
    """Return the largest number of members of any object in a schema; 0 if it is no JSON, which the library refuses."""
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
        return LLMatcher.grammar_from_json_schema(source.text, overrides=dict(_JSON_STYLE))  # type: ignore[arg-type]
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.text)
    if source.kind == "choice":
        return llguidance.grammar_from("choice", source.text)
    if source.kind == "lark":
        return LLMatcher.grammar_from_lark(source.text)
    with ConvertRustErrors(partial(InvalidRequest, field=source.field), f"{source.field} cannot be followed"):
        return LLMatcher.grammar_from_lark(any_to_lark(source.text))


def _refusal(source: GrammarSource, reason: str) -> InvalidRequest:
    sentence = " ".join(reason.split())
    return InvalidRequest(f"{source.field} cannot be followed: {sentence[:500]}", field=source.field)
