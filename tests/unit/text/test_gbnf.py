"""GBNF grammars mean what they mean in llama.cpp, one character at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from app.errors import InvalidRequest
from app.messages import GrammarSource
from app.text.gbnf import GbnfError, gbnf_to_lark, is_gbnf
from app.text.grammar_definition import LIMITS, define
from hypothesis_examples import examples
from small_tokenizers import BYTE_VOCABULARY


def compiled(grammar: str) -> LLMatcher:
    matcher = LLMatcher(BYTE_VOCABULARY, define(GrammarSource("grammar", grammar, "f")), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(matcher: LLMatcher, text: str) -> bool:
    one, ids = matcher.deep_copy(), list(text.encode())
    return one.try_consume_tokens(ids) == len(ids) and one.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= w "ab"\nw ::= [a-z]+', ["ccab", "abab", "xab"], ["ab", "cc", "ccabk"]),
        ('root ::= "a" "b" | "ab" "c"', ["ab", "abc"], ["a", "abb"]),
        (r'root ::= [a\-]+ "\u00e9" [\U0001F600] "\x41" "\t\r\n\"\\\[\]"', ['a-é😀A\t\r\n"\\[]'], ["a"]),
        (r"root ::= [^\u0000-\u001f]+", ["aé", " "], ["\x1f", "a\nb"]),
        ("root ::= .", ["a", "\n", "😀"], ["", "ab"]),
        ("root ::= [a-] [-a] [^-]", ["--x", "aax"], ["bax", "---"]),
        ('start ::= "a"\nroot ::= start', ["a"], ["b"]),
        ('root ::= a-b a_b A-b aB\na-b ::= "1"\na_b ::= "2"\nA-b ::= "3"\naB ::= "4"', ["1234"], ["1111"]),
        ('root ::= x{2} y{1,} z{0,2} x{0}\nx::="x"\ny ::= "y"\nz ::= "z"', ["xxyzz", "xxyy"], ["xyz", "xxyzzz", "xxyx"]),
        ('root ::= "ab"* "c"', ["c", "ababc"], ["abbc"]),
        ('root ::= ("a" |\n  # a comment\n  "b"\n)+ # another\n\n', ["ab"], ["", "c"]),
        ('root ::= "a" |\n "b"\nx ::= "c"', ["a", "b"], ["c"]),
        ('root ::= "" | "a" root', ["", "aaa"], ["b"]),
        ('root ::= "(" root ")" root | ""', ["(()())()"], ["(()"]),
        ('root ::= root "+" n | n\nn ::= [0-9]+', ["1+22+3"], ["1+", "+1"]),
        ('root ::= x\nx ::= "a"\nx ::= "b"', ["b"], ["a"]),
        ("root ::= [あ-ん]+", ["こん"], ["a"]),
    ],
)  # fmt: skip
def test_languages(grammar: str, good: list[str], bad: list[str]) -> None:
    matcher = compiled(grammar)
    for text in good:
        assert accepts(matcher, text), text
    for text in bad:
        assert not accepts(matcher, text), text


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ('root ::= "a', "the grammar ends"),
        ("root ::= [a", "the grammar ends"),
        (r'root ::= "\q"', r"escape sequence \q"),
        (r'root ::= "\u12"', r"escape sequence \u12"),
        (r'root ::= "\ud800"', "character of Unicode"),
        (r'root ::= "\UFFFFFFFF"', "character of Unicode"),
        ("root ::= [z-a]", "lower one"),
        ("root ::= []", "in [ ]"),
        ("root ::= x", "Rule 'x' not found"),
        ('root ::= ("a"', "Expected )"),
        ("root ::= *", "before *"),
        ('root ::= "a"{2001}', "2000"),
        ('root ::= "a"{3,2}', "lower one first"),
        ('root ::= "a"{x}', "a number"),
        ("root ::= <think>", "tokens"),
        ('root ::= "a" )', "end of the line"),
        ('x ::= "a"', "No 'root' rule"),
        ('root ::= "a"\n!', "line 2"),
    ],
)
def test_faults_are_named(grammar: str, named: str) -> None:
    with pytest.raises(GbnfError) as fault:
        gbnf_to_lark(grammar)
    assert named in str(fault.value)
    with pytest.raises(InvalidRequest):
        define(GrammarSource("grammar", grammar, "f"))


def test_the_two_syntaxes_are_told_apart() -> None:
    assert is_gbnf('# start : x\nstart ::= "a"\nroot ::= start') and is_gbnf("a-b::=x")
    assert not is_gbnf('start: "a ::= b"\n') and not is_gbnf("%llguidance {}\nstart: A")


LETTERS = st.text("ab", min_size=1, max_size=2)
ATOMS = st.one_of(
    st.tuples(st.just("text"), LETTERS),
    st.tuples(st.just("class"), st.sampled_from(["a", "b", "ab", "^a", "a-c", "^b-c"])),
    st.tuples(st.just("any")),
)
TREES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(st.just("all"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("one"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("times"), inner, st.integers(0, 2), st.sampled_from([0, 1, None])),
        st.tuples(st.just("rule"), inner),
    ),
    max_leaves=8,
)


def written(tree: Any, rules: list[str]) -> str:
    """The tree in GBNF; rules of it are appended."""
    match tree:
        case ("text", text):
            return f'"{text}"'
        case ("class", inner):
            return f"[{inner}]"
        case ("any",):
            return "."
        case ("all", parts):
            return f"({' '.join(written(part, rules) for part in parts)})"
        case ("one", parts):
            return f"({' | '.join(written(part, rules) for part in parts)})"
        case ("times", part, least, more):
            signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
            most = "" if more is None else least + more
            return written(part, rules) + signs.get((least, more), f"{{{least},{most}}}")
        case ("rule", part):
            body = written(part, rules)
            rules.append(f"r{len(rules)} ::= {body}")
            return f"r{len(rules) - 1}"
    raise AssertionError(tree)


def ends(tree: Any, text: str, start: int) -> set[int]:
    """Where texts of the tree that begin at a place may end."""
    match tree:
        case ("text", part):
            return {start + len(part)} if text.startswith(part, start) else set()
        case ("class", _) | ("any",) if start == len(text):
            return set()
        case ("class", inner):
            listed = inner.lstrip("^").replace("a-c", "abc").replace("b-c", "bc")
            return {start + 1} if (text[start] in listed) != inner.startswith("^") else set()
        case ("any",):
            return {start + 1}
        case ("all", parts):
            places = {start}
            for part in parts:
                places = {end for place in places for end in ends(part, text, place)}
            return places
        case ("one", parts):
            return {end for part in parts for end in ends(part, text, start)}
        case ("rule", part):
            return ends(part, text, start)
        case ("times", part, least, more):
            return repeated_ends(part, text, start, least, len(text) + 2 if more is None else least + more)
    raise AssertionError(tree)


def repeated_ends(part: Any, text: str, start: int, least: int, most: int) -> set[int]:
    places, found = {start}, {start} if least == 0 else set()
    for count in range(1, most + 1):
        places = {end for place in places for end in ends(part, text, place)}
        found |= places if count >= least else set()
    return found


@settings(max_examples=examples(200), deadline=None)
@given(TREES, st.lists(st.text("abc\n", max_size=6), min_size=10, max_size=20))
def test_the_same_language_as_a_reference(tree: Any, texts: list[str]) -> None:
    rules: list[str] = []
    grammar = f"root ::= {written(tree, rules)}\n" + "\n".join(rules)
    matcher = compiled(grammar)
    for text in texts:
        assert accepts(matcher, text) == (len(text) in ends(tree, text, 0)), (grammar, text)


SAMPLES = {
    "arithmetic": ["1+2 = x\n", "(a *3)=y_1\n1=2\n"],
    "json": ['{"a": [1, 2.5e3, null, {"b": "\\u00e9\\n"}]}'],
    "json_arr": ['[\n{"a":1}]'],
    "list": ["- one\n- two, three\n"],
    "chess": ["1. e4 e5\n2. Nf3 Nc6\n"],
    "c": ["int main(){return 1;}"],
    "japanese": ["こんにちは世界"],
    "english": ["Hello there."],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_grammars_of_llama_cpp(name: str) -> None:
    """`LLAMA_CPP_GRAMMARS` is the folder `grammars` of llama.cpp."""
    folder = os.environ.get("LLAMA_CPP_GRAMMARS", "")
    if not folder:
        pytest.skip("LLAMA_CPP_GRAMMARS is not set")
    matcher = compiled((Path(folder) / f"{name}.gbnf").read_text(encoding="utf-8"))
    for text in SAMPLES[name]:
        assert accepts(matcher, text), text
        assert not accepts(matcher, text + "\0")
