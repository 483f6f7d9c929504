"""A text with stop strings, cut into pieces anywhere, ends where the first of them to be complete begins."""

from __future__ import annotations

import time
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from app.text.detokenizer import StopStrings

letters = st.text("ab🙂\n", max_size=40)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The slow twin: the occurrence that ends first; of two that end together the longer."""
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, length, stop = min(found)
    return text[: end + length], stop


@given(st.lists(letters, max_size=12), st.lists(st.text("ab🙂\n", min_size=1, max_size=6), max_size=4))
def test_pieces_joined_are_the_text_cut_at_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    stream = StopStrings(stops)
    shown = [stream.push(piece) for piece in pieces]
    matched = stream.matched
    assert ("".join([*shown, stream.flush()]), matched) == cut("".join(pieces), stops)


def test_every_short_text_with_every_short_stop() -> None:
    words = ["".join(word) for length in range(9) for word in product("ab", repeat=length)]
    for text, stop in product(words, [word for word in words if 0 < len(word) < 6]):
        stream = StopStrings([stop])
        assert "".join([*map(stream.push, text), stream.flush()]) == cut(text, [stop])[0]


@given(st.lists(letters, max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_what_is_shown_could_not_have_been_a_stop_and_no_more_is_held_than_need_be(
    pieces: list[str], stops: list[str]
) -> None:
    stream, text, shown = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        shown += stream.push(piece)
        if stream.matched is not None:
            return
        held = text.removeprefix(shown)
        assert not held or any(stop.startswith(held) for stop in stops)
        longer = [text[-count:] for count in range(len(held) + 1, len(text) + 1)]
        assert not any(stop.startswith(end) for stop in stops for end in longer)


def test_nothing_comes_after_a_stop() -> None:
    stream = StopStrings(["\n\n"])
    assert [stream.push("one\n"), stream.push("\ntwo"), stream.push("three"), stream.flush()] == ["one", "", "", ""]
    assert stream.matched == "\n\n"


def test_the_longest_stops_cost_a_step_a_character() -> None:
    # Sixteen stops of 256 characters that are almost matched all the time; quadratic work would take minutes.
    stream = StopStrings(["a" * 240 + f"b{number:015d}" for number in range(16)])
    start = time.process_time()
    assert len("".join(stream.push("a" * 8) for _ in range(500)) + stream.flush()) == 4000
    assert time.process_time() - start < 5


def seen_cut(pieces: list[tuple[str, bool]], stop: str, hidden: list[str]) -> tuple[str, bool]:
    """The slow twin for one stop string: it sees hidden pieces if it contains one, and what is shown never does."""
    sees = any(name in stop for name in hidden)
    everything = [(character, is_hidden) for text, is_hidden in pieces for character in text]
    seen = [(character, is_hidden) for character, is_hidden in everything if sees or not is_hidden]
    place = "".join(character for character, _ in seen).find(stop)
    shown = seen if place < 0 else seen[:place]
    return "".join(character for character, is_hidden in shown if not is_hidden), place >= 0


@given(
    st.lists(st.one_of(st.tuples(st.text("ab<", max_size=5), st.just(False)), st.just(("<x>", True))), max_size=12),
    st.one_of(st.text("ab", min_size=1, max_size=4), st.sampled_from(["<x>", "<x>a", "b<x>", "<x><x>", "a<x>b"])),
)
def test_special_tokens_count_for_stops_that_contain_them_and_are_never_shown(
    pieces: list[tuple[str, bool]], stop: str
) -> None:
    stream = StopStrings([stop], hidden=["<x>", "<y>"])
    shown = "".join(stream.push(text, is_hidden=is_hidden) for text, is_hidden in pieces)
    matched = stream.matched is not None
    assert (shown + stream.flush(), matched) == seen_cut(pieces, stop, ["<x>", "<y>"])


def test_a_stop_with_a_special_token_is_included_whole() -> None:
    stream = StopStrings(["<x>a", "ab"], include=True, hidden=["<x>"])
    assert [stream.push("one"), stream.push("<x>", is_hidden=True), stream.push("ac")] == ["one", "", "<x>a"]
    other = StopStrings(["<x>a", "ab"], hidden=["<x>"])
    assert [other.push("a"), other.push("<x>", is_hidden=True), other.push("b!")] == ["", "", ""]
    assert other.matched == "ab"


def test_stops_that_are_complete_early_do_not_count() -> None:
    stream = StopStrings(["ab", "bc"])
    assert [stream.push("xab", is_early=True), stream.push("c")] == ["xa", ""]
    assert stream.matched == "bc"
    again = StopStrings(["aa"])
    assert [again.push("aaa", is_early=True), again.push("b"), again.push("aab"), again.flush()] == ["aa", "ab", "", ""]
