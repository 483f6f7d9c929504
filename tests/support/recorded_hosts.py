"""Recorded hosts of the tests as directories: writes out what `hosts/<name>/tree.txt` says and probes it.

The tests of the plan and docs/auto.md need machines that are not here. The format is in
`tests/unit/hardware/hosts/README.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from app.hardware.probe.host_files import parse_cpu_list

HOSTS = Path(__file__).resolve().parents[1] / "unit" / "hardware" / "hosts"


def sections(text: str) -> Iterator[tuple[str, str, str]]:
    """(head, `each` or `repeat` with its numbers, body) of every `===` line and what follows it."""
    for part in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
        line, _, body = part.partition("\n")
        head, turn = re.match(r"(.*?)((?: (?:each|repeat) \S+)?)$", line).groups()
        yield head, turn.strip(), body


def _filled(template: str, number: int) -> str:
    """`{n}` and sums of it, such as `{n+44}` and `{n//2*2}`, with a number for n. These files are ours: eval is enough."""
    return re.sub(r"\{(n[-+*/\d]*)\}", lambda match: str(eval(match[1], {"__builtins__": {}}, {"n": number})), template)


def read_tree(name: str, folder: Path = HOSTS, file: str = "tree.txt") -> dict[str, str]:
    """Path, or `$ command`, of a host's files → content."""
    files: dict[str, str] = {}
    for head, turn, body in sections((folder / name / file).read_text()):
        numbers = parse_cpu_list(turn.partition(" ")[2])
        if head.startswith("include "):
            files |= read_tree(head.removeprefix("include "), folder)
        elif turn.startswith("each"):
            files |= {_filled(head, number): _filled(body, number) for number in numbers}
        else:
            files[head] = "".join(_filled(body, number) for number in numbers) if turn else body
    return files


def write_tree(files: dict[str, str], root: Path) -> Callable[[list[str]], str | None]:
    """Writes the files below `root` and returns the `run` of that host."""
    for name, content in files.items():
        if not name.startswith("$"):
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return lambda command: files.get(f"$ {' '.join(command)}", files.get(f"$ {command[0]}"))
