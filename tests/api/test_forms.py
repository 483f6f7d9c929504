"""Forms: their fields, and bodies that are none, however large."""

from __future__ import annotations

import pytest

from app.api.forms import read_form
from app.errors import InvalidRequest

TYPE = "multipart/form-data; boundary=b"
NAMED = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'


def test_a_form_has_its_fields_with_every_byte() -> None:
    second = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
    assert read_form(TYPE, NAMED + b"\r\n\r\n\x00--b\r\n" + second) == {
        "file": [b"\r\n\r\n\x00--b"],
        "model": [b"whisper"],
    }


@pytest.mark.parametrize(
    "body",
    [
        b"",
        NAMED + b"x",
        b"--b\r\n" + b"content-disposition:" * 500_000 + b"\r\n\r\nx\r\n--b--",
        b"--b\r\n" + b"content-disposition: ; " * 500_000 + b"\r\n--b--",
        b"--b\r\ncontent-disposition: form-data\r\n\r\nname=x\r\n--b--",
        NAMED + b"\r\n--b" * 2_000_000 + b"--",
    ],
    ids=["empty", "no end", "no name", "no head", "no field", "many parts"],
)
def test_a_body_that_is_no_form_is_refused_at_once(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_form(TYPE, body)
