"""Pictures in chats: their limits, the vectors that a tower makes of them, and their places in a prompt."""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from app.errors import InvalidRequest, UnsupportedParameter
from app.messages import FIRST_VECTOR_ID, NUM_VECTOR_IDS, PromptVectors
from app.service.image_urls import ImageFetcher
from app.service.requests import Picture

_LOG = logging.getLogger(__name__)
CACHED_BYTES = 2**28  # of vectors: about a hundred pictures of a small model, or five of a large one

# Pictures of other requests for which one may wait; the tower has a limit of pixels.
_MAX_OTHERS = 3


class Vectors(Protocol):
    """What a picture is in a prompt: its tokens, their vectors, from the first token on, and texts before and after."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def runs(self) -> tuple[PromptVectors, ...]: ...

    @property
    def around(self) -> tuple[str, str]: ...


class Tower(Protocol):
    """The part of a model that reads pictures. `token` stands for one in the text of a chat template.

    `cuts_by_number`: one of several pictures is cut differently than a single one. `joined_tokens`: if the tokens of a
    prompt with pictures see each other, the most that it may have; else 0.
    """

    token: str
    token_id: int
    cuts_by_number: bool
    joined_tokens: int

    def read_all(
        self, files: Sequence[tuple[bytes, str]], is_alone: bool, others: Sequence[tuple[bytes, str]] = ()
    ) -> tuple[Sequence[Vectors], Sequence[Vectors | None]]:
        """Return the vectors of pictures, each a file and its field. Those of one size are computed together.

        Of the `others`, those that are of the size of one of `files` may be computed with it.
        """


@dataclass(frozen=True, slots=True)
class ReadPicture:
    """A picture as it is in a prompt. `key` tells its content, and how it is cut, from all others."""

    vectors: Vectors
    key: bytes
    placeholder: str
    placeholder_id: int
    joined_tokens: int


@dataclass(frozen=True, slots=True)
class PlacedPictures:
    """A prompt with pictures: the tokens that clients see, those of the engine, and the vectors at their places.

    `salt`: only equal prompts have keys and values in common, as each token sees all of them.
    """

    token_ids: tuple[int, ...]
    engine_ids: tuple[int, ...]
    vectors: tuple[PromptVectors, ...] = ()
    salt: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(len(one.data) for one in self.vectors)


class ChatPictureReader:
    """Reads pictures with a tower, which is loaded for the first one, and keeps the vectors of the latest ones.

    `report` gets whether a picture was known, and the seconds that its vectors took. `read` runs in one thread.
    `image_hosts` are those from whose addresses pictures are fetched.
    """

    def __init__(self, load: Callable[[], Tower], max_pictures: int, image_hosts: Sequence[str] = ()) -> None:
        self.max_pictures, self.fetcher = max_pictures, ImageFetcher(image_hosts)
        self.report: Callable[[bool, float], None] = lambda is_known, seconds: None
        self._load = load
        self._lock = threading.Lock()
        self._tower: Tower | None = None
        self._known: OrderedDict[bytes, Vectors] = OrderedDict()
        self._num_bytes = 0
        self._new: dict[bytes, float] = {}  # the seconds that vectors took which no request has had
        self._waiting: list[Picture] = []

    def read(self, pictures: Sequence[Picture]) -> list[ReadPicture]:
        """Return the vectors of a request's pictures. Raises an `InvalidRequest` that names the field."""
        with self._lock:
            if self._tower is None:
                began = time.monotonic()
                self._tower = self._load()
                _LOG.info("the part of the model that reads pictures was loaded in %.1f s", time.monotonic() - began)
            return self._read(self._tower, pictures)

    @contextmanager
    def waiting(self, pictures: Sequence[Picture]) -> Iterator[None]:
        """Let pictures be read with those of requests before, while the context is open."""
        self._waiting += pictures
        try:
            yield
        finally:
            for picture in pictures:
                self._waiting.remove(picture)

    def _read(self, tower: Tower, pictures: Sequence[Picture]) -> list[ReadPicture]:
        is_alone, began = len(pictures) == 1, time.monotonic()
        salt = b"1" * (is_alone and tower.cuts_by_number)
        files = [_decoded(picture) for picture in pictures]
        keys = [hashlib.sha256(salt + data).digest() for data in files]
        found = {key: self._known[key] for key in keys if key in self._known}
        missing = {key: keys.index(key) for key in keys if key not in found}
        others = {} if tower.cuts_by_number or not missing else self._others(keys)
        asked = [(files[place], pictures[place].field) for place in missing.values()]
        own, ahead = tower.read_all(asked, is_alone, list(others.values())) if asked else ((), ())
        made = [*own, *ahead]
        seconds = (time.monotonic() - began) / max(1, len(made) - made.count(None))
        for key, vectors in zip((*missing, *others), made, strict=True):
            if vectors is not None:
                found[key] = self._known[key] = vectors
                self._new[key] = seconds
                self._num_bytes += _num_bytes(vectors)
        for key in keys:
            new = self._new.pop(key, None)
            self.report(new is None, new or 0.0)
            self._known.move_to_end(key)
        while self._num_bytes > CACHED_BYTES:
            key, vectors = self._known.popitem(last=False)
            self._new.pop(key, None)
            self._num_bytes -= _num_bytes(vectors)
        placed = tower.token, tower.token_id, tower.joined_tokens
        return [ReadPicture(found[key], key, *placed) for key in keys]

    def _others(self, keys: Sequence[bytes]) -> dict[bytes, tuple[bytes, str]]:
        """Return pictures of requests that wait and are not known, by their keys."""
        found: dict[bytes, tuple[bytes, str]] = {}
        for picture in self._waiting[: len(keys) + _MAX_OTHERS]:
            try:
                data = _decoded(picture)
            except InvalidRequest:
                continue
            key = hashlib.sha256(data).digest()
            if key not in self._known and key not in keys:
                found[key] = data, picture.field
        return dict(list(found.items())[:_MAX_OTHERS])


def check_pictures(reader: ChatPictureReader | None, reason: str, pictures: Sequence[Picture]) -> ChatPictureReader:
    """Return the reader of a request's pictures. Raises `UnsupportedParameter` if there is none, or for too many."""
    if reader is None:
        raise UnsupportedParameter(f"{pictures[0].field} is a picture, and {reason}.", field=pictures[0].field)
    if len(pictures) > reader.max_pictures:
        field = pictures[reader.max_pictures].field
        raise UnsupportedParameter(
            f"The request has {len(pictures)} pictures, and may have {reader.max_pictures}, this server's max_images.",
            field=field,
        )
    return reader


def surrounded(text: str, pictures: Sequence[ReadPicture]) -> str:
    """Return the text of a prompt with the texts around each picture beside its placeholder."""
    parts = text.split(pictures[0].placeholder)
    if len(parts) != len(pictures) + 1:
        return text  # which `place_pictures` refuses
    for place, picture in enumerate(pictures):
        before, after = picture.vectors.around
        parts[place] += before + picture.placeholder
        parts[place + 1] = after + parts[place + 1]
    return "".join(parts)


def place_pictures(token_ids: Sequence[int], pictures: Sequence[ReadPicture]) -> PlacedPictures:
    """Return a prompt with the tokens of each picture in place of its placeholder.

    Raises `InvalidRequest` if the chat template has not written one placeholder for each picture.
    """
    count = sum(token == pictures[0].placeholder_id for token in token_ids)
    if count != len(pictures):
        raise InvalidRequest(
            f"The chat template makes {count} places for {len(pictures)} pictures: it takes none here, or a text has"
            " the word that stands for one.",
            field="messages",
        )
    shown: list[int] = []
    engine: list[int] = []
    vectors: list[PromptVectors] = []
    left = iter(pictures)
    for token in token_ids:
        if token != pictures[0].placeholder_id:
            shown.append(token)
            engine.append(token)
            continue
        picture, start = next(left), len(shown)
        shown += picture.vectors.token_ids
        engine += picture.vectors.token_ids
        ids = _vector_ids(picture)
        for run in picture.vectors.runs:
            vectors.append(run.moved(start))
            engine[start + run.start : start + run.end] = ids[run.start : run.end]
    most = pictures[0].joined_tokens
    if not most:
        return PlacedPictures(tuple(shown), tuple(engine), tuple(vectors))
    if len(engine) > most:
        raise InvalidRequest(
            f"The prompt has {len(engine)} tokens that see each other, and a layer's window {most}.", field="messages"
        )
    joined = tuple(one.in_block((0, len(engine))) for one in vectors)
    salt = hashlib.sha256(struct.pack(f"<{len(engine)}I", *engine)).hexdigest()
    return PlacedPictures(tuple(shown), tuple(engine), joined, salt)


def _vector_ids(picture: ReadPicture) -> list[int]:
    """Return ids by which the prefix cache tells the tokens of this picture from all others."""
    count = len(picture.vectors.token_ids)
    drawn = struct.unpack(f"<{count}I", hashlib.shake_256(picture.key).digest(4 * count))
    return [FIRST_VECTOR_ID + number % NUM_VECTOR_IDS for number in drawn]


def _decoded(picture: Picture) -> bytes:
    assert not picture.is_url, "addresses are fetched first"
    if isinstance(picture.data, bytes):
        return picture.data
    try:
        return base64.b64decode(picture.data.strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{picture.field} is no base64: {error}.", field=picture.field) from error


def _num_bytes(vectors: Vectors) -> int:
    return sum(len(run.data) for run in vectors.runs)
