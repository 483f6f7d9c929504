"""Server-sent events out of bytes, however these were cut on their way."""

from __future__ import annotations


class Events:
    """Keeps what is not whole yet."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """The data of every event that this part makes whole. Comments and other fields carry nothing here."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._lines.append(text[5:].removeprefix(b" "))
            elif not text and self._lines:
                events.append(b"\n".join(self._lines))
                self._lines.clear()
        return events
