"""Parts of messages: texts, and in users' messages pictures."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from app.api.schemas import MAX_PARTS, Body
from app.errors import InvalidRequest, UnsupportedParameter
from app.service.requests import Picture

_MAX_TYPE = 40  # characters of a type in a sentence
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "reasoning_text"})
_PICTURE_PARTS = frozenset({"image_url", "input_image"})
_ADDRESS = re.compile(r"https?://", re.IGNORECASE)
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)


class ImageUrl(Body):
    """A picture as a data URL, or its address. `detail` has no effect: a model cuts pictures as it was trained."""

    url: str
    detail: str | None = None


class MessagePart(Body):
    """One part of a message: a text, or in a user's message a picture."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    detail: str | None = None

    def check_fields(self, path: str, ignored: dict[str, None]) -> None:
        """Refuse a part of a text without its text. The message decides about parts that are no text."""
        if self.type in _TEXT_PARTS and self.text is None:
            raise InvalidRequest(f"{path}text: Field required.", field=f"{path}text")
        if self.is_text or self.is_picture:
            super().check_fields(path, ignored)
        else:
            self.leave_out(path, self.type, ignored)

    @property
    def is_text(self) -> bool:
        """True if the part can be read."""
        return self.type in _TEXT_PARTS or (self.type == "refusal" and self.refusal is not None)

    @property
    def is_picture(self) -> bool:
        return self.type in _PICTURE_PARTS and self.image_url is not None

    def picture(self, place: str) -> Picture:
        """Return the picture of the part at this place. Raises `UnsupportedParameter` if it is none."""
        url = self._url
        start = self._start(place)
        return Picture(url[start:], place, is_url=start == 0)

    def check_picture(self, place: str) -> None:
        """Raise `UnsupportedParameter` if the picture is neither a data URL nor an address."""
        self._start(place)

    def _start(self, place: str) -> int:
        """Return where the picture begins in its data URL; 0 for an address."""
        if _ADDRESS.match(self._url):
            return 0
        found = _DATA_URL.match(self._url)
        if found is None:
            raise UnsupportedParameter(
                f"{place} of type {self.type!r} is neither a data URL nor an address: send the picture itself, as"
                " data:image/png;base64,…",
                field=place,
            )
        return found.end()

    @property
    def _url(self) -> str:
        return self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url or ""

    @property
    def shown(self) -> str:
        """The text of the part; in place of another one, a note that tells the model of it."""
        if not self.is_text:
            return f"[{self.type[:_MAX_TYPE]}: left out, because this model reads text only]"
        return (self.text if self.type != "refusal" else self.refusal) or ""


MessageParts = Annotated[tuple[MessagePart, ...], Field(fail_fast=True, max_length=MAX_PARTS)]


def refuse_unread(parts: MessageParts, path: str) -> None:
    """Refuse parts of a user's message that are no text, by their type: an answer without them would be wrong.

    The results of tools and the model's own messages may have them: there they are part of a history, which would be of
    no use any more.
    """
    for index, part in enumerate(parts):
        place = f"{path}[{index}]"
        if part.is_picture:
            part.check_picture(place)
        elif not part.is_text:
            raise UnsupportedParameter(
                f"{place} is of type {part.type[:_MAX_TYPE]!r}; this server's models read text, and some of them pictures"
                ', but neither audio nor files: send parts of the form {"type": "text", "text": "…"} or'
                ' {"type": "image_url", "image_url": {"url": "data:…"}}.',
                field=place,
            )
