"""Compare our quantization with llama.cpp's: `python -m tools.measure.llama_cpp_quality --model DIR --peer PYTHON`.

PYTHON is the interpreter of an environment that has `gguf` and `llama-cpp-python`. Both engines read the same windows
of token ids of the same checkpoint. All results are relative to our FP32.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "READ "  # prefix of the line that this program reads
KINDS = {
    "Q8_0": ("q8_0", True),
    "Q4_0, output in six bits": ("q4_0", False),
    "Q4_0 pure": ("q4_0", True),
}  # name: (type, --pure)


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one engine at one precision."""

    name: str
    perplexity: float
    bytes_per_parameter: float


def main() -> int:
    """Print a table and, in the last line, JSON."""
    arguments = _arguments()
    if arguments.windows is not None:
        return _peer(arguments.model, arguments.windows, arguments.threads)
    ours, windows = _ours(arguments)
    readings = [*ours, *_theirs(arguments, windows)]
    exact = readings[0].perplexity
    print(f"{arguments.model.name}, {sum(len(window) - 1 for window in windows):,} tokens of {arguments.text.name}\n")
    print(f"{'':<40}{'perplexity':>12}{'over FP32':>12}{'B a parameter':>16}")
    for one in readings:
        print(
            f"{one.name:<40}{one.perplexity:>12.4f}{100 * (one.perplexity / exact - 1):>+11.2f}%{one.bytes_per_parameter:>16.3f}"
        )
    print(json.dumps([asdict(one) | {"over_fp32": one.perplexity / exact - 1} for one in readings]))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory of a Llama checkpoint")
    parser.add_argument("--text", type=Path, help="text file, as for `armature bench quality`")
    parser.add_argument("--tokens", type=int, help="maximum number of tokens of the text")
    parser.add_argument("--peer", help="interpreter of the other environment")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--cache-dir", type=Path, help="our cache of packed weights, including those of `armature pack --text`"
    )
    parser.add_argument("--windows", type=Path, help=argparse.SUPPRESS)  # set in the peer process: the windows to read
    return parser.parse_args()


# ---- our engine ----------------------------------------------------------------------------------------------------


def _ours(arguments: argparse.Namespace) -> tuple[list[Reading], list[list[int]]]:
    from app.bench.engine.quality import QualityJob, measure_quality
    from app.engine.calibration.perplexity import read_windows
    from app.hardware.probe.probe import probe
    from app.settings import load_settings
    from app.text.tokenizer import Tokenizer
    from app.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(arguments.model)
    cache = {} if arguments.cache_dir is None else {"cache_dir": str(arguments.cache_dir)}
    subject = QualityJob(checkpoint, load_settings(threads=str(arguments.threads), **cache)[0], probe())
    length = checkpoint.model_config.max_model_len
    windows = read_windows(Tokenizer(checkpoint.directory), arguments.text, length, arguments.tokens)
    outcome = measure_quality(subject, arguments.text, arguments.tokens)
    values = {figure.name: figure.value for figure in outcome.figures}
    precisions = [name.removesuffix(", perplexity") for name in values if name.endswith(", perplexity")]
    return [
        Reading(f"ours, {one}", values[f"{one}, perplexity"], values[f"{one}, weights"]) for one in precisions
    ], windows


def _theirs(arguments: argparse.Namespace, windows: list[list[int]]) -> list[Reading]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "windows.json"
        file.write_text(json.dumps(windows))
        words = ["-m", "tools.measure.llama_cpp_quality", "--model", str(arguments.model), "--windows", str(file)]
        command = [arguments.peer, *words, "--threads", str(arguments.threads)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode != 0 or not lines:
        raise SystemExit(f"{arguments.peer} failed:\n{done.stderr[-2000:]}")
    return [Reading(**one) for one in json.loads(lines[-1])]


# ---- llama.cpp, in its own interpreter -----------------------------------------------------------------------------


def _peer(model: Path, windows: Path, threads: int) -> int:
    from app.weights.checkpoint import open_checkpoint
    from tools.gguf_checkpoint import quantise, write_gguf

    read: list[list[int]] = json.loads(windows.read_text())
    num_parameters = open_checkpoint(model).needs().num_parameters
    readings = []
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.gguf"
        write_gguf(model, whole)
        for name, (kind, pure) in {"as stored": (None, True), **KINDS}.items():
            file = whole
            if kind is not None:
                file = Path(folder) / "rounded.gguf"
                quantise(whole, file, kind, pure=pure, threads=threads)
            perplexity = _perplexity(file, read, threads)
            readings.append(Reading(f"llama.cpp, {name}", perplexity, _tensor_bytes(file) / num_parameters))
    print(MARK + json.dumps([asdict(one) for one in readings]), flush=True)
    return 0


def _tensor_bytes(file: Path) -> int:
    from gguf import GGUFReader

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(file).tensors)


def _perplexity(file: Path, windows: list[list[int]], threads: int) -> float:
    """Return the perplexity over all tokens except the first of each window."""
    import llama_cpp as api

    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(file).encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = max(map(len, windows))
    params.n_threads = params.n_threads_batch = threads
    context = api.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp cannot load {file}; see its output above")
    batch = api.llama_batch_init(params.n_batch, 0, 1)
    nats = sum(_nats(api, model, context, batch, window) for window in windows)
    api.llama_free(context)
    api.llama_model_free(model)
    return math.exp(nats / sum(len(window) - 1 for window in windows))


def _nats(api: Any, model: Any, context: Any, batch: Any, window: list[int]) -> float:
    """Return the negative log-likelihood of one window, in nats, starting from an empty cache."""
    import numpy as np

    api.llama_memory_clear(api.llama_get_memory(context), False)
    for at, token in enumerate(window[:-1]):
        batch.token[at], batch.pos[at], batch.logits[at] = token, at, True
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
    batch.n_tokens = len(window) - 1
    code = api.llama_decode(context, batch)
    if code != 0:
        raise SystemExit(f"llama_decode returned {code}")
    size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    logits = np.ctypeslib.as_array(api.llama_get_logits(context), (len(window) - 1, size)).astype(np.float64)
    top = logits.max(1)
    total = np.log(np.exp(logits - top[:, None]).sum(1)) + top
    return float((total - logits[np.arange(len(window) - 1), window[1:]]).sum())


if __name__ == "__main__":
    sys.exit(main())
