"""Serve another library's encoder behind a plain FastAPI route.

`python -m tools.peers.embed_route KIND MODEL --port PORT`.
`sentence_transformers` loads the checkpoint as it is. `openvino` and `onnxruntime` convert it once into `--exports`,
pad the texts of a request to the longest and average over tokens. `--workers` requests are computed at a time, one by
default. It runs in the peer's own environment. Compare it with `armature bench http --kind embed --against URL`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import Body, FastAPI
from tokenizers import Tokenizer

Vectors = np.ndarray  # [texts, size], of length 1
Embed = Callable[[list[str]], tuple[Vectors, int]]  # returns the vectors and the number of tokens read
Run = Callable[[dict[str, np.ndarray]], np.ndarray]  # from ids and mask [texts, tokens] to the last hidden states


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--exports", type=Path, help="folder for converted models")
    parser.add_argument("--threads", type=int, default=2, help="threads of each worker")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    embed = KINDS[arguments.kind](arguments)
    uvicorn.run(route(embed, arguments.workers), host="127.0.0.1", port=arguments.port, log_level="warning")


def route(embed: Embed, workers: int) -> FastAPI:
    """Return an app with OpenAI's embeddings route, written the obvious way."""
    app, pool = FastAPI(), ThreadPoolExecutor(workers)

    @app.post("/v1/embeddings")
    async def embeddings(body: dict[str, Any] = Body()) -> dict[str, Any]:  # noqa: B008 - FastAPI's way
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        vectors, num_tokens = await asyncio.get_running_loop().run_in_executor(pool, embed, texts)
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors.tolist())
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": body.get("model", ""), "usage": usage}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "encoder", "object": "model"}]}

    return app


def sentence_transformers(arguments: argparse.Namespace) -> Embed:
    import sentence_transformers as library

    model = library.SentenceTransformer(str(arguments.model), device="cpu")
    tokenizer = tokenizer_of(arguments.model)  # only to count tokens, which the library does not report

    def embed(texts: list[str]) -> tuple[Vectors, int]:
        num_tokens = sum(sum(encoding.attention_mask) for encoding in tokenizer.encode_batch(texts))
        return model.encode(texts, normalize_embeddings=True, show_progress_bar=False), num_tokens

    return embed


def openvino(arguments: argparse.Namespace) -> Embed:
    import openvino as library

    folder = arguments.exports / "openvino"
    if not (folder / "openvino_model.xml").exists():
        command = (sys.executable, "-m", "tools.peers.export_openvino", arguments.model, folder, "--precision", "fp32")
        subprocess.run(command, check=True)
    properties = {"NUM_STREAMS": arguments.workers, "INFERENCE_NUM_THREADS": arguments.workers * arguments.threads}
    model = library.compile_model(folder / "openvino_model.xml", "CPU", properties)

    own = threading.local()  # each worker's inference request, which owns the output until the next one

    def run(inputs: dict[str, np.ndarray]) -> np.ndarray:
        if not hasattr(own, "request"):
            own.request = model.create_infer_request()
        return np.asarray(own.request.infer(inputs, share_inputs=True, share_outputs=True)[model.output(0)])

    return pooled(tokenizer_of(arguments.model), run, {each.get_any_name() for each in model.inputs})


def onnxruntime(arguments: argparse.Namespace) -> Embed:
    import onnxruntime as library

    file = arguments.exports / "onnx" / "model.onnx"
    if not file.exists():
        from optimum.exporters.onnx import main_export

        main_export(str(arguments.model), file.parent, task="feature-extraction", library_name="transformers")
    options = library.SessionOptions()
    options.intra_op_num_threads = arguments.threads
    session = library.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def run(inputs: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(session.run(None, inputs)[0])

    return pooled(tokenizer_of(arguments.model), run, {each.name for each in session.get_inputs()})


def tokenizer_of(model: Path) -> Tokenizer:
    """Return a tokenizer that pads to the longest text of a request and truncates where sentence-transformers does."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(json.loads((model / "sentence_bert_config.json").read_text())["max_seq_length"])
    return tokenizer


def pooled(tokenizer: Tokenizer, run: Run, names: set[str]) -> Embed:
    """Return the mean of the hidden states over each text's tokens, of length 1. `names` are the model's inputs."""

    def embed(texts: list[str]) -> tuple[Vectors, int]:
        encodings = tokenizer.encode_batch(texts)
        ids = np.array([encoding.ids for encoding in encodings], dtype=np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], dtype=np.int64)
        known = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        hidden = run({name: known[name] for name in names})
        vectors = np.einsum("btd,bt->bd", hidden, mask.astype(np.float32))
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), int(mask.sum())

    return embed


KINDS: dict[str, Callable[[argparse.Namespace], Embed]] = {
    "sentence_transformers": sentence_transformers,
    "openvino": openvino,
    "onnxruntime": onnxruntime,
}


if __name__ == "__main__":
    main()
