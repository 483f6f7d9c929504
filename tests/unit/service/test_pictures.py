"""Pictures that wait in several requests are encoded with the first of their size; each is counted once as encoded."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import pytest

from app.errors import InvalidRequest
from app.messages import PromptVectors
from app.service.pictures import ChatPictureReader
from app.service.requests import Picture


class Made:
    around = ("", "")

    def __init__(self, data: bytes) -> None:
        self.token_ids: tuple[int, ...] = (data[0],)
        self.runs: tuple[PromptVectors, ...] = ()


class ScriptedTower:
    """Pictures of one length have one size."""

    token, token_id, joined_tokens = "<image>", 1, 0

    def __init__(self, cuts_by_number: bool = False) -> None:
        self.cuts_by_number = cuts_by_number
        self.batches: list[list[bytes]] = []

    def read_all(
        self, files: Sequence[tuple[bytes, str]], is_alone: bool, others: Sequence[tuple[bytes, str]] = ()
    ) -> tuple[list[Made], list[Made | None]]:
        sizes = {len(data) for data, _ in files}
        alike = [Made(data) if len(data) in sizes else None for data, _ in others]
        self.batches.append([data for data, _ in (*files, *others) if len(data) in sizes])
        return [Made(data) for data, _ in files], alike


def request(*files: bytes) -> list[Picture]:
    return [Picture(base64.b64encode(data).decode(), f"messages[0].content[{at}]") for at, data in enumerate(files)]


def start(tower: ScriptedTower) -> tuple[ChatPictureReader, list[bool]]:
    reader, known = ChatPictureReader(lambda: tower, 16), list[bool]()
    reader.report = lambda is_known, seconds: known.append(is_known)
    return reader, known


@pytest.mark.parametrize("cuts_by_number", [False, True])
def test_pictures_that_wait_are_read_with_the_first_of_their_size(cuts_by_number: bool) -> None:
    tower = ScriptedTower(cuts_by_number)
    reader, known = start(tower)
    first, second, third = request(b"a1"), request(b"b1", b"long", b"a1"), request(b"c1")
    wrong = [Picture("!", "messages[0].content[0]")]
    with reader.waiting(first), reader.waiting(wrong), reader.waiting(second), reader.waiting(third):
        assert [one.vectors.token_ids for one in reader.read(first)] == [(97,)]
        assert [one.vectors.token_ids for one in reader.read(second)] == [(98,), (108,), (97,)]
        with pytest.raises(InvalidRequest, match="no base64"):
            reader.read(wrong)
    with reader.waiting(third):
        assert [one.vectors.token_ids for one in reader.read(third)] == [(99,)]
    if cuts_by_number:  # whether a picture is alone changes what it is
        assert tower.batches == [[b"a1"], [b"b1", b"long", b"a1"], [b"c1"]]
        assert known == [False] * 5
    else:
        assert tower.batches == [[b"a1", b"b1"], [b"long"], [b"c1"]]
        assert known == [False, False, False, True, False]
    with reader.waiting(third):
        reader.read(third)
    assert known[-1]


def test_what_waits_no_longer_is_not_read() -> None:
    tower = ScriptedTower()
    reader, _ = start(tower)
    with reader.waiting(request(b"a1")):
        with reader.waiting(request(b"b1")):
            pass
        reader.read(request(b"a1"))
    assert tower.batches == [[b"a1"]]
    many = request(*(bytes([65 + at]) for at in range(9)))
    with reader.waiting(request(b"x")), reader.waiting(many):
        reader.read(request(b"x"))
    assert tower.batches[-1] == [b"x", b"A", b"B", b"C"], "the first picture does not wait for all others"
