"""Bodies that are forms with a file, `multipart/form-data`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.message import Message

from app.errors import InvalidRequest

MULTIPART = "multipart/form-data"
_MAX_PARTS = 64
_NAME = re.compile(rb'content-disposition:[^\r\n]*?;\s*name="?([^";\r\n]+)"?', re.IGNORECASE)
Fields = Mapping[str, list[bytes]]


def is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == MULTIPART


def read_form(content_type: str, content: bytes | bytearray) -> Fields:
    """Return the values of each field of a form. Raises `InvalidRequest`."""
    message = Message()
    message["content-type"] = content_type
    boundary = str(message.get_param("boundary") or "").encode("latin-1", "replace")
    if not is_form(content_type) or not boundary:
        raise InvalidRequest(f"Send the body as a form with the header `content-type: {MULTIPART}` and its boundary.")
    parts = (b"\r\n" + bytes(content)).split(b"\r\n--" + boundary)
    if len(parts) > _MAX_PARTS or len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise InvalidRequest(f"The form is not complete, or has more than {_MAX_PARTS} parts.")
    fields: dict[str, list[bytes]] = {}
    for part in parts[1:-1]:
        head, blank, value = part.partition(b"\r\n\r\n")
        found = _NAME.search(head)
        if not blank or found is None:
            raise InvalidRequest("A part of the form has no name.")
        fields.setdefault(found[1].decode("utf-8", "replace"), []).append(value)
    return fields
