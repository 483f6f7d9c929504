"""Convert a Llama checkpoint to GGUF: `python -m tools.gguf_checkpoint DIR FILE.gguf [--type q4_0] [--pure]`.

It makes the file with which llama.cpp is compared. Run it with the interpreter of an environment that has `gguf` and
`llama-cpp-python`; torch is not needed. `gguf` writes the file. Weights are copied bit for bit
(`armature_bench/engine/gguf_file.py`), and llama.cpp itself quantizes them. A byte-level BPE tokenizer is included.
Without one the file accepts token ids only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.weights.checkpoint import Checkpoint, open_checkpoint
from armature_bench.engine.gguf_file import without_vocabulary, write_gguf

NORMAL_TOKEN, CONTROL_TOKEN, USER_TOKEN, UNUSED_TOKEN = 1, 3, 4, 5  # `enum llama_token_type`
TYPES = {"f16": 1, "q4_0": 2, "q8_0": 7, "q4_k_m": 15, "bf16": 32}  # `enum llama_ftype`


def main() -> int:
    arguments = _arguments()
    if arguments.type is None:
        convert(arguments.checkpoint, arguments.file)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.file.parent) as folder:
        whole = Path(folder) / "whole.gguf"
        convert(arguments.checkpoint, whole)
        quantize(whole, arguments.file, arguments.type, pure=arguments.pure, threads=arguments.threads)
    return 0


def convert(directory: Path, file: Path) -> None:
    checkpoint = open_checkpoint(directory)
    try:
        write_gguf(checkpoint, file, partial(_write_tokenizer, checkpoint))
    except CheckpointInvalid as error:
        raise SystemExit(error.message) from error


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="Hugging Face directory of a Llama checkpoint")
    parser.add_argument("file", type=Path, help="GGUF file to write")
    parser.add_argument(
        "--type", choices=list(TYPES), help="quantize to this type; without it the weights stay as stored"
    )
    parser.add_argument(
        "--pure", action="store_true", help="use this type for every matrix, including the output layer"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of the quantizer")
    return parser.parse_args()


def _write_tokenizer(checkpoint: Checkpoint, writer: Any) -> None:
    directory = checkpoint.directory
    file = directory / "tokenizer.json"
    read = byte_level(json.loads(file.read_text()), checkpoint.decoder.vocab_size) if file.exists() else None
    if read is None:
        without_vocabulary(writer)
        return
    tokens, kinds, merges = read
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    ends = json.loads((directory / "config.json").read_text()).get("eos_token_id")
    if ends is not None:
        writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)


def byte_level(tokenizer: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int], list[str]] | None:
    """Return tokens by id, their `enum llama_token_type`, and the merges; None for a tokenizer unlike GPT-2's."""
    model, split = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    if (
        model["type"] != "BPE"
        or split.get("type") != "ByteLevel"
        or split.get("add_prefix_space")
        or not split.get("use_regex", True)
    ):
        return None
    tokens, kinds = [f"[unused{token_id}]" for token_id in range(vocab_size)], [UNUSED_TOKEN] * vocab_size
    for token, token_id in model["vocab"].items():
        tokens[token_id], kinds[token_id] = token, NORMAL_TOKEN
    for added in tokenizer.get("added_tokens", []):
        tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL_TOKEN if added["special"] else USER_TOKEN
    return tokens, kinds, [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]


def quantize(whole: Path, file: Path, kind: str, *, pure: bool, threads: int) -> None:
    """Quantize with llama.cpp. Without `pure` it uses more precise types for some matrices."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.pure, params.nthread = TYPES[kind], pure, threads
    code = llama_cpp.llama_model_quantize(str(whole).encode(), str(file).encode(), params)
    if code != 0:
        raise SystemExit(f"llama.cpp could not quantize {whole}: code {code}; see its output above")


if __name__ == "__main__":
    sys.exit(main())
