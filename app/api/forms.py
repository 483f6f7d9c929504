"""Bodies that are forms with a file, `multipart/form-data`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.message import Message

from app.errors import InvalidRequest

MULTIPART = "multipart/form-data"
_MAX_PARTS = 64
_MAX_HEAD_BYTES = 4096
_NAME = re.compile(rb';\s*name="?([^";]+)"?', re.IGNORECASE)
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
    parts = (b"\r\n" + bytes(content)).split(b"\r\n--" + boundary, _MAX_PARTS)
    if len(parts) > _MAX_PARTS or len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise InvalidRequest(f"The form is not complete, or has more than {_MAX_PARTS} parts.")
    fields: dict[str, list[bytes]] = {}
    for part in parts[1:-1]:
        end = part.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES)
        name = _name_in(part[:end]) if end >= 0 else None
        if name is None:
            raise InvalidRequest("A part of the form has no name.")
        fields.setdefault(name, []).append(part[end + 4 :])
    return fields


def _name_in(head: bytes) -> str | None:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-disposition:") and (found := _NAME.search(line)) is not None:
            return found[1].decode("utf-8", "replace")
    return None
