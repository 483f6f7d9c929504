"""Sides of a comparison, seen from the program that gives turns: processes that run only during their turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from armature_bench.http.process import resident_bytes
from tools.peers.turns import MARK, Taken, Turn

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("ours", "llama_cpp", "openvino", "vllm", "ours_encoder", "openvino_encoder")
# The shell's settings of thread pools are not passed on: each side sizes its pools by the `--threads` that it gets.
POOL_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TBB_")
LAST_LINES = 15  # last lines of a side's stderr, shown if it ends too early


@dataclass(frozen=True, slots=True)
class SideSpec:
    """`KIND[/LABEL]=INTERPRETER:MODEL[,name=value...]`.

    Names in capitals are environment variables. Other names are options of the side.
    """

    name: str
    python: Path
    model: Path
    options: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @classmethod
    def parse(cls, text: str) -> SideSpec:
        """Parse the text. Raises `ValueError` with a sentence."""
        place, *pairs = text.split(",")
        name, equals, rest = place.partition("=")
        python, colon, model = rest.partition(":")
        if not (equals and colon and python and model):
            raise ValueError(f"{text!r} is not KIND[/LABEL]=INTERPRETER:MODEL[,name=value...]")
        if name.partition("/")[0] not in KINDS:
            raise ValueError(f"{name.partition('/')[0]!r} is not a kind of side; there are {', '.join(KINDS)}")
        if any("=" not in pair for pair in pairs):
            raise ValueError(f"what follows the model in {text!r} must be name=value")
        given = dict(pair.split("=", 1) for pair in pairs)
        options = {key: value for key, value in given.items() if not key.isupper()}
        variables = {key: value for key, value in given.items() if key.isupper()}
        # Not resolved: the interpreter of a virtual environment is a link, and its location matters.
        return cls(name, Path(python).absolute(), Path(model).absolute(), options, variables)


class Side:
    """A side in its own process group. From `ready`, its report after loading, it is stopped between turns."""

    def __init__(self, spec: SideSpec, threads: int) -> None:
        self.spec = spec
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        options = [word for key, value in spec.options.items() for word in ("--option", f"{key}={value}")]
        self._process = subprocess.Popen(
            [spec.python, "-m", "tools.peers.turns", spec.kind, spec.model, "--threads", str(threads), *options],
            cwd=ROOT,
            env=environment(dict(os.environ), spec.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def wait_until_ready(self) -> dict[str, Any]:
        ready = self._answer()
        self._signal(signal.SIGSTOP)
        return ready

    def take(self, turn: Turn) -> Taken:
        """Run one turn. The other sides are stopped meanwhile, because spinning threads would take a core."""
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None, "it was started with a pipe"
            self._process.stdin.write(json.dumps(asdict(turn)) + "\n")
            self._process.stdin.flush()
            return Taken(**self._answer())
        except BrokenPipeError:
            raise SystemExit(self._why_ended()) from None
        finally:
            self._signal(signal.SIGSTOP)

    def resident_bytes(self) -> int:
        return resident_bytes(self._process.pid)

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(BrokenPipeError):  # input that it did not read does not matter
                if stream is not None:
                    stream.close()

    def _signal(self, number: int) -> None:
        """Signal the whole group, since some libraries start processes."""
        with suppress(ProcessLookupError):  # it may have ended
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was started with a pipe"
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        raise SystemExit(self._why_ended())

    def _why_ended(self) -> str:
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join([f"{self.spec.name} ended:", *last])


def environment(ours: dict[str, str], asked: dict[str, str]) -> dict[str, str]:
    """Return a side's environment: ours without the settings of thread pools, and the given variables."""
    kept = {name: value for name, value in ours.items() if not name.startswith(POOL_PREFIXES)}
    return {**kept, "HF_HUB_OFFLINE": "1", **asked}
