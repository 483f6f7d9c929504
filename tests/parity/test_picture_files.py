"""Files of pictures: each is read as it looks, or refused by name before it takes memory."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from PIL import Image

from app.engine.picture_files import MAX_PIXELS, MAX_RATIO, read_picture
from app.errors import InvalidRequest

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
PIXELS = numpy.array([[RED, BLUE, WHITE], [BLUE, BLUE, RED]], dtype=numpy.uint8)
GRAY = numpy.array([[0, 90, 255], [17, 17, 200]], dtype=numpy.uint8)
SHOWN = Image.fromarray(PIXELS)


def file_of(picture: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def several(kind: str) -> bytes:
    return file_of(SHOWN, kind, save_all=True, append_images=[SHOWN.rotate(180)])


def with_depth() -> bytes:
    second = Image.new("RGB", (16, 16), BLUE)
    return file_of(Image.new("RGB", (16, 16), RED), "MPO", save_all=True, append_images=[second])


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(SHOWN, exif=exif)


def seen_through() -> bytes:
    alpha = numpy.array([[255, 0, 255], [0, 255, 128]], dtype=numpy.uint8)
    return file_of(Image.fromarray(numpy.dstack([PIXELS, alpha])))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *more: bytes) -> bytes:
    """A file that says how large it is, without pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def wide_gif_frame() -> bytes:
    """A GIF of one pixel, with a frame that is much larger."""
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\x02\x4c\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff" + frame + b";"


def gray(picture: Any) -> Any:
    return numpy.dstack([picture] * 3)


RIGHT: dict[str, tuple[Callable[[], bytes], Any, int]] = {  # the file, what is seen, and how much a value may differ
    "png": (lambda: file_of(SHOWN), PIXELS, 0),
    "bmp": (lambda: file_of(SHOWN, "BMP"), PIXELS, 0),
    "tiff": (lambda: file_of(SHOWN, "TIFF", compression="tiff_lzw"), PIXELS, 0),
    "webp": (lambda: file_of(SHOWN, "WEBP", lossless=True), PIXELS, 0),
    "gif": (lambda: file_of(SHOWN.convert("P", palette=Image.Palette.ADAPTIVE), "GIF"), PIXELS, 0),
    "a palette": (lambda: file_of(SHOWN.convert("P", palette=Image.Palette.ADAPTIVE)), PIXELS, 0),
    "gray": (lambda: file_of(Image.fromarray(GRAY)), gray(GRAY), 0),
    "one bit": (lambda: file_of(Image.fromarray(GRAY > 100)), gray((GRAY > 100) * numpy.uint8(255)), 0),
    "16 bits": (lambda: file_of(Image.fromarray(GRAY.astype(numpy.uint16) * 257)), gray(GRAY), 0),
    "cmyk": (
        lambda: file_of(Image.new("RGB", (16, 16), RED).convert("CMYK"), "JPEG", quality=95),
        numpy.full((16, 16, 3), RED, numpy.uint8),
        6,
    ),
    "turned": (lambda: turned(6), numpy.rot90(PIXELS, -1), 0),
    "mirrored": (lambda: turned(2), PIXELS[:, ::-1], 0),
    "transparent": (
        seen_through,
        numpy.array([[RED, WHITE, WHITE], [WHITE, BLUE, (255, 127, 127)]], dtype=numpy.uint8),
        1,
    ),
    "a transparent color": (
        lambda: file_of(SHOWN, transparency=BLUE),
        numpy.array([[RED, WHITE, WHITE], [WHITE, WHITE, RED]], dtype=numpy.uint8),
        0,
    ),
    "a camera's depth": (with_depth, numpy.full((16, 16, 3), RED, numpy.uint8), 6),
}
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "no picture": (lambda: b"<svg/>", "not a picture that is known here: send JPEG, PNG"),
    "nothing": (lambda: b"", "not a picture that is known here"),
    "another format": (lambda: file_of(SHOWN, "PPM"), "not a picture that is known here"),
    "an animated gif": (lambda: several("GIF"), "has several frames"),
    "an animated webp": (lambda: several("WEBP"), "has several frames"),
    "an animated png": (lambda: several("PNG"), "has several frames"),
    "pages": (lambda: several("TIFF"), "has several frames"),
    "32 bits": (lambda: file_of(Image.fromarray(GRAY.astype(numpy.float32)), "TIFF"), "32 bits in a channel"),
    "a cut png": (lambda: file_of(Image.effect_noise((64, 64), 90))[:900], "damaged"),
    "a cut jpeg": (lambda: file_of(Image.effect_noise((64, 64), 90), "JPEG")[:900], "damaged"),
    "a png without pixels": (lambda: png(30, 30), "damaged"),
    "a bomb": (lambda: png(MAX_PIXELS // 1000 + 1, 1000), f"64001 x 1000 pixels, and may have {MAX_PIXELS:,}"),
    "a strip": (lambda: png(MAX_RATIO * 3 + 1, 3), f"at most {MAX_RATIO} times the other"),
    "a frame that is larger than the gif": (wide_gif_frame, "65535 x 65535 pixels"),
    "a bomb of text": (
        lambda: png(30, 30, chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(2**26), 9))),
        "not a picture that is known here|damaged",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_picture_is_read_as_it_looks(name: str) -> None:
    made, expected, tolerance = RIGHT[name]
    found = read_picture(made(), "image")
    assert found.mode == "RGB" and found.size == (expected.shape[1], expected.shape[0])
    difference = numpy.abs(numpy.asarray(found).astype(int) - expected.astype(int))
    assert difference.max() <= tolerance, numpy.asarray(found)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name: str) -> None:
    made, reason = REFUSED[name]
    with pytest.raises(InvalidRequest, match=reason) as refused:
        read_picture(made(), "messages[0].content[1]")
    assert refused.value.field == "messages[0].content[1]"
    assert refused.value.message.startswith("messages[0].content[1] ")
