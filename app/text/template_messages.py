"""Messages between the server and a process with limits, which renders a chat template or compiles a grammar.

A message has its length in front: a request is `length, JSON`, a reply is `status, length, UTF-8 text`.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum

# More than any context: 1 Mi tokens of four characters. It ends a template that writes without end.
MAX_RENDERED_CHARACTERS = 4 * 2**20

_REQUEST_HEADER = struct.Struct("!I")
_REPLY_HEADER = struct.Struct("!BI")
_MAX_UTF8_BYTES = 4  # per character


MEMORY_MESSAGE = "it needs more memory than it may take"


class ReplyStatus(IntEnum):
    """First byte of a reply. With all but `TEXT` the text is a message."""

    TEXT = 0  # the rendered text, or a grammar's definition; empty after the start
    REFUSED = 1  # the template called `raise_exception`, or the grammar is wrong
    STOPPED = 2  # the sandbox or a limit stopped it
    FAILED = 3  # any other exception
    MEMORY = 4  # it needs more memory than it may take


Reply = tuple[ReplyStatus, str]


def send_request(connection: socket.socket, request: bytes) -> None:
    """Send a request. Raises `OSError` if the connection failed, or its timeout has passed."""
    connection.sendall(_REQUEST_HEADER.pack(len(request)) + request)


def receive_request(connection: socket.socket) -> bytearray:
    """Return the next request. Raises `EOFError` if the server has closed the connection."""
    (length,) = _REQUEST_HEADER.unpack(_receive(connection, _REQUEST_HEADER.size))
    return _receive(connection, length)


def send_reply(connection: socket.socket, reply: Reply) -> None:
    """Send the reply to a request."""
    status, text = reply
    content = text.encode("utf-8", "surrogatepass")
    connection.sendall(_REPLY_HEADER.pack(status, len(content)) + content)


def receive_reply(connection: socket.socket) -> Reply:
    """Return the next reply.

    Raises:
        EOFError: The process has ended.
        OSError: The connection failed, or its timeout has passed.
        ValueError: The process has sent anything but a reply.
    """
    status, length = _REPLY_HEADER.unpack(_receive(connection, _REPLY_HEADER.size))
    if length > _MAX_UTF8_BYTES * MAX_RENDERED_CHARACTERS:
        raise ValueError("the reply is longer than any text that the sandbox renders")
    return ReplyStatus(status), _receive(connection, length).decode("utf-8", "surrogatepass")


def _receive(connection: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    rest = memoryview(content)
    while rest:
        received = connection.recv_into(rest)
        if not received:
            raise EOFError
        rest = rest[received:]
    return content
