"""The real service of an encoder, classifier or program around a worker that answers at once with known values."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from app.api.routing import ApiRuntime
from app.messages import Array, ArraysReady, Command, Encode, Infer, Signature, TensorSpec, Timings
from app.metrics.instruments import Metrics
from app.models.encoders.config import EncoderConfig
from app.service.served_model import ServedDecoder, ServedEncoder, ServedModel, ServedProgram, ServingLimits
from app.service.service import Service
from fake_worker import FakeWorker, tokenizer
from tests.api.conftest import application
from tests.api.scripted_service import Lifetime

LIMITS = ServingLimits(
    max_model_len=64, max_running_seqs=8, max_waiting_requests=8, request_timeout_seconds=60, vocab_size=340
)
SIGNATURE = Signature(
    (TensorSpec("pixels", "FP32", (-1, 2, -1)), TensorSpec("flags", "BOOL", (-1,))),
    (TensorSpec("sum", "FP32", (-1,)), TensorSpec("half", "BF16", (-1, 1))),
)
HIDDEN = 2
TIMINGS = Timings(queue_seconds=0.001, encode_seconds=0.002)


def encoder(labels: tuple[str, ...] = ()) -> ServedEncoder:
    config = EncoderConfig(
        "BertModel", 1, 1, 1, HIDDEN, HIDDEN, 4, 340, 64, 1e-12, "gelu", (None,), (None,), num_types=2, labels=labels
    )
    return ServedEncoder("tiny/encoder", LIMITS, tokenizer(), config)


def decoder() -> ServedDecoder:
    return ServedDecoder("tiny", LIMITS, tokenizer(), None)


def program(signature: Signature = SIGNATURE) -> ServedProgram:
    return ServedProgram("tiny", LIMITS, signature)


def fp32(*values: float, shape: tuple[int, ...]) -> Array:
    return Array("FP32", shape, array("f", values).tobytes())


def answered(order: Command) -> ArraysReady | None:
    """An embedding is [tokens, sum of ids], logits likewise, a token's hidden state [its id, its type]; a program adds up its pixels."""
    if isinstance(order, Encode):
        lengths = [(len(text.token_ids), sum(text.token_ids)) for text in order.texts]
        pooled = fp32(*(value for pair in lengths for value in pair), shape=(len(lengths), HIDDEN))
        tokens = [
            pair
            for text in order.texts
            for pair in zip(text.token_ids, text.type_ids or (0,) * len(text.token_ids), strict=True)
        ]
        states = fp32(*(value for pair in tokens for value in pair), shape=(len(tokens), HIDDEN))
        made = {"embedding": pooled, "logits": pooled, "last_hidden_state": states}
        return ArraysReady(order.request_id, {name: made[name] for name in order.outputs}, TIMINGS, len(tokens))
    if not isinstance(order, Infer):
        return None
    pixels = array("f")
    pixels.frombytes(order.inputs["pixels"].data)
    batch = order.inputs["pixels"].shape[0]
    width = len(pixels) // batch
    sums = fp32(*(sum(pixels[row * width : (row + 1) * width]) for row in range(batch)), shape=(batch,))
    made = {"sum": sums, "half": Array("BF16", (batch, 1), b"\x80\x3f" * batch)}
    return ArraysReady(order.request_id, {name: made[name] for name in order.outputs}, TIMINGS, batch)


class Served:
    """`client` speaks to the application over ASGI; `worker` has what the service sent."""

    def __init__(self, runtime: ApiRuntime, worker: FakeWorker, client: httpx.AsyncClient) -> None:
        self.service, self.metrics, self.worker, self.client = runtime.service, runtime.metrics, worker, client
        self.path = f"/v2/models/{runtime.service.model.name}"

    async def infer(self, inputs: list[Any], tail: bytes | None = None, **fields: Any) -> httpx.Response:
        """JSON, with the bytes of binary tensors behind it where there are any."""
        head = json.dumps({"inputs": inputs, **fields}).encode()
        headers = {} if tail is None else {"inference-header-content-length": str(len(head))}
        return await self.client.post(f"{self.path}/infer", content=head + (tail or b""), headers=headers)

    @property
    def orders(self) -> list[Any]:
        return [command for command in self.worker.commands if isinstance(command, Encode | Infer)]


@asynccontextmanager
async def serving(model: ServedModel) -> AsyncIterator[Served]:
    worker = FakeWorker()
    service = Service(worker, Metrics())

    def answer(command: Command) -> None:
        if (event := answered(command)) is not None:
            service.on_events([event])

    worker.send_error = answer
    await service.start()
    service.serve(model)
    app = application()
    runtime = app.state.runtime = ApiRuntime(service, Metrics(), Lifetime(), dict, created=1)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://armature") as client:
        yield Served(runtime, worker, client)
    await service.stop()


def outputs(response: httpx.Response) -> dict[str, Any]:
    """Values by output, out of the JSON or the bytes behind it; FP32 and BYTES alone."""
    assert response.status_code == 200, response.text
    length = int(response.headers.get("inference-header-content-length", len(response.content)))
    head, tail = json.loads(response.content[:length]), response.content[length:]
    found: dict[str, Any] = {}
    for output in head["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            found[output["name"]] = output["data"]
            continue
        values = array("f")
        values.frombytes(tail[:size])
        found[output["name"]], tail = values.tolist(), tail[size:]
    assert not tail
    return found


def tensor(name: str, datatype: str, shape: list[int], data: Any = None, **parameters: Any) -> Mapping[str, Any]:
    """One of a body's inputs."""
    body: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
    body |= {} if data is None else {"data": data}
    return body | ({"parameters": parameters} if parameters else {})
