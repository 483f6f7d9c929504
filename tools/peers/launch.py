"""Replace this process by another program.

`python -P tools/peers/launch.py [--procs FILE]... -- PROGRAM ARGUMENT...`.
The kernel ends the program when its parent ends, which a stopped process would not notice. `--procs` are the
`cgroup.procs` files of control groups to join. Needs only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process. The program keeps the process id, the control groups and the parent-death signal."""
    words = sys.argv[1:]
    divide = words.index("--")
    for file in words[1:divide:2]:
        Path(file).write_text(str(os.getpid()))
    die_with_parent()
    os.execvp(words[divide + 1], words[divide + 1 :])


def die_with_parent() -> None:
    """Ask the kernel to end this process with its parent, since a stopped process would not notice. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
