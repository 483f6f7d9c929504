"""Answers that no route gives are counted too, without a label from what was sent."""

from __future__ import annotations

from typing import Any

from tests.attack.attack_server import AttackServer, attacked, get, until


def counted(server: AttackServer) -> Any:
    app: Any = server.server.config.app
    return app.state.runtime.metrics.responses


def test_what_is_not_http_is_counted_as_such() -> None:
    with attacked() as server:
        assert server.ask(b"\x16\x03\x01 hello\r\n\r\n").status == 400
        assert server.ask(get("/" + "a" * 70_000)).status == 431
        assert counted(server) == [("other", "other", status, "invalid_request") for status in (400, 431)]


def test_a_connection_that_ends_for_another_one_is_counted() -> None:
    with attacked(max_connections=1) as server, server.connect() as unfinished:
        unfinished.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
        until(lambda: any(each.cycle is not None for each in list(server.server.server_state.connections)))
        assert server.ask(get("/healthz", b"connection: close")).status == 200
        assert unfinished.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert ("other", "other", 503, "overloaded") in counted(server)
