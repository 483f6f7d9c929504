"""A pod that cannot serve: its exit status and termination message. Some cases must serve with a warning."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.proofs.containers import Container, Image
from tools.proofs.findings import Findings

DEMO = Path(__file__).resolve().parents[2] / "app" / "demo" / "llama"
WEIGHTS = "model.safetensors"
CACHE = "/var/cache/armature"
SMALL_CACHE = (f"--tmpfs={CACHE}:size=64k,uid=10001",)  # a file system that is too small for any cache
MOST_BYTES = 4096  # the part of a termination message that Kubernetes reads
END_SECONDS = 120.0
OPERATORS = 2  # exit status of errors that the operator can correct


@dataclass(frozen=True, slots=True)
class Case:
    """One case. `says` are words that the reason must contain. `make` returns docker options for a folder."""

    name: str
    says: tuple[str, ...]
    make: Callable[[Path], Sequence[str]]
    flags: tuple[str, ...] = ()
    serves: bool = False  # the server must serve, with one warning


def cases(big_model: Path | None) -> list[Case]:
    """Return the cases. `big_model` does not fit into `SMALL_MEMORY`; without it that case is omitted."""
    found = [
        Case("no model volume", ("/models/model",), lambda folder: _model_at(None)),
        Case("an empty model volume", ("/models/model",), lambda folder: _model_at(folder)),
        Case("half-copied weights", (WEIGHTS,), lambda folder: _model_at(_half(folder))),
        Case("a copy under way", ("incomplete",), lambda folder: _model_at(_under_way(folder))),
        Case("a large-file pointer in place of weights", ("pointer",), lambda folder: _model_at(_pointer(folder))),
        Case("unreadable weights", (WEIGHTS, "10001"), lambda folder: _model_at(_unreadable(folder))),
        Case("api_key_file missing", ("/keys/keys",), lambda folder: (), ("--api-key-file", "/keys/keys")),
        Case("api_key_file empty", ("/keys/keys",), _empty_keys, ("--api-key-file", "/keys/keys")),
        Case(
            "a cache volume that is read-only",
            ("Read-only file system",),
            lambda folder: (f"--volume={folder}:{CACHE}:ro",),
            ("--precision", "int4"),
            serves=True,
        ),
        Case(
            "a cache volume that is full",
            ("No space left",),
            lambda folder: SMALL_CACHE,
            ("--precision", "int4"),
            serves=True,
        ),
    ]
    if big_model is not None:
        memory = ("--memory=256m", "--memory-swap=256m")
        words = ("memory", "limit")
        found.append(
            Case(
                "memory limit too small",
                words,
                lambda folder: (*_model_at(big_model), *memory),
                ("--precision", "fp32"),
            )
        )
    return found


def run(findings: Findings, image: Image, big_model: Path | None) -> None:
    rows = []
    for case in cases(big_model):
        with tempfile.TemporaryDirectory() as name:
            rows.append((_served if case.serves else _refused)(findings, image, case, Path(name)))
    if big_model is None:
        findings.skipped.append("memory limit too small: no model was given (`--model DIR`).")
    findings.table("What was said", ("case", "said"), rows)


def _refused(findings: Findings, image: Image, case: Case, folder: Path) -> tuple[str, str]:
    message = folder / "termination-log"
    message.touch()
    message.chmod(0o666)
    options = (f"--volume={message}:/dev/termination-log", "--memory=2g", *case.make(_open(folder / "case")))
    with Container(image, options, case.flags, publish=False) as container:
        code, state = container.wait(END_SECONDS), container.state()
        last = container.last_words()
    said = message.read_text()
    ended = code == OPERATORS and not state["OOMKilled"]
    findings.check(f"{case.name}: ends", ended, f"{code}{', killed for memory' * state['OOMKilled']}", OPERATORS)
    findings.check(f"{case.name}: one line of reason", *judged(said, case.says))
    return case.name, said or f"(nothing; the log ends: {last})"


def judged(said: str, wanted: Sequence[str]) -> tuple[bool, str, str]:
    """Check that a termination message is one short line without a stack trace that contains the words.

    Returns whether it is, the message, and what was expected.
    """
    faults = [f"does not say {word!r}" for word in wanted if word not in said]
    if len(said.strip().splitlines()) != 1:
        faults.append(f"has {len(said.strip().splitlines())} lines")
    if len(said.encode()) > MOST_BYTES:
        faults.append(f"has {len(said.encode())} bytes")
    if "Traceback" in said:
        faults.append("is a stack trace")
    return not faults, ", ".join(faults) or f"one line, {len(said)} characters", " and ".join(("one line", *wanted))


def _served(findings: Findings, image: Image, case: Case, folder: Path) -> tuple[str, str]:
    with Container(image, ("--memory=2g", *case.make(_open(folder / "case"))), case.flags) as container:
        container.wait_until_ready()
        warnings = [line for line in container.log().splitlines() if " WARNING " in line and CACHE in line]
        container.post("/generate", {"prompt": "Once", "max_tokens": 2})
    fitting = len(warnings) == 1 and all(word in warnings[0] for word in case.says)
    wanted = " and ".join(("one warning", *case.says))
    findings.check(f"{case.name}: serves all the same, with one warning", fitting, f"{len(warnings)} warnings", wanted)
    return case.name, " / ".join(line.partition(" WARNING ")[2] for line in warnings)


def _model_at(folder: Path | None) -> tuple[str, ...]:
    mount = () if folder is None else (f"--volume={folder.resolve()}:/models/model:ro",)
    return ("--env=ARMATURE_MODEL=/models/model", *mount)


def _open(folder: Path) -> Path:
    """Make a folder readable by the container's user, as a volume would be."""
    folder.mkdir()
    folder.chmod(0o755)
    folder.parent.chmod(0o755)
    return folder


def _copied(folder: Path) -> Path:
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    return folder


def _half(folder: Path) -> Path:
    weights = _copied(folder) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return folder


def _under_way(folder: Path) -> Path:
    weights = _copied(folder) / WEIGHTS
    weights.rename(weights.with_name(f"{WEIGHTS}.incomplete"))
    return folder


def _pointer(folder: Path) -> Path:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 8431000\n"
    (_copied(folder) / WEIGHTS).write_text(pointer)
    return folder


def _unreadable(folder: Path) -> Path:
    (_copied(folder) / WEIGHTS).chmod(0o600)
    return folder


def _empty_keys(folder: Path) -> tuple[str, ...]:
    (folder / "keys").touch()
    return (f"--volume={folder}:/keys:ro",)
