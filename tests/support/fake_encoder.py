"""An encoder's service whose worker computes by hand: a text's vector is made of its ids, and so is what a test expects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy

from app.errors import StepFailed
from app.messages import Array, ArraysReady, Command, Encode, RequestFailed, Text, Timings
from app.metrics.instruments import Metrics
from app.models.encoders.config import EncoderConfig, PoolingConfig
from app.service.served_model import ServedEncoder, ServingLimits
from app.service.service import Service
from app.text.tokenizer import Tokenizer
from fake_worker import Clock, FakeWorker
from tiny_encoders import write_word_pieces

SIZE = 4
LIMITS = ServingLimits(
    max_model_len=16, max_running_seqs=8, max_waiting_requests=8, request_timeout_seconds=60, vocab_size=300
)
TIMINGS = Timings(queue_seconds=0.001, encode_seconds=0.002)
CONFIG = EncoderConfig(
    architecture="BertModel",
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=SIZE,
    hidden_size=SIZE,
    intermediate_size=SIZE,
    vocab_size=LIMITS.vocab_size,
    max_model_len=LIMITS.max_model_len,
    norm_eps=1e-12,
    activation="gelu",
    windows=(None,),
    ropes=(None,),
    num_types=2,
)
CROSS_ENCODER = replace(CONFIG, labels=("relevant",), scores="sigmoid")
CLASSIFIER = replace(CONFIG, labels=("bad", "so so", "good"))
PROMPTED = replace(
    CONFIG, pooling=PoolingConfig(prompts={"query": "the fox ", "passage": "hello "}, default_prompt="passage")
)


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as directory:
        write_word_pieces(Path(directory))
        return Tokenizer(Path(directory))


def ids_of(*texts: str | tuple[str, str]) -> list[Text]:
    return tokenizer().encode_texts(texts)


def vector(text: Text) -> list[float]:
    ids = text.token_ids
    return [float(ids[1]), float(ids[-2]), float(len(ids)), 0.25]


def logits(text: Text, labels: int) -> list[float]:
    return [(text.token_ids[-2] % 7 - label) / 3 for label in range(labels)]


def arrays(order: Encode, config: EncoderConfig) -> dict[str, Array]:
    """What the order asks for, as an engine gives it."""
    rows = {
        "embedding": [vector(text)[: order.dimensions] for text in order.texts],
        "logits": [logits(text, len(config.labels)) for text in order.texts],
        "last_hidden_state": [[float(token)] * SIZE for text in order.texts for token in text.token_ids],
    }
    return {name: array(rows[name]) for name in order.outputs}


def array(rows: Sequence[Sequence[float]]) -> Array:
    held = numpy.asarray(rows, dtype="<f4")
    return Array("FP32", held.shape, held.tobytes())


@dataclass
class EncodingWorker(FakeWorker):
    """Answers at once unless `holds`; a text that begins with the token `bad` fails its request."""

    config: EncoderConfig = CONFIG
    holds: bool = False
    bad: int = -1
    tell: Callable[[Any], None] = field(default=lambda events: None)

    def put(self, command: Command) -> None:
        super().put(command)
        if isinstance(command, Encode) and not self.holds:
            self.answer(command)

    def answer(self, order: Encode) -> None:
        if any(text.token_ids[1] == self.bad for text in order.texts):
            self.tell([RequestFailed(order.request_id, StepFailed("The step failed."))])
        else:
            num_tokens = sum(len(text.token_ids) for text in order.texts)
            self.tell([ArraysReady(order.request_id, arrays(order, self.config), TIMINGS, num_tokens)])

    @property
    def encodes(self) -> list[Encode]:
        return [command for command in self.commands if isinstance(command, Encode)]


@asynccontextmanager
async def encoding(
    config: EncoderConfig = CONFIG, limits: ServingLimits = LIMITS
) -> AsyncIterator[tuple[Service, EncodingWorker, Clock]]:
    worker, clock = EncodingWorker(config=config), Clock()
    service = Service(worker, Metrics(clock), clock)
    worker.tell = service.on_events
    await service.start()
    service.serve(ServedEncoder("tiny", limits, tokenizer(), config))
    try:
        yield service, worker, clock
    finally:
        await service.stop()
