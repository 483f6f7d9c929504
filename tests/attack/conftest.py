"""Fixtures of the attacks: a tiny checkpoint and one server of it, as in the live tests; a certificate."""

from __future__ import annotations

from tests.live.conftest import certificate, server, shared, tiny

__all__ = ["certificate", "server", "shared", "tiny"]
