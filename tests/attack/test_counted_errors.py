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
        assert server.ask(get("/" + "a" * 70_000)).status == 400
        assert counted(server) == [("other", "other", 400, "invalid_request")] * 2


def test_a_connection_too_many_is_counted() -> None:
    with attacked(max_connections=1) as server, server.connect() as busy:
        busy.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
        until(lambda: any(each.cycle is not None for each in list(server.server.server_state.connections)))
        told = server.ask(get("/healthz"))
        assert told.status == 503
        assert counted(server) == [("other", "other", 503, "overloaded")]
