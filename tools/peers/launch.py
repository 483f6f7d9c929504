"""Becomes another program: `python -P tools/peers/launch.py [--procs FILE]... -- PROGRAM ARGUMENT...`; only the standard library is used.

The system ends it when whoever started it ends, which a halted process would not notice; `--procs` are lists of control groups to join.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns: the program keeps this process, its groups and the signal at its parent's end."""
    words = sys.argv[1:]
    divide = words.index("--")
    for file in words[1:divide:2]:
        Path(file).write_text(str(os.getpid()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execvp(words[divide + 1], words[divide + 1 :])


if __name__ == "__main__":
    main()
