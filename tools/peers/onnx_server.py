"""Serves an ONNX file as it is often done by hand: ONNX Runtime behind FastAPI, with the binary Open Inference Protocol.

`python -m tools.peers.onnx_server FILE --port 8101 --threads 2`; then `armature bench http --kind infer --against` its URL.
A pool's threads run the sessions' calls, as FastAPI does with handlers that are not coroutines.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy
import onnxruntime
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

HEADER = "Inference-Header-Content-Length"
TYPES = {"tensor(float)": ("FP32", numpy.float32), "tensor(int64)": ("INT64", numpy.int64)}


def make_app(session: Any, name: str) -> FastAPI:
    """Return the application, which serves `session` as the model `name`."""
    app = FastAPI()
    app.get("/v1/models")(lambda: {"data": [{"id": name}]})  # `armature bench` asks for it

    @app.get(f"/v2/models/{name}")
    async def metadata() -> dict[str, Any]:
        inputs = [
            {"name": one.name, "datatype": TYPES[one.type][0], "shape": [-1, *one.shape[1:]]}
            for one in session.get_inputs()
        ]
        return {"name": name, "inputs": inputs, "outputs": [{"name": one.name} for one in session.get_outputs()]}

    @app.post(f"/v2/models/{name}/infer")
    async def infer(request: Request) -> Response:
        body = await request.body()
        at, feed = int(request.headers[HEADER]), {}
        types = dict(TYPES.values())
        for one in json.loads(body[:at])["inputs"]:
            end = at + one["parameters"]["binary_data_size"]
            feed[one["name"]] = numpy.frombuffer(body[at:end], types[one["datatype"]]).reshape(one["shape"])
            at = end
        results = await run_in_threadpool(session.run, None, feed)
        parts = [result.tobytes() for result in results]
        outputs = [
            {"name": one.name, "datatype": "FP32", "shape": result.shape, "parameters": {"binary_data_size": len(part)}}
            for one, result, part in zip(session.get_outputs(), results, parts, strict=True)
        ]
        head = json.dumps({"model_name": name, "outputs": outputs}).encode()
        return Response(head + b"".join(parts), 200, {HEADER: str(len(head))}, "application/octet-stream")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--port", type=int, default=8101)
    parser.add_argument("--threads", type=int, default=0, help="of a session; 0: ONNX Runtime's default")
    given = parser.parse_args()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = given.threads
    session = onnxruntime.InferenceSession(str(given.file), options, providers=["CPUExecutionProvider"])
    uvicorn.run(make_app(session, given.file.stem), port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
