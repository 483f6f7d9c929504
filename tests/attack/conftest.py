"""Fixtures of the attacks: a tiny checkpoint and one server of it, as in the live tests."""

from tests.live.conftest import server, shared, tiny

__all__ = ["server", "shared", "tiny"]
