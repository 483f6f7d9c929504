"""Requests of the commands in a terminal: addresses, streams, and one sentence for each failure."""

from __future__ import annotations

import socket

import pytest

from app.cli.clients.connection import ServerConnection, ServerRefused, parse_server_url
from app.errors import SettingsInvalid
from scripted_http import ScriptedServer, delta, running


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host/v1/", "http://host"),
        ("https://host/models/a/v1", "https://host/models/a"),
        ("http://[::1]:80?x=1", "http://[::1]:80"),
    ],
)
def test_an_address_is_read_as_people_write_it(given: str, url: str) -> None:
    assert parse_server_url(given) == url


@pytest.mark.parametrize("given", ["ftp://host", "http://", "http://host:port", "http://host:99999", "", "http://[::1"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(SettingsInvalid, match="is no address of a server"):
        parse_server_url(given)


def refusal(script: ScriptedServer, key: str | None = None) -> ServerRefused:
    with running(script), pytest.raises(ServerRefused) as refused:
        ServerConnection(script.url, key).get_json("/v1/models")
    return refused.value


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (500, {"error": {"message": "OpenAI's."}}, "OpenAI's."),
        (400, {"error": "Ollama's."}, "Ollama's."),
        (404, {"message": "The proxy's."}, "The proxy's."),
        (404, {"detail": "FastAPI's."}, "FastAPI's."),
        (502, "<html>", "answered with status 502."),
        (200, "<html>", "did not answer with a JSON object"),
        (401, {}, "This server needs an API key. Give it as --api-key KEY or in ARMATURE_API_KEYS."),
    ],
)
def test_an_error_is_the_servers_own_sentence(status: int, body: object, message: str) -> None:
    assert message in refusal(ScriptedServer({"/v1/models": (status, body)})).message


def test_a_wrong_key_is_not_a_missing_one() -> None:
    script = ScriptedServer({"/v1/models": (401, {})})
    assert "The key is not one of this server's" in refusal(script, "wrong").message
    assert script.keys == ["Bearer wrong"]


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ServerRefused, match=r"cannot be reached: Connection refused\. Is the server running there\?"):
        ServerConnection(f"http://127.0.0.1:{port}").get("/")
    with pytest.raises(ServerRefused, match="cannot be reached"):
        list(ServerConnection(f"http://127.0.0.1:{port}").events("/", {}))


def test_what_is_no_http() -> None:
    with running(ScriptedServer({})) as script, pytest.raises(ServerRefused, match="does not speak TLS"):
        ServerConnection(script.url.replace("http:", "https:")).get("/")


def test_a_stream_gives_its_events() -> None:
    with running(ScriptedServer({"/chat": (200, [delta(content="a"), delta(content="b")])})) as script:
        assert list(ServerConnection(script.url).events("/chat", {"n": 1})) == [delta(content="a"), delta(content="b")]
    assert script.asked == [{"n": 1}]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((429, {"error": {"message": "Full."}}), r"^Full\. Try again in 3 s\.$"),
        ((200, [delta(content="a"), {"error": {"message": "The step failed."}}]), "The step failed"),
        ((200, "data: {\n\n"), "an event that is no JSON object"),
        ((200, [delta(content="a"), None]), "ended before the answer was complete"),
    ],
)
def test_a_stream_that_fails_says_why(answer: tuple[int, object], message: str) -> None:
    script = ScriptedServer({"/chat": answer}, headers={"retry-after": "3"})
    with running(script), pytest.raises(ServerRefused, match=message):
        list(ServerConnection(script.url).events("/chat", {}))
