"""`armature top` on a pseudo-terminal, with a real server."""

from __future__ import annotations

from tests.live.live_server import LiveServer
from tests.live.pseudo_terminal import pseudo_terminal


def test_the_picture_changes_until_ctrl_c(server: LiveServer) -> None:
    server.generate(max_tokens=4)
    with pseudo_terminal("top", "--url", server.url, "--interval", "0.2") as top:
        top.wait_for("Slow steps")
        assert "a decoder on cpu in fp32" in top.wait_for("Slow steps")
        top.type("\x03")
        top.wait_for("\x1b[?1049l")
        assert top.status() == 0
