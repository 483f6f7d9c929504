"""Decompression of request bodies, limited to the size that a body may have."""

from __future__ import annotations

import zlib

from app.errors import InvalidRequest

GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib looks at the first bytes; HTTP's `deflate` is zlib's format


class Inflate:
    """Decoder of one body, chunk by chunk.

    Raises `InvalidRequest` for an unknown encoding and for data that does not match it.
    """

    def __init__(self, encoding: str) -> None:
        known = encoding.strip().lower()
        if known not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise InvalidRequest(f"The content-encoding {encoding[:40]!r} is not supported: send gzip, deflate or none.")
        self._inner = zlib.decompressobj(GZIP_OR_ZLIB) if known not in ("", "identity") else None

    def __call__(self, chunk: bytes, max_bytes: int) -> bytes:
        """Return the decompressed chunk, at most its first `max_bytes`."""
        if self._inner is None:
            return chunk
        try:
            plain = self._inner.decompress(chunk, max_bytes)
        except zlib.error as error:
            raise InvalidRequest("The body does not match its content-encoding header.") from error
        if self._inner.unused_data:
            raise InvalidRequest("The compressed body has data after its end.")
        return plain

    def finish(self) -> None:
        """Raise `InvalidRequest` if the compressed data is incomplete."""
        if self._inner is not None and not self._inner.eof:
            raise InvalidRequest("The compressed body ends too early.")
