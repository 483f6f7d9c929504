"""Run the test suites of peers, and unchanged clients, against this server, and count what passes: docs/compatibility.md.

`python -m tools.peers.suites [--suite NAME] [--url URL] [--work DIR]`. Tests come from the source packages of
llama-cpp-python and vLLM on PyPI; nothing of them is in this repository. Packages, a virtual environment and logs are
written to the folder of --work. `not_applicable.toml` lists the tests that are left out, each with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from app.weights.open import EMBEDDED_MODELS, PACKAGED_MODELS, package_directory
from tools.peers.suites.files import DEMO, SUITES, Suite
from tools.peers.suites.schemas import check_schemas
from tools.peers.suites.server_pool import ENVIRONMENT, ROOT
from tools.peers.suites.sources import interpreter, node_modules, node_versions, programs, python_versions, unpack_tests
from tools.real_model import default_directory

TARGET = 0.9  # share of the applicable tests that must pass
INTERRUPTED = 130


def main() -> int:
    """Return 1 if a suite is below its target."""
    arguments = parser().parse_args()
    names = arguments.suite or list(SUITES)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="suites-")
            if arguments.work is None
            else nullcontext(arguments.work) as place
        ):
            work = Path(place).absolute()
            work.mkdir(parents=True, exist_ok=True)
            lines = [line for name in names for line in run(SUITES[name], work, arguments)]
    except KeyboardInterrupt:
        print("suites: interrupted", file=sys.stderr)
        return INTERRUPTED
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    return report(lines, failures=arguments.failures)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tools.peers.suites", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--suite", action="append", choices=list(SUITES), help="a suite; may be repeated; default: all")
    made.add_argument(
        "--url",
        default="",
        help="a running server for the peers' tests; default: servers with the options of each test",
    )
    made.add_argument("--work", type=Path, help="folder for packages and logs, kept; default: a temporary one")
    made.add_argument("--decoder", default="", help="checkpoint for tests of decoders; default: the suite's")
    made.add_argument("--encoder", default="minilm", help="checkpoint for tests of encoders")
    made.add_argument("--only", default="", help="only the tests that this pytest expression (-k) selects")
    made.add_argument("--file", action="append", help="only the files whose name contains this; may be repeated")
    made.add_argument("--failures", action="store_true", help="print each failed test with its reason")
    made.add_argument("--all", action="store_true", help="run also the tests that not_applicable.toml leaves out")
    made.add_argument("--json", type=Path, help="write every test's outcome to this file")
    return made


def run(suite: Suite, work: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the files of a suite with pytest in a process of its own, and return a line for each test."""
    if suite.name == "schemas":
        return [{"suite": suite.name, **line} for line in check_schemas(work, ROOT / (arguments.decoder or DEMO))]
    files = [name for name in suite.files if any(part in name for part in arguments.file or [""])]
    if not files:
        return []
    tests = unpack_tests(suite.package, work) if suite.package else ROOT
    python = interpreter(work / suite.environment, suite.requirements)
    outcomes = work / f"{suite.name}.jsonl"
    outcomes.unlink(missing_ok=True)
    start = tests.parent if suite.above else tests
    paths = os.pathsep.join([str(start), str(ROOT)])
    environment = os.environ | {
        ENVIRONMENT: json.dumps(configuration(suite, outcomes, arguments)),
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment |= install_clients(suite, work)
    pytest = [str(python), *"-m pytest -q -p no:cacheprovider --continue-on-collection-errors".split()]
    command = [*pytest, *suite.options, *files]
    if arguments.only:
        command += ["-k", arguments.only]
    with (work / f"{suite.name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=start, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # pytest then stops its servers
            process.wait()
            raise
    if not outcomes.exists():
        raise SystemExit(
            f"suites: {suite.name} ran no test:\n{(work / f'{suite.name}.log').read_text('utf-8', 'replace')[-3000:]}"
        )
    lines = outcomes.read_text(encoding="utf-8").splitlines()
    return [{"suite": suite.name, **json.loads(line)} for line in lines]


def install_clients(suite: Suite, work: Path) -> dict[str, str]:
    """Install the packages of npm and the programs, print all versions, and return where the tests find them."""
    modules, folders = node_modules(work, suite.node_packages), programs(work, suite.programs)
    environments = {
        "npm": node_versions(modules, suite.node_packages),
        suite.environment: python_versions(work / suite.environment, requirements_of(suite)),
        **{folder.name: python_versions(folder, [folder.name, "openai"]) for folder in folders},
    }
    for name, versions in environments.items():
        if versions:
            print(f"{suite.name}, {name}:", ", ".join(" ".join(each) for each in versions.items()), flush=True)
    found = {"CLIENTS_PROGRAMS": os.pathsep.join(str(folder / "bin") for folder in folders)}
    return found if modules is None else found | {"CLIENTS_NODE_MODULES": str(modules)}


def requirements_of(suite: Suite) -> list[str]:
    """Return a suite's requirements, with the lines of its file of requirements in place of `-r FILE`."""
    if suite.requirements[:1] != ["-r"]:
        return suite.requirements
    lines = Path(suite.requirements[1]).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def configuration(suite: Suite, outcomes: Path, arguments: argparse.Namespace) -> dict[str, str]:
    decoder = arguments.decoder or suite.decoder
    if decoder == "real":
        decoder = str(default_directory())
        if not Path(decoder).is_dir():
            raise SystemExit(f"suites: {suite.name} needs SmolLM2-135M-Instruct: `make real-model` writes it")
    return {
        "url": arguments.url,
        "python": sys.executable,
        "outcomes": str(outcomes),
        "all": "all" if arguments.all else "",
        "work": str(outcomes.parent),
        "decoder": decoder,
        "encoder": arguments.encoder,
        "decoder_directory": str(ROOT / decoder),
        "encoder_directory": str(encoder_directory(arguments.encoder)) if suite.package else "",
    }


def encoder_directory(name: str) -> Path:
    """Return the folder of an encoder that is given by its name or its path."""
    return package_directory(name) if name in PACKAGED_MODELS else ROOT / EMBEDDED_MODELS.get(name, name)


def report(lines: list[dict[str, Any]], *, failures: bool) -> int:
    """Print a row for each file and each suite. Return 1 if a suite has a share below the target."""
    print(f"{'suite':<10} {'file':<62} {'applicable':>10} {'passed':>6} {'failed':>6} {'ratio':>6} {'left out':>8}")
    status = 0
    for suite in dict.fromkeys(line["suite"] for line in lines):
        of_suite = [line for line in lines if line["suite"] == suite]
        for file in dict.fromkeys(line["file"] for line in of_suite):
            print_row(suite, file, [line for line in of_suite if line["file"] == file])
        status |= print_row(suite, "all", of_suite) < TARGET
        refused = sum(line["reason"].startswith("refused: ") and line["outcome"] == "passed" for line in of_suite)
        if refused:
            slowest = max(float(line.get("seconds", 0.0)) for line in of_suite)
            print(f"{suite}: {refused} were refused by name, the slowest took {slowest:.2f} s")
    if failures:
        for line in lines:
            if line["outcome"] == "failed":
                print(f"{line['file']}::{line['test']}: {line['reason']}")
    return int(status)


def print_row(suite: str, file: str, lines: list[dict[str, Any]]) -> float:
    counts = Counter(line["outcome"] for line in lines)
    passed, failed = counts["passed"], counts["failed"]
    applicable = passed + failed
    ratio = passed / applicable if applicable else 1.0
    shown = f"{ratio:.0%}" if applicable else "-"
    print(f"{suite:<10} {file:<62} {applicable:>10} {passed:>6} {failed:>6} {shown:>6} {counts['not applicable']:>8}")
    return ratio


if __name__ == "__main__":
    sys.exit(main())
