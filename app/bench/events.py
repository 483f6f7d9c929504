"""An incremental parser of server-sent events."""

from __future__ import annotations


class Events:
    """Parser of server-sent events. Keeps incomplete lines and events until their rest arrives."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """Return the data of every event that `part` completes. Comments and fields other than `data` are ignored."""
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
