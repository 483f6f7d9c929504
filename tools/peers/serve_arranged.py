"""Run `armature serve` with another arrangement of threads.

`python -m tools.peers.serve_arranged --nice-others 5 -- FLAGS...`.
Only for experiments: compare it with a normal server by `armature bench http --url URL --against URL`. An arrangement
that wins becomes a decision of the plan.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

WORKER = "armature-worker"
LOOK_SECONDS = 0.5  # compute threads start with the first product


def main() -> int:
    arguments = _arguments()
    _wait(arguments.policy, arguments.spins)
    import app.server.process

    if arguments.switch_ms is not None:
        app.server.process.SWITCH_SECONDS = arguments.switch_ms / 1e3
    if arguments.nice_compute or arguments.nice_others or arguments.batch or arguments.pin_loop is not None:
        threading.Thread(target=_arrange, args=(arguments, os.sched_getaffinity(0)), daemon=True).start()
    from app.cli.main import main as armature

    return armature(["serve", *arguments.flags])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--policy", choices=("active", "passive"), help="how compute threads wait at barriers (OMP_WAIT_POLICY)"
    )
    parser.add_argument("--spins", help="GOMP_SPINCOUNT: a number or `infinity`")
    parser.add_argument("--nice-compute", type=int, default=0)
    parser.add_argument("--nice-others", type=int, default=0, help="niceness of the event loop and the text pool")
    parser.add_argument("--batch", action="store_true", help="use SCHED_BATCH for compute threads")
    parser.add_argument("--pin-loop", type=int, metavar="CPU")
    parser.add_argument("--switch-ms", type=float, help="sys.setswitchinterval in milliseconds")
    parser.add_argument("flags", nargs="*", help="flags of armature serve, after --")
    return parser.parse_args()


def _wait(policy: str | None, spins: str | None) -> None:
    """Replace the plan's wait policy in its table."""
    from app.hardware.plan import threads

    if policy is None and spins is None:
        return
    wanted = {"OMP_WAIT_POLICY": policy or "active"} | ({"GOMP_SPINCOUNT": spins} if spins else {})
    threads.WAIT_POLICY_VARIABLES = dict.fromkeys(threads.WAIT_POLICY_VARIABLES, wanted)


def _arrange(arguments: argparse.Namespace, all_cpus: set[int]) -> None:
    """Watch for new threads as long as the process lives.

    It begins when the worker exists, because code that runs earlier counts CPUs.
    """
    arranged: set[int] = set()
    while True:
        python = {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}
        tasks = sorted(int(path.name) for path in Path("/proc/self/task").iterdir())
        for task, computes in sorted(roles(tasks, python).items()):
            if task not in arranged:
                arranged.add(task)
                with suppress(ProcessLookupError):
                    _place(task, computes, arguments, all_cpus)
        time.sleep(LOOK_SECONDS)


def roles(tasks: Iterable[int], python: Mapping[int, str]) -> dict[int, bool]:
    """Return for each thread whether it computes: the worker and threads that Python does not know.

    Empty before the worker exists.
    """
    if WORKER not in python.values():
        return {}
    return {task: python.get(task, WORKER) == WORKER for task in tasks}


def _place(task: int, computes: bool, arguments: argparse.Namespace, all_cpus: set[int]) -> None:
    """Apply the arrangement to one thread.

    Every thread is set, because a thread inherits from the one that started it.
    """
    os.setpriority(os.PRIO_PROCESS, task, arguments.nice_compute if computes else arguments.nice_others)
    if computes and arguments.batch:
        os.sched_setscheduler(task, os.SCHED_BATCH, os.sched_param(0))
    if arguments.pin_loop is not None:
        os.sched_setaffinity(task, {arguments.pin_loop} if task == os.getpid() else all_cpus)


if __name__ == "__main__":
    sys.exit(main())
