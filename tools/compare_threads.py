"""One model served under several arrangements of threads, turn by turn: `python -m tools.compare_threads --model DIR [--only NAME,...]`.

Clients stream over HTTP as in `compare_http`, whose table this prints, the plan's own arrangement first. Nothing here is what serves:
what wins belongs into the plan.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from app.bench.http.tally import GenerateWorkload
from app.bench.http.workload import UniformLengths
from tools.compare_http import Job, add_load_flags, run_and_report
from tools.peers.servers import ServerSpec

# Name → flags of tools/peers/serve_arranged.py, and of `armature serve` after `--`.
ARRANGEMENTS: Mapping[str, str] = {
    "plan": "",
    "passive": "--policy passive",
    "spins-0": "--spins 0",
    "spins-1000": "--spins 1000",
    "spins-3000": "--spins 3000",
    "spins-10000": "--spins 10000",
    "spins-30000": "--spins 30000",
    "spins-300000": "--spins 300000",
    "spins-unlimited": "--spins infinity",
    "others-nice-5": "--nice-others 5",
    "others-nice-10": "--nice-others 10",
    "compute-nice-5": "--nice-compute 5",
    "compute-batch": "--batch",
    "others-nice-5-passive": "--nice-others 5 --policy passive",
    "one-thread-fewer": "-- --threads {fewer}",
    "loop-on-cpu-0": "--pin-loop 0",
    "switch-0.05-ms": "--switch-ms 0.05",
    "switch-0.2-ms": "--switch-ms 0.2",
    "switch-5-ms": "--switch-ms 5",
}
USUAL = "plan,passive,spins-1000,spins-300000,others-nice-5,others-nice-10,compute-batch,one-thread-fewer,switch-0.2-ms,switch-5-ms"


def main() -> int:
    arguments = _arguments()
    names = list(dict.fromkeys(["plan", *arguments.only.split(",")]))
    serve = f"--model {arguments.model} --host 127.0.0.1 --port {{port}} {arguments.flags}"
    specs = [arranged(name, arguments.python, serve, arguments.threads) for name in names]
    lengths = (
        UniformLengths(arguments.prompt_tokens, arguments.prompt_tokens),
        UniformLengths(arguments.max_tokens, arguments.max_tokens),
    )
    return run_and_report(
        Job(specs, arguments.clients, arguments.rounds, arguments.requests, GenerateWorkload(*lengths))
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--flags", default="", help="further flags of armature serve, in one string")
    parser.add_argument(
        "--threads", type=int, default=2, help="that the plan takes; the arrangement with one fewer counts from it"
    )
    parser.add_argument("--only", default=USUAL, help=f"any of {', '.join(ARRANGEMENTS)}")
    parser.add_argument("--python", default=sys.executable)
    add_load_flags(parser, rounds=3)
    arguments = parser.parse_args()
    unknown = set(arguments.only.split(",")) - ARRANGEMENTS.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))} is no arrangement: there are {', '.join(ARRANGEMENTS)}")
    return arguments


def arranged(name: str, python: str, serve: str, threads: int) -> ServerSpec:
    """The command of one arrangement; `serve` are the flags that all have."""
    flags, _, more = f" {ARRANGEMENTS[name]}".partition(" -- ")
    more = more.replace("{fewer}", str(max(1, threads - 1)))
    return ServerSpec.parse(f"{name}={python} -m tools.peers.serve_arranged {flags} -- {serve} {more}")


if __name__ == "__main__":
    sys.exit(main())
