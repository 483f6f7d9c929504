"""Request bodies: decompression, the pace at which they must arrive, and the memory that large ones share.

A small body is never refused for the size of others: connections bound their number. A large one takes all of its
memory before the rest of it is read, and gives it back once it is parsed. While there is none, it waits: uploads that
have stalled are ended for it, and the address that holds least is served first.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

from app.api.access import client_network, header
from app.errors import BodyTooLarge, InvalidRequest, Overloaded, RequestError

MAX_BODY_BYTES = 16 * 2**20  # several times a context of a million tokens as text
MAX_TENSOR_BODY_BYTES = 4 * MAX_BODY_BYTES  # 100 images of 224 × 224 in FP32; binary tensors are not parsed
SOUND_PATHS = ("/v1/audio/", "/pipeline/automatic-speech-recognition")  # an hour of speech as MP3, 30 minutes as WAV
TENSOR_HEADER = b"inference-header-content-length"
SMALL_BODY_BYTES = 64 * 1024  # of a body that takes no share of the memory
SCAN_BYTES = 64 * 1024  # of a body that is not checked while it arrives
MAX_HELD_BODIES = 8  # bodies of full size in memory at the same time; once parsed, a body takes several times its size
MAX_WAITING_BODIES = 128  # large bodies that wait for memory; each has some hundred kilobytes in its connection
WAIT_SECONDS = 10.0  # in which a large body gets memory, or is refused
BODY_TIMEOUT_SECONDS = 60.0  # time limit for receiving a body
# A body that is not complete must bring so many bytes within so many seconds.
PACE_BYTES, PACE_SECONDS = 16 * 1024, 10.0
# One that brings less than a packet or so within a second is ended if others wait for its memory.
STALLED_BYTES, STALLED_SECONDS = 4096, 1.0
INFLATE_BYTES = 256 * 1024  # decompressed in about a millisecond
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib looks at the first bytes; HTTP's `deflate` is zlib's format

# Extension of the ASGI scope: a function that returns True once the whole body has arrived. It is then one message, and
# its deadline would take longer than to read it.
HAS_ARRIVED = "armature.has_arrived"

# Takes all of a body that has arrived so far, and returns why it is refused, if it is certain already.
BodyCheck = Callable[[bytearray], RequestError | None]


def _not_known() -> bool:
    return False


class ClientDisconnected(Exception):
    """The client has disconnected; no response can be sent."""


class BodyDecoder:
    """Decoder of one body, chunk by chunk.

    Raises `InvalidRequest` for an unknown encoding and for data that does not match it.
    """

    def __init__(self, encoding: str) -> None:
        known = encoding.strip().lower()
        if known not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise InvalidRequest(
                f"The content-encoding {encoding[:40]!r} is not supported: send gzip, deflate or none."
            )
        self.is_identity = known in ("", "identity")
        self._decompressor = None if self.is_identity else zlib.decompressobj(GZIP_OR_ZLIB)

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the decompressed chunk in parts of at most `INFLATE_BYTES`."""
        if self._decompressor is None:
            yield chunk
            return
        plain = b""
        while chunk or len(plain) == INFLATE_BYTES:  # zlib may have taken all of the input and have more output
            try:
                plain = self._decompressor.decompress(chunk, INFLATE_BYTES)
            except zlib.error as error:
                raise InvalidRequest("The body does not match its content-encoding header.") from error
            if self._decompressor.unused_data:
                raise InvalidRequest("The compressed body has data after its end.")
            yield plain
            chunk = self._decompressor.unconsumed_tail

    def finish(self) -> None:
        """Raise `InvalidRequest` if the compressed data is incomplete."""
        if self._decompressor is not None and not self._decompressor.eof:
            raise InvalidRequest("The compressed body ends too early.")


class BodyShare:
    """The memory of one large body, at most `num_bytes`. `end` ends its upload; None once it is complete."""

    __slots__ = ("address", "end", "num_bytes", "num_new", "progressed_at")

    def __init__(self, address: Hashable, num_bytes: int, end: Callable[[], None]) -> None:
        self.address, self.num_bytes = address, num_bytes
        self.end: Callable[[], None] | None = end
        self.progressed_at, self.num_new = 0.0, 0

    def bring(self, num_bytes: int, now: float) -> None:
        self.num_new += num_bytes
        if self.num_new >= STALLED_BYTES:
            self.progressed_at, self.num_new = now, 0


class BodyMemory:
    """The memory of all large bodies, `max_bytes` in all. Used on the event loop only."""

    def __init__(self, max_bytes: int = MAX_HELD_BODIES * MAX_BODY_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._held: dict[BodyShare, None] = {}
        self._bytes_of: Counter[Hashable] = Counter()
        self._waiting: dict[BodyShare, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, share: BodyShare) -> None:
        """Wait until there is memory for a body. Raises `Overloaded` after too long, or if too many wait."""
        if not self._waiting and self.num_bytes + share.num_bytes <= self._max_bytes:
            self._add(share)
            return
        if len(self._waiting) >= MAX_WAITING_BODIES:
            self._refuse_one(share.address)
        future = self._waiting[share] = asyncio.get_running_loop().create_future()
        self._end_stalled()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await future
        except TimeoutError:
            raise _no_memory() from None
        finally:
            self._waiting.pop(share, None)

    def resize(self, share: BodyShare, num_bytes: int) -> None:
        """Give back what a body does not need."""
        if share in self._held:
            self._count(share, num_bytes - share.num_bytes)
            share.num_bytes = num_bytes
            self._grant()

    def give_back(self, share: BodyShare) -> None:
        """Give back all memory of a body; further calls have no effect."""
        if share in self._held:
            del self._held[share]
            self._count(share, -share.num_bytes)
            self._grant()

    def _add(self, share: BodyShare) -> None:
        share.progressed_at = asyncio.get_running_loop().time()
        self._held[share] = None
        self._count(share, share.num_bytes)

    def _count(self, share: BodyShare, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes_of[share.address] += num_bytes
        if not self._bytes_of[share.address]:
            del self._bytes_of[share.address]

    def _grant(self) -> None:
        """Give memory to waiting bodies, first to the address that holds least."""
        waiting = [share for share, future in self._waiting.items() if not future.done()]
        while waiting:
            share = min(waiting, key=lambda each: self._bytes_of[each.address])
            if self.num_bytes + share.num_bytes > self._max_bytes:
                return
            waiting.remove(share)
            self._add(share)
            self._waiting[share].set_result(None)

    def _end_stalled(self) -> None:
        """End one upload that has stalled, of the address that holds most; look again while a body waits."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        stalled = [each for each in self._held if each.end and now - each.progressed_at >= STALLED_SECONDS]
        if stalled:
            found = max(stalled, key=lambda each: (self._bytes_of[each.address], now - each.progressed_at))
            assert found.end is not None, "it was looked at above"
            found.end()
        self._timer = loop.call_later(STALLED_SECONDS / 10, self._end_stalled)

    def _refuse_one(self, address: Hashable) -> None:
        """Refuse the last body that waits, of the address with the most of them.

        Raises `Overloaded` if it is the new one, from `address`.
        """
        numbers = Counter(share.address for share in self._waiting)
        numbers[address] += 1
        most = max(numbers.values())
        if numbers[address] == most:
            raise _no_memory()
        share = next(each for each in reversed(self._waiting) if numbers[each.address] == most)
        if not self._waiting[share].done():
            self._waiting[share].set_exception(_no_memory())
        del self._waiting[share]


def _no_memory() -> Overloaded:
    return Overloaded("The server holds too many large bodies already.", retry_after_seconds=1.0)


class ArrivingBody:
    """The body of one request, until it is parsed. `release` it in the end."""

    __slots__ = (
        "_began_at", "_check", "_inflate", "_limit", "_memory", "_num_new", "_parts", "_receive", "_scope", "_share", "_timer", "content",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, memory: BodyMemory) -> None:
        self._scope, self._receive, self._memory = scope, receive, memory
        self._limit = _body_limit(scope)
        self._parts = bytearray()
        self._share: BodyShare | None = None
        self._check: BodyCheck | None = None
        self._num_new = 0
        self.content = bytearray()

    async def read(self, find_check: Callable[[Scope], Awaitable[BodyCheck | None]]) -> None:
        """Read the body to its end. `find_check` returns the check of a large body while it arrives, or None.

        Raises:
            RequestError: It is too large, is refused by its check, or has no memory.
            HTTPException: It arrives too slowly.
            ClientDisconnected: The client has left.
        """
        declared = header(self._scope, b"content-length")
        if declared.isdigit() and int(declared[:20]) > self._limit:
            raise too_large(self._limit, self._scope["path"])
        self._inflate = BodyDecoder(header(self._scope, b"content-encoding").decode("latin-1"))
        if self._is_small(declared) and self._scope.get("extensions", {}).get(HAS_ARRIVED, _not_known)():
            self.content += (await self._receive_part()).get("body", b"")
            return
        try:
            async with asyncio.timeout(min(PACE_SECONDS, BODY_TIMEOUT_SECONDS)) as self._timer:
                refusal = await self._read_parts(find_check)
        except TimeoutError as error:
            detail = f"The body arrived too slowly: send {PACE_BYTES} bytes in {PACE_SECONDS:g} s, and all in {BODY_TIMEOUT_SECONDS:g} s"
            raise HTTPException(408, detail, {"connection": "close"}) from error
        if refusal is not None:
            raise refusal
        self._inflate.finish()
        # A copy of a large body would hold the event loop for 12 ms.
        self.content, self._parts = self._parts, bytearray()
        if self._share is not None:
            self._share.end = None
            self._memory.resize(self._share, len(self.content))

    def _is_small(self, declared: bytes) -> bool:
        return self._inflate.is_identity and declared.isdigit() and int(declared[:20]) <= SMALL_BODY_BYTES

    def release(self) -> None:
        """Forget the body; further calls have no effect."""
        # Who still reads it keeps it: neither is cleared in place.
        self._parts, self.content = bytearray(), bytearray()
        if self._share is not None:
            self._memory.give_back(self._share)

    async def _read_parts(self, find_check: Callable[[Scope], Awaitable[BodyCheck | None]]) -> RequestError | None:
        """Read the body to its end; return why it is refused, if that is certain before it has arrived.

        The rest of a refused body is read and not kept, so that the client can read the response.
        """
        is_asked = False
        self._began_at = asyncio.get_running_loop().time()
        while await self._read_part():
            if len(self._parts) > SCAN_BYTES and not is_asked:
                self._check, is_asked = await find_check(self._scope), True
            refusal = self._check(self._parts) if self._check is not None else None
            if refusal is not None:
                self.release()
                while (await self._receive_part()).get("more_body", False):
                    pass
                return refusal
        return None

    async def _read_part(self) -> bool:
        message = await self._receive_part()
        for chunk in self._inflate(message.get("body", b"")):
            if len(self._parts) + len(chunk) > self._limit:
                raise too_large(self._limit, self._scope["path"])
            if self._share is None and len(self._parts) + len(chunk) > SMALL_BODY_BYTES:
                await self._take_memory()
            self._parts += chunk
            if len(chunk) == INFLATE_BYTES:
                await asyncio.sleep(0)  # a small compressed chunk may be many megabytes
        return bool(message.get("more_body", False))

    async def _take_memory(self) -> None:
        declared = header(self._scope, b"content-length")
        num_bytes = int(declared) if self._inflate.is_identity and declared.isdigit() else self._limit
        self._share = BodyShare(client_network(self._scope.get("client")), num_bytes, self._end)
        loop = asyncio.get_running_loop()
        waited_from = loop.time()
        self._timer.reschedule(None)  # the client does not have to wait in time
        await self._memory.take(self._share)
        self._began_at += loop.time() - waited_from
        self._timer.reschedule(loop.time() + PACE_SECONDS)

    def _end(self) -> None:
        if not self._timer.expired():
            self._timer.reschedule(asyncio.get_running_loop().time())

    async def _receive_part(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        if message.get("more_body", False):
            self._keep_pace(len(message.get("body", b"")))
        return message

    def _keep_pace(self, num_bytes: int) -> None:
        """Put off the deadline if enough has arrived."""
        self._num_new += num_bytes
        now = asyncio.get_running_loop().time()
        if self._share is not None:
            self._share.bring(num_bytes, now)
        if self._num_new >= PACE_BYTES and not self._timer.expired():
            self._num_new = 0
            self._timer.reschedule(min(now + PACE_SECONDS, self._began_at + BODY_TIMEOUT_SECONDS))


def _body_limit(scope: Scope) -> int:
    """Return the body size limit. Bodies with a header that says where their tensors begin, and sounds, may be larger."""
    has_tensors = scope["path"].startswith("/v2/") and header(scope, TENSOR_HEADER)
    return MAX_TENSOR_BODY_BYTES if has_tensors or scope["path"].startswith(SOUND_PATHS) else MAX_BODY_BYTES


def too_large(limit: int, path: str = "") -> BodyTooLarge:
    """Return the error; of tensors as JSON, which take several times their bytes, it says how more can be sent."""
    more = ""
    if limit == MAX_BODY_BYTES and path.startswith("/v2/") and path.endswith("/infer"):
        more = f" Send tensors as binary data, of which it may have {MAX_TENSOR_BODY_BYTES} bytes, or pictures as JPEG or PNG."
    return BodyTooLarge(f"The body may have at most {limit} bytes.{more}")


class NamedBody(BaseModel):
    """What a body says about its model and its response. `name` is Ollama's, `lora_name` an adapter's."""

    model: Any = None
    name: Any = None
    lora_name: Any = None
    stream: Any = None

    def model_name(self) -> str | None:
        return next((each for each in (self.model, self.name, self.lora_name) if isinstance(each, str)), None)
