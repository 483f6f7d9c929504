"""Event streams mean the same however their bytes were cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from armature_bench.http.client import SseParser, _StreamReader
from armature_bench.http.dialects import GENERATE_DIALECTS

DATA = st.lists(
    st.text("ab {}:é\t", min_size=1).map(str.encode).filter(lambda data: not data.startswith(b" ")), max_size=5
)


def cut(text: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(borders)]


@given(
    DATA,
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"data:", b"data: "]),
    st.lists(st.integers(0, 10**4), max_size=8),
)
def test_an_event_is_whole_however_it_was_cut(
    data: list[bytes], newline: bytes, field: bytes, places: list[int]
) -> None:
    lines = [b": comment", b"id: 7", *(field + each + newline for each in data)]
    events = SseParser()
    assert [found for part in cut(newline.join(lines) + newline, places) for found in events.feed(part)] == data


def test_lines_of_one_event_belong_together() -> None:
    assert SseParser().feed(b"data: one\ndata: two\n\ndata: three\n\n\n") == [b"one\ntwo", b"three"]


def test_what_is_not_whole_is_no_event_yet() -> None:
    events = SseParser()
    assert events.feed(b"data: a\n") == []
    assert events.feed(b"\n") == [b"a"]


def test_what_comes_at_once_is_one_piece() -> None:
    """A step that guessed well makes several tokens, and no time passes between them."""
    told: list[int] = []
    reading = _StreamReader(GENERATE_DIALECTS["native"], lambda num_pieces: told.append(num_pieces) is None)
    event = b'data: {"token_ids": [1]}\n\n'
    assert reading.take(event * 3, 1.0)
    assert reading.take(event, 2.0)
    assert reading.stream(0.0).chunks == ((1.0, 3), (2.0, 1))
    assert told == [1, 2, 3, 4]
