"""Recorded hosts as directories: writes out what `hosts/<name>/tree.txt` says (its format: `hosts/README.md`) and probes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.hardware.facts import Facts, Needs
from app.hardware.probe.host_files import parse_cpu_list
from app.hardware.probe.probe import probe

HOSTS = Path(__file__).parent / "hosts"
Recorded = Callable[[str], Facts]


@pytest.fixture(autouse=True)
def _settings_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan makes of defaults is tested with them; other tests say that nothing is measured."""
    monkeypatch.delenv("ARMATURE_CALIBRATE", raising=False)


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


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The facts of a recorded host, probed once."""
    known: dict[str, Facts] = {}

    def facts(name: str) -> Facts:
        if name not in known:
            root = tmp_path_factory.mktemp(name)
            known[name] = probe(root, write_tree(read_tree(name), root))
        return known[name]

    return facts


@pytest.fixture
def llama_1b() -> Needs:
    """Llama-3.2-1B: its config.json and the headers of its safetensors."""
    return Needs(
        kind="decoder",
        architecture="LlamaForCausalLM",
        num_parameters=1_235_814_400,
        weight_bytes=2_471_645_608,
        bytes_by_precision={"fp32": 4_943_257_600, "bf16": 2_471_628_800, "int8": 1_240_000_000, "int4": 660_000_000},
        kv_elements_per_token=2 * 16 * 8 * 64,
        max_model_len=131_072,
        num_layers=16,
        hidden_size=2048,
        vocab_size=128_256,
        stored_dtype="bfloat16",
        int8_copy_bytes=980_000_000,
        num_kv_heads=8,
        layer_weights={2048: 16 * (3072 + 2048 + 2 * 8192) * 2048, 8192: 16 * 2048 * 8192},
    )


@pytest.fixture
def recipes() -> frozenset[tuple[str, str, str]]:
    """What is built: both precisions on both kinds of processor."""
    return frozenset(
        ("cpu", architecture, precision) for architecture in ("x86_64", "arm64") for precision in ("fp32", "bf16")
    )
