"""The process of a server that `own_server.py` started: `armature serve`, until standard input ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from threading import Thread

from app.cli.main import COMMANDS
from app.cli.parser import parse_arguments
from app.errors import ArmatureError, StartupError


def serve_until_input_ends(flags: Sequence[str]) -> int:
    """Serve with these flags of `armature serve`, and return the exit status."""
    Thread(target=_stop_at_the_end_of_input, name="armature-input", daemon=True).start()
    try:
        # Not `main`, which writes a pod's termination message: this command does not end the pod.
        return COMMANDS["serve"](parse_arguments(["serve", *flags]))
    except ArmatureError as error:
        sys.stderr.write(f"armature: {error.message}\n")
        return error.exit_code if isinstance(error, StartupError) else 1


def _stop_at_the_end_of_input() -> None:
    # Not sys.stdin, whose lock this thread would hold while the interpreter ends.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(serve_until_input_ends(sys.argv[1:]))
