"""Tries a checkpoint's tokenizer in a process with limits, before the server loads it, and notes that it passed.

A tokenizer.json is untrusted: its expressions may take hours, its rules may make a text grow without end, and what does
not fit together ends in a panic of the library. All of that shows in the process, and not in the server.

The program of the process is here too (`main`), so the server's modules are imported in the functions that need them.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from app.errors import CheckpointInvalid, NotReady
from app.text.child_process import ConvertRustErrors, ProcessKind, give_up_rights, limit_memory
from app.version import VERSION

if TYPE_CHECKING:
    from app.text.tokenizer import Tokenizer
    from app.text.tokenizer_files import TokenizerFiles

NOTES = "tokenizers"  # folder of the notes
# The tokenizer of Gemma 3 (33 MB, 262,000 tokens) takes 4.6 s of CPU time and 0.65 GB on AMD Zen 3. The limits are
# 83 s and 1.3 GB for it.
_MEMORY_BYTES, _MEMORY_FACTOR = 512 * 2**20, 24
_CPU_SECONDS, _CPU_SECONDS_PER_MIB = 20, 2
_WALL_FACTOR = 25  # of the CPU time: only a busy machine makes the wait longer
_KIND = ProcessKind(
    "The process that tries the tokenizer",
    "app.text.tokenizer_check",
    ("app", "tokenizers"),
    {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"},
)
_MAX_REASON = 300


def try_and_load(location: Path, folder: Path | None, lowercases: bool = False) -> Tokenizer:
    from app.text.tokenizer import Tokenizer
    from app.text.tokenizer_files import read_tokenizer_files

    files = read_tokenizer_files(location)
    check_tokenizer(files, folder)
    return Tokenizer(location, lowercases, files)


def check_tokenizer(files: TokenizerFiles, folder: Path | None) -> None:
    """Check that a tokenizer can be loaded and used within limits of time and memory.

    Tokenizers that passed are noted in the cache `folder`, if there is one. Raises `CheckpointInvalid`, or `NotReady`
    if the process could not be started.
    """
    from app.weights.cache_file import atomic_write

    content = files.tokenizer.encode("utf-8", "surrogatepass")
    key = f"{VERSION} {tokenizers.__version__} {hashlib.sha256(content).hexdigest()}"
    note = None if folder is None else folder / NOTES / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.checked"
    if note is not None and _is_noted(note):
        return
    reason = fault_of_tokenizer(content)
    if reason:
        raise CheckpointInvalid(
            f"{files.origin} is not a tokenizer that can be used: {reason[:_MAX_REASON]}. Save it again with the library "
            f"tokenizers {tokenizers.__version__}, or fetch the checkpoint again."
        )
    if note is not None:
        with suppress(OSError), atomic_write(note, durable=False):
            pass  # where the cache cannot be written, the next start tries again


def _is_noted(note: Path) -> bool:
    from app.weights.cache_file import FileUnusable, open_trusted

    try:
        os.close(open_trusted(note))
    except (OSError, FileUnusable):
        return False
    return True


def fault_of_tokenizer(content: bytes) -> str:
    memory_bytes = _MEMORY_BYTES + _MEMORY_FACTOR * len(content)
    cpu_seconds = _CPU_SECONDS + _CPU_SECONDS_PER_MIB * len(content) // 2**20
    try:
        done = subprocess.run(
            _KIND.command,
            input=f"{memory_bytes} {cpu_seconds}\n".encode() + content,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_KIND.variables,
            timeout=_WALL_FACTOR * cpu_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"trying it took more than {_WALL_FACTOR * cpu_seconds} s"
    except OSError as error:
        raise NotReady(f"{_KIND.name} cannot be started: {error}.") from error
    if done.returncode == 0:
        return done.stdout.decode("utf-8", "replace")
    if done.returncode == -signal.SIGPROF:
        return f"a few short texts take more than {cpu_seconds} s of CPU time"
    if done.returncode in (-signal.SIGABRT, -signal.SIGKILL):
        return f"a few short texts take more than {memory_bytes >> 20} MiB of memory"
    return f"the process that tried it ended with status {done.returncode}"


MAX_GROWTH = 8  # a rule that replaces texts by longer ones, and all together: characters for one character
_ADDED = 64  # characters that may be added to a text, whatever its length
_RUN = 600  # characters of a run
_MAX_PATTERNS, _MAX_PATTERN_CHARACTERS = 1_000, 200
_BATCH = 64  # texts of a call


def main() -> None:
    """Read the limits and a tokenizer.json from standard input, and write why it cannot be used, or nothing.

    The first line has the bytes of memory and the seconds of CPU time that this may take.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    memory_bytes, cpu_seconds = map(int, sys.stdin.buffer.readline().split())
    text = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    limit_memory(memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # the kernel ends the process: it has no handler
    give_up_rights()
    sys.stdout.write(fault_of(text))


def fault_of(text: str) -> str:
    """Return why a tokenizer.json cannot be used; empty if it can."""
    try:
        return growth_fault(json.loads(text)) or _try(text)
    except MemoryError:
        return "it needs more memory than it may take"
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"


def growth_fault(state: Any) -> str:
    """Return which part of a tokenizer.json makes texts too long; empty if none does."""
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        growth = _growth(state.get(name) if isinstance(state, Mapping) else None)
        if growth > MAX_GROWTH:
            return f"its {name} may write {growth:.3g} characters for one"
    return ""


def _growth(part: Any) -> float:
    """Return how many characters a part may write for one, by its rules that replace texts."""
    if isinstance(part, list):
        product = 1.0
        for one in part:
            product = min(product * _growth(one), sys.float_info.max)
        return product
    if not isinstance(part, Mapping):
        return 1.0
    if part.get("type") != "Replace":
        return _growth([value for value in part.values() if isinstance(value, list | Mapping)])
    pattern, content = part.get("pattern"), part.get("content")
    shortest = pattern.get("String") if isinstance(pattern, Mapping) else None
    length = len(shortest) if isinstance(shortest, str) and shortest else 1
    return max(1.0, len(content) / length) if isinstance(content, str) else 1.0


def _try(text: str) -> str:
    try:
        with ConvertRustErrors(CheckpointInvalid, "its library says"):
            return _encode_and_decode(text)
    except CheckpointInvalid as error:
        return error.message.splitlines()[0]


def _encode_and_decode(text: str) -> str:
    inner = tokenizers.Tokenizer.from_str(text)
    inner.no_truncation()
    inner.no_padding()
    unknown = [token_id for token_id in inner.encode("").ids if inner.id_to_token(token_id) is None]
    if unknown:
        return f"it adds the token {unknown[0]}, which its vocabulary does not have"
    for batch in _batches(json.loads(text)):
        if inner.normalizer is not None and not all(_grows_little(inner.normalizer, one) for one in batch):
            return f"its normalizer writes more than {MAX_GROWTH} characters for one"
        for add_special_tokens in (True, False):
            for encoding in inner.encode_batch(batch, add_special_tokens=add_special_tokens):
                inner.decode(encoding.ids, skip_special_tokens=not add_special_tokens)
    pairs = inner.encode_batch_fast([("a", "b"), ("", "b")])
    inner.decode_batch([encoding.ids for encoding in pairs])
    return ""


def _grows_little(normalizer: Any, text: str) -> bool:
    return len(normalizer.normalize_str(text)) <= MAX_GROWTH * len(text) + _ADDED


def _batches(state: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield the texts on which the tokenizer is tried, a batch at a time."""
    characters = [chr(code) for code in range(0x180)]
    yield [
        "",
        "".join(characters),
        "".join(reversed(characters)),
        "The fox said: 'Hello, world!' 12345 \n\n  x",
        _SAMPLES,
    ]
    for start in range(0, len(characters), _BATCH):
        yield characters[start : start + _BATCH]
    for unit in ("a", " ", "\n", "0", "-", "aA", " a", "é", "の", "\U0001f600"):
        run = unit * (_RUN // len(unit))
        yield [run, run + "!", f"x{run}y"]
    yield [pattern[:_MAX_PATTERN_CHARACTERS] for pattern in _patterns(state)][:_MAX_PATTERNS]


# characters that normalizers decompose, join, remove or map, and scripts without spaces
_SAMPLES = (
    "e\u0301 \u1e9b\u0323 \ufb01 \ufdfa \u2460 \u00ad \u200b\u200d \u0e01\u0e33 \uac00 \u4f60\u597d \u0627\u0644 "
    "\U0001f468\u200d\U0001f469 \U0010ffff"
)


def _patterns(part: Any) -> Iterator[str]:
    """Yield the texts that rules of the tokenizer look for, alone and among others."""
    if isinstance(part, list):
        for one in part:
            yield from _patterns(one)
    elif isinstance(part, Mapping):
        pattern = part.get("pattern")
        if isinstance(pattern, Mapping):
            for found in pattern.values():
                if isinstance(found, str):
                    yield from (found, f"a{found}b {found}{found}")
        yield from _patterns([value for name, value in part.items() if name != "model"])
