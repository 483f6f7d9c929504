"""Flags of `armature chat` and `armature top` in the form of argparse arguments."""

from __future__ import annotations

import argparse
from typing import Any

LEAST_INTERVAL = 0.2


def server_flags() -> dict[str, dict[str, Any]]:
    """Return the flags that name a running server."""
    return {
        "--url": {"help": "address of a running server, such as http://127.0.0.1:8000 or unix:/run/armature.sock"},
        "--api-key": {"metavar": "KEY", "help": "sent as a bearer token; default: the first of ARMATURE_API_KEYS"},
    }


def chat_flags() -> dict[str, dict[str, Any]]:
    """Return the flags of `armature chat`."""
    return {
        "prompt": {
            "nargs": "*",
            "metavar": "PROMPT",
            "help": "send this, and the text of a pipe after it, print the answer and end; without both, a conversation",
        },
        **server_flags(),
        "--system": {"metavar": "TEXT", "help": "system message"},
        "--temperature": {"metavar": "T", "help": "0: always the most likely token; default: the server's"},
        "--max-tokens": {"metavar": "N", "help": "most tokens of an answer; default: the server's"},
        "--seed": {"metavar": "N", "help": "seed of the random numbers; default: another one for each answer"},
        "--stats": {"action": "store_true", "help": "show tokens per second after each answer"},
    }


def top_flags() -> dict[str, dict[str, Any]]:
    """Return the flags of `armature top`."""
    return {
        **server_flags(),
        "--interval": {
            "type": _interval,
            "default": 2.0,
            "metavar": "S",
            "help": "seconds between two readings (default 2)",
        },
        "--once": {"action": "store_true", "help": "print one picture and end, as without a terminal"},
    }


def _interval(text: str) -> float:
    seconds = float(text)
    if seconds < LEAST_INTERVAL:
        raise argparse.ArgumentTypeError(f"must be at least {LEAST_INTERVAL}, not {seconds:g}")
    return seconds
