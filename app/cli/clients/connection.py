"""HTTP requests of the commands in a terminal, and their failures as one sentence. They block until Ctrl-C."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.errors import ArmatureError, SettingsInvalid
from app.settings import unix_path_of

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
STREAM_SECONDS = 900.0  # until the next token: a long prompt on a small machine takes minutes
USER_AGENT = "armature"


class ServerRefused(ArmatureError):
    """The server cannot be reached, or answered with an error. `status` is 0 if there was no answer."""

    code = "server_refused"

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServerConnection:
    """A server's address as `parse_server_url` returns it, and the key for its API."""

    url: str
    api_key: str | None = None

    def get(self, path: str, seconds: float = ANSWER_SECONDS) -> tuple[int, bytes]:
        """Return the status and the body, waiting `seconds` for each part. Raises `ServerRefused` without an answer."""
        with closing(self._send(self._connect(seconds), "GET", path, None)) as response:
            try:
                return response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error

    def get_text(self, path: str) -> str:
        """Return the body of an answer with status 200. Raises `ServerRefused` for any other."""
        status, body = self.get(path)
        if status != 200:
            raise self._refused(status, body, {})
        return body.decode(errors="replace")

    def get_json(self, path: str) -> dict[str, Any]:
        """Return the JSON object of an answer with status 200. Raises `ServerRefused` for any other."""
        text = self.get_text(path)
        found = parse_object(text)
        if found is None:
            raise ServerRefused(f"{self.url}{path} did not answer with a JSON object. Is another program there?")
        return found

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the JSON objects of a request's server-sent events. Raises `ServerRefused` for an error."""
        with closing(self._send(self._connect(STREAM_SECONDS), "POST", path, json.dumps(body).encode())) as response:
            try:
                if response.status != 200:
                    raise self._refused(response.status, response.read(), response.headers)
                yield from self._read_events(response)
            except (OSError, http.client.HTTPException) as error:
                raise ServerRefused(f"{self.url} ended the answer: {_reason(error)}.") from error

    def _read_events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        for line in response:
            name, _, data = line.decode(errors="replace").strip().partition(":")
            if name != "data":
                continue
            if data.strip() == "[DONE]":
                return
            event = parse_object(data)
            if event is None:
                raise ServerRefused(f"{self.url} sent an event that is no JSON object: {data.strip()[:100]}")
            if event.get("error"):
                raise ServerRefused(_sentence(event) or f"{self.url} ended the answer with an error.")
            yield event
        raise ServerRefused(f"The stream of {self.url} ended before the answer was complete.")

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        """Open a connection that waits `seconds` for the next bytes of an answer."""
        connection = _connection_to(self.url)
        try:
            connection.connect()
        except OSError as error:
            raise self._unreachable(error) from error
        connection.sock.settimeout(seconds)
        return connection

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        headers = {"User-Agent": USER_AGENT, "Connection": "close"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        is_answered = False
        try:
            prefix = "" if unix_path_of(self.url) is not None else urlsplit(self.url).path
            connection.request(method, prefix + path, body, headers)
            response = connection.getresponse()  # which has the connection from now on, and closes it
            is_answered = True
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            if not is_answered:
                connection.close()
        return response

    def _unreachable(self, error: Exception) -> ServerRefused:
        return ServerRefused(
            f"{self.url} cannot be reached: {_reason(error)}. Is the server running there? armature serve starts one."
        )

    def _refused(self, status: int, body: bytes, headers: Any) -> ServerRefused:
        said = _sentence(parse_object(body.decode(errors="replace")) or {})
        if status == 401:
            what = "The key is not one of this server's" if self.api_key else "This server needs an API key"
            return ServerRefused(f"{self.url}: {what}. Give it as --api-key KEY or in ARMATURE_API_KEYS.", status)
        message = said or f"{self.url} answered with status {status}."
        wait = headers.get("retry-after")
        return ServerRefused(f"{message} Try again in {wait} s." if wait else message, status)


class UnixConnection(http.client.HTTPConnection):
    """A connection to a UNIX socket. Requests name the host `localhost`."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CONNECT_SECONDS)
        self.sock.connect(str(self._path))


def _connection_to(url: str) -> http.client.HTTPConnection:
    if (path := unix_path_of(url)) is not None:
        return UnixConnection(path)
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "https":
        return http.client.HTTPSConnection(
            host, parts.port, timeout=CONNECT_SECONDS, context=ssl.create_default_context()
        )
    return http.client.HTTPConnection(host, parts.port, timeout=CONNECT_SECONDS)


def parse_server_url(text: str) -> str:
    """Return an address with its scheme and without `/v1`, or `unix:PATH`. Raises `SettingsInvalid`."""
    if unix_path_of(text) is not None:
        return text
    with suppress(ValueError):
        parts = urlsplit(text if "://" in text else f"http://{text}")
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0):
            path = parts.path.rstrip("/").removesuffix("/v1")
            return parts._replace(path=path, query="", fragment="").geturl()
    raise SettingsInvalid(f"{text!r} is no address of a server: give one such as http://127.0.0.1:8000.")


def parse_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _sentence(body: Mapping[str, Any]) -> str:
    """Return the sentence of an error's body, of any API dialect, or an empty string."""
    error = body.get("error")
    nested = error.get("message") if isinstance(error, dict) else error
    return next((text for text in (nested, body.get("message"), body.get("detail")) if isinstance(text, str)), "")


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}; SSL_CERT_FILE names other authorities)"
    if isinstance(error, socket.gaierror):
        return "there is no host of this name"
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS; http:// may be right"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "the answer is no HTTP" if isinstance(error, http.client.BadStatusLine) else str(error) or "it ended early"
