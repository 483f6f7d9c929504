"""Grammars: what they allow, what they force, and what is refused by name."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path

import numpy
import pytest

from app.errors import InvalidRequest, ServiceStopping
from app.messages import GrammarSource
from app.text import child_process
from app.text.child_process import CANCELLED, ReplyStatus, WorkCancelled
from app.text.grammar import MAX_KEPT_GRAMMARS, GrammarCompiler, MatcherState
from app.text.grammar_definition import (
    MAX_GRAMMAR_CHARACTERS,
    MAX_PROPERTIES,
    MAX_REFERENCES,
    MAX_RULES,
    check_source,
    json_style,
)
from app.text.grammar_process import GrammarProcess
from app.text.tokenizer import Tokenizer
from small_tokenizers import FORMS, byte_level, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(write_tokenizer(directory, byte_level()))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 20)


def chain_of_objects(length: int) -> str:
    """A schema whose objects refer to one another, as deeply as there are references."""
    definitions: dict[str, object] = {
        f"a{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}, "required": ["x"]}
        for n in range(length - 1)
    }
    return json.dumps({"$ref": "#/$defs/a0", "$defs": definitions | {f"a{length - 1}": {"type": "null"}}})


def chain_of_rules(length: int) -> str:
    return "root ::= r1\n" + "".join(f'r{n} ::= "x" r{n + 1}\n' for n in range(1, length)) + f'r{length} ::= "y"\n'


def source(kind: str, text: str, **more: str) -> GrammarSource:
    return GrammarSource(kind, text, "the_field", **more)  # type: ignore[arg-type]


def follow(state: MatcherState, tokenizer: Tokenizer, text: str) -> str:
    """Follows a text and returns the part that was allowed."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    count = 0
    for token_id in ids:
        if token_id not in allowed(state, tokenizer):
            break
        state.advance(token_id)
        count += 1
    return tokenizer.decode(ids[:count])


def allowed(state: MatcherState, tokenizer: Tokenizer) -> set[int]:
    words = numpy.zeros(-(-(tokenizer.vocab_size + 20) // 32), numpy.uint32)
    state.fill_masks(words.ctypes.data, words.nbytes, ())
    return set(numpy.flatnonzero(numpy.unpackbits(words.view(numpy.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("given", "complete", "longest"),
    [
        (source("json_schema", '{"type": "object"}'), '{"a": [1, 2], "b": null}', '{"a": [1, 2]'),
        (source("regex", "[0-9]{2}x?"), "12x", "12"),
        (source("choice", '["the fox", "the hen"]'), "the fox", "the "),
        (source("grammar", 'root ::= "a" | "b" root'), "bba", "bb"),
        (source("grammar", 'start: "a" | "b" start'), "bba", "bb"),
    ],
)
def test_each_kind(
    compiler: GrammarCompiler, tokenizer: Tokenizer, given: GrammarSource, complete: str, longest: str
) -> None:
    state = compiler.compile(given).start()
    assert follow(state, tokenizer, complete) == complete
    assert state.finished and not state.error
    other = compiler.compile(given).start()
    assert follow(other, tokenizer, longest + "?!").startswith(longest.rstrip())
    assert not other.finished


def test_an_end_token_ends_what_may_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(source("regex", "[0-9]+")).start()
    (eos,) = tokenizer.eos_token_ids
    assert eos not in allowed(state, tokenizer)
    follow(state, tokenizer, "12")
    assert not state.finished and eos in allowed(state, tokenizer)
    state.advance(eos)
    assert state.finished and not state.error
    early = compiler.compile(source("regex", "[0-9]+")).start()
    early.advance(eos)
    assert early.error


def test_forced_text_is_known_and_drafts_are_checked(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    world = {"properties": {"world": {"const": "x"}}, "required": ["world"], "additionalProperties": True}
    schema = {"type": "object", **world}
    state = compiler.compile(source("json_schema", json.dumps(schema))).start()
    forced = state.forced_tokens()
    assert tokenizer.decode(forced).startswith('{"world": "')
    assert state.count_valid(forced) == len(forced)
    assert state.count_valid([*forced[:3], 70, 71]) == 3
    assert state.count_valid(list(tokenizer.eos_token_ids)) == 0
    before = allowed(state, tokenizer)
    rows = numpy.zeros((3, -(-(tokenizer.vocab_size + 20) // 32)), numpy.uint32)
    state.fill_masks(rows.ctypes.data, rows.strides[0], forced[:2])
    assert allowed(state, tokenizer) == before, "drafts do not advance the state"
    state.advance(forced[0])
    second = set(numpy.flatnonzero(numpy.unpackbits(rows[1].view(numpy.uint8), bitorder="little")).tolist())
    assert second == allowed(state, tokenizer)


def test_text_before_the_grammar_and_another_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    given = source("choice", '["the fox"]', after="</think>", alternative='start: "the hen"\n')
    for text in ("said hello</think>the fox", "</think>the hen"):
        state = compiler.compile(given).start()
        assert follow(state, tokenizer, text) == text
        assert state.finished


def test_an_impossible_token_is_an_error_of_this_text_alone(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(source("regex", "[0-9]+"))
    state, other = grammar.start(), grammar.start()
    state.advance(tokenizer.encode("a", False)[0])
    assert state.error and not other.error
    allowed(state, tokenizer)
    assert follow(other, tokenizer, "12") == "12"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (source("json_schema", '{"type": "object", "properties": {"a": {"not": {}}}}'), '"not"'),
        (source("json_schema", '{"$ref": "http://example.com/x"}'), "http://example.com/x"),
        (source("json_schema", "[1"), "EOF"),
        (source("json_schema", "[" * 100_000), "recursion"),
        (source("regex", "(a"), "unclosed group"),
        (source("regex", "(?=a)b"), "look-around"),
        (source("grammar", "root ::= ("), "Expected"),
        (source("grammar", "("), "the_field"),
        (source("grammar", 'a ::= "b"'), "No 'root' rule"),
        (source("regex", "a" * (MAX_GRAMMAR_CHARACTERS + 1)), str(MAX_GRAMMAR_CHARACTERS)),
        (source("grammar", 'start: %json {"type": "object"}'), "%json"),
        (source("json_schema", json.dumps({"properties": {f"p{n}": {} for n in range(MAX_PROPERTIES + 1)}})), "1001"),
        (source("json_schema", chain_of_objects(MAX_REFERENCES + 1)), str(MAX_REFERENCES)),
        (source("grammar", chain_of_rules(MAX_RULES + 1)), str(MAX_RULES)),
    ],
    ids=lambda value: str(getattr(value, "text", value))[:40],
)
def test_what_cannot_be_followed_is_refused_by_name(
    compiler: GrammarCompiler, given: GrammarSource, named: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(given)
    assert refused.value.field == "the_field"
    assert named in refused.value.message
    assert len(refused.value.message) < 700


def test_a_grammar_is_compiled_once_and_few_are_kept(compiler: GrammarCompiler) -> None:
    first = compiler.compile(source("regex", "first"))
    assert compiler.compile(source("regex", "first")) is first
    for number in range(MAX_KEPT_GRAMMARS):
        compiler.compile(source("regex", f"other{number}"))
    assert compiler.find(source("regex", "first")) is first, "a request that holds it may still be sent"
    del first
    assert compiler.find(source("regex", "first")) is None


@pytest.mark.parametrize("text", [chain_of_objects(MAX_REFERENCES), chain_of_rules(MAX_RULES - 2)])
def test_the_deepest_grammars_fit_the_stack(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    given = source("json_schema" if text.startswith("{") else "grammar", text)
    results: list[int] = []

    def run() -> None:
        state = compiler.compile(given).start()
        for _ in range(20):
            token_id = min(allowed(state, tokenizer))
            state.forced_tokens()
            state.advance(token_id)
        results.append(len(state.error))

    before = threading.stack_size(2**19)  # of a thread of macOS, the smallest that is served on
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert results == [0]


ESCAPED = (
    r"\u4f60\u597d",
    r"\ud83d\ude00",
    r"a\/b",
    r"\/\/",
    r"K\u00f6ln \u20AC",
    r"\u0041\n\t\"\\",
    r"\\\\/",
    "plain ü",
)


@pytest.mark.parametrize("value", ESCAPED)
@pytest.mark.parametrize(
    "schema", [{"type": "object"}, {"properties": {"d": {"type": "string"}}}, {"properties": {"d": {"maxLength": 30}}}]
)
def test_escapes_in_json_are_kept(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, object], value: str
) -> None:
    text = f'{{"d": "{value}"}}'
    state = compiler.compile(source("json_schema", json.dumps({"type": "object", **schema}))).start()
    for token_id in single_bytes(tokenizer, text):
        assert token_id in allowed(state, tokenizer)
        state.advance(token_id)
    assert not state.error and state.finished


def test_a_slash_is_an_escape_in_json_alone(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for given in (source("regex", r"\\(u002f|n)"), source("json_schema", '{"const": "\\n"}')):
        state = compiler.compile(given).start()
        for token_id in single_bytes(tokenizer, '"' * (given.kind == "json_schema") + "\\"):
            state.advance(token_id)
        assert not state.error and not set(single_bytes(tokenizer, "/")) & allowed(state, tokenizer)


def test_drafts_with_a_slash_do_not_advance_the_state(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(source("json_schema", '{"type": "string"}')).start()
    ids = single_bytes(tokenizer, '"a\\/b"')
    rows = numpy.zeros((len(ids) + 1, -(-(tokenizer.vocab_size + 20) // 32)), numpy.uint32)
    for _ in range(2):
        state.fill_masks(rows.ctypes.data, rows.strides[0], ids[:-1])
        bits = numpy.unpackbits(rows.view(numpy.uint8), bitorder="little", axis=1)
        assert all(bits[place, token_id] for place, token_id in enumerate(ids))
    for token_id in ids:
        state.advance(token_id)
    assert state.finished and not state.error


def test_forced_tokens_are_computed_once(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(source("regex", "[xy](fox){300}!")).start()
    assert list(state.forced_tokens()) == []
    state.advance(single_bytes(tokenizer, "x")[0])
    written = ""
    while not state.finished:
        forced = list(state.forced_tokens())
        assert state.count_valid(forced[:4]) >= min(len(forced), 4) - 1
        token_id = forced[0] if forced else min(allowed(state, tokenizer))
        written += tokenizer.decode([token_id])
        state.advance(token_id)
    assert written == "fox" * 300 + "!" and not state.error


def single_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of single bytes that spell a text."""
    by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [by_byte[bytes([byte])] for byte in text.encode()]


HOSTILE = {
    "a large multiple": source("json_schema", '{"type": "integer", "multipleOf": 99999989}'),
    "patterns together": source(
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f".*{chr(97 + n)}{{{n % 5 + 1}}}.*"} for n in range(20)]}),
    ),
    "nested repetitions": source("regex", "(a{1000}){1000}"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_compiles_without_end_is_refused(compiler: GrammarCompiler, name: str) -> None:
    assert compiler.compile_quickly(HOSTILE[name]) is None, "it is tried with a longer limit next"
    with pytest.raises(InvalidRequest, match=r"CPU time|memory") as refused:
        compiler.compile_slowly(HOSTILE[name])
    assert refused.value.field == "the_field"
    with pytest.raises(InvalidRequest, match=r"CPU time|memory"):  # known now: nothing is compiled again
        compiler.compile_quickly(HOSTILE[name])
    assert compiler.compile(source("regex", "still served")).start()


@pytest.mark.full
def test_a_client_that_leaves_ends_its_compilation(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "MIN_WALL_SECONDS", 600.0)
    process = GrammarProcess({"vocab_size": 300, "special": []}, 300.0)
    left = threading.Event()
    results: list[object] = []

    def compile_it() -> None:
        CANCELLED.set(left)
        try:
            process.compile(HOSTILE["a large multiple"])
        except WorkCancelled as error:
            results.append(error)

    thread = threading.Thread(target=copy_context().run, args=(compile_it,))
    thread.start()
    left.set()
    thread.join()
    assert len(results) == 1
    assert process.compile(source("regex", "a"))[0] is ReplyStatus.TEXT, "another process serves the next"
    process.close()
    with pytest.raises(ServiceStopping):
        process.compile(source("regex", "a"))


LONG = {
    "a literal": 'start: "{}"',
    "a class": "root ::= [{}]",
    "a comment": 'root ::= "a" # {}',
    "a name": 'root ::= {}\n{} ::= "a"',
    "options": "{0}[{0}[{0}",
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("letter", ["a", " ", "a[", "_ ", "-a"])
def test_the_rules_of_a_grammar_are_counted_in_linear_time(name: str, letter: str) -> None:
    text = LONG[name].format(*2 * [letter * 15_000])
    with suppress(InvalidRequest):
        check_source(source("grammar", text))  # with a search that backtracks, minutes


@pytest.mark.parametrize("text", ['a: "x"', 'start: "x"\nb : "y"', "a ::= b\nb-c ::= d", 'a[lazy]: "x"', 'a [x] : "x"'])
def test_each_head_of_a_rule_is_counted(text: str) -> None:
    separator, heads = "\n", MAX_RULES // text.count(":" if "::" not in text else "::=")
    check_source(source("grammar", separator.join([text] * heads)))
    with pytest.raises(InvalidRequest, match="rules, and the limit is"):
        check_source(source("grammar", separator.join([text] * (heads + 1))))


def test_schemas_inside_of_lark_are_made_ready_and_literals_stay(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = {"properties": {"a": {"type": "string", "format": "password"}}, "not": {"required": ["b"]}}
    literal = json.dumps('%json {"x-guidance": ')
    lark = f"start: {literal} arguments\narguments: %json {json.dumps(json_style(schema))}\n"
    for given in (source("lark", lark), source("choice", '["x"]', alternative=lark)):
        text = '%json {"x-guidance": {"a": "y"}'
        state = compiler.compile(given).start()
        assert follow(state, tokenizer, text) == text and state.finished
        other = compiler.compile(given).start()
        assert follow(other, tokenizer, text.replace('"a"', '"b"')) != text


def test_a_schema_inside_of_lark_is_refused_by_name(compiler: GrammarCompiler) -> None:
    schemas = [{"not": {"pattern": "x"}}, {"uniqueItems": True}, {"oneOf": [{"properties": {"a": 1}}] * 2}]
    for schema in schemas:
        with pytest.raises(InvalidRequest) as refused:
            compiler.compile(source("lark", f"start: %json {json.dumps(json_style(schema))}"))
        assert refused.value.field == "the_field"


# ---- added tokens --------------------------------------------------------------------------------------------------

ADDED, SPECIAL = "<tool_call>", "<|mark|>"


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with an added token that is text, as Qwen's `<tool_call>`, and one that is special."""
    inner = byte_level()
    inner.add_tokens([ADDED])
    inner.add_special_tokens([SPECIAL])
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("marked"), inner))


def spellings(tokenizer: Tokenizer, name: str) -> list[list[int]]:
    token_id = tokenizer.token_id(name)
    assert token_id is not None
    letters = [tokenizer.encode(part, add_special_tokens=False) for part in (name[0], name[1:])]
    return [[token_id], [*letters[0], *letters[1]]]


# With another possible text, since of what is forced the usual tokens alone are allowed.
NAMING = [
    ("lark", 'start: "xNAMEy" | "xz"', "x", "y"),
    ("lark", 'start: "x" before "y"\nbefore[suffix="NAME"]: /(?s:.*)/', "x", "y"),
    ("regex", "x(NAMEy+|z)", "x", "yyy"),
    ("choice", '["xNAMEy", "xz"]', "x", "y"),
    ("json_schema", '{"enum": ["xNAMEy", "xz"]}', '"x', 'y"'),
    ("grammar", 'root ::= "xNAMEy" | "xz"', "x", "y"),
]


@pytest.mark.cases(test=3)
@pytest.mark.parametrize("name", [ADDED, SPECIAL])
@pytest.mark.parametrize(("kind", "text", "before", "after"), NAMING)
def test_an_added_token_is_written_as_one_token_or_by_letters(
    marked: Tokenizer, kind: str, text: str, before: str, after: str, name: str
) -> None:
    given = source(kind, text.replace("NAME", name.replace("|", r"\|") if kind == "regex" else name))
    compiler = GrammarCompiler(marked, marked.vocab_size + 20)
    for spelling in spellings(marked, name):
        state = compiler.compile(given).start()
        start, end = (marked.encode(part, add_special_tokens=False) for part in (before, after))
        for token_id in [*start, *spelling, *end]:
            assert token_id in allowed(state, marked), (spelling, token_id)
            state.advance(token_id)
        assert not state.error
        (eos,) = marked.eos_token_ids
        assert state.finished or eos in allowed(state, marked)
    compiler.close()


def test_free_text_has_added_tokens_that_are_text_and_no_special_ones(marked: Tokenizer) -> None:
    compiler = GrammarCompiler(marked, marked.vocab_size + 20)
    state = compiler.compile(source("json_schema", '{"type": "string"}')).start()
    state.advance(marked.encode('"', add_special_tokens=False)[0])
    found = allowed(state, marked)
    assert marked.token_id(ADDED) in found
    assert marked.token_id(SPECIAL) not in found and not marked.eos_token_ids & found
    compiler.close()


def test_a_text_that_ends_a_completion_is_no_text_of_a_grammar(marked: Tokenizer) -> None:
    compiler = GrammarCompiler(marked, marked.vocab_size + 20)
    given = source("choice", json.dumps(["a</s>b", f"a{SPECIAL}"]))
    assert list(compiler.tokens_in(given).values()) == [SPECIAL]
    state = compiler.compile(given).start()
    state.advance(marked.encode("a", add_special_tokens=False)[0])
    assert not marked.eos_token_ids & allowed(state, marked)
    compiler.close()


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_forced_is_the_text_itself(form: str, tmp_path: Path) -> None:
    """A tokenizer may put a space in front of a text, or read a special token in it."""
    words = Tokenizer(write_tokenizer(tmp_path, FORMS[form]()))
    compiler = GrammarCompiler(words, words.vocab_size)
    state = compiler.compile(source("lark", 'start: "x the fox<|end|>"')).start()
    forced = state.forced_tokens()
    assert b"".join(map(words.token_bytes, forced)) == b"x the fox<|end|>"
    assert state.count_valid(forced) == len(forced) - 1, "the text is complete after the last one"
    compiler.close()
