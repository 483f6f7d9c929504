"""Senders of the requests of one load: prompts, texts or rows by the load's kind, in Armature's native API.

The requests are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

from app.bench.client import Client
from app.bench.compare.result import Kind, Load
from app.bench.dialects import DIALECTS
from app.bench.embed_dialects import EmbedDialect
from app.bench.embed_traffic import EmbedTraffic, Texts, text_deck
from app.bench.infer_rows import Rows
from app.bench.infer_traffic import infer_traffic
from app.bench.load import Sender
from app.bench.traffic import Traffic, Wanted
from app.bench.wire import Wire
from app.bench.workload import Lengths


async def sender_for(wire: Wire, model: str, load: Load, seed: int) -> Sender[Any]:
    """Return the sender of a load's requests.

    `seed` must differ between loads, or the server's prefix cache answers from earlier prompts.

    Raises:
        MeasurementFailed: The server cannot serve this kind of load.
    """
    return await _SENDERS[load.kind](wire, model, load, seed)


async def _generations(wire: Wire, model: str, load: Load, seed: int) -> Sender[Any]:
    wanted = Wanted(_exactly(load.tokens), _exactly(load.max_tokens), seed=seed)
    return Traffic(wire, DIALECTS["native"], None, await Client(wire).deck(seed), wanted)


# A text as long as the model's context may come out one token too long: the server truncates it.
_EMBED = EmbedDialect(
    lambda model: "/embed",
    lambda texts, model: {"inputs": list(texts), "truncate": True},
    lambda answer: [len(vector) for vector in answer["embeddings"]],
)
_CLASSIFY = EmbedDialect(
    lambda model: "/v1/classify",
    lambda texts, model: {"input": list(texts), "truncate": True},
    lambda answer: [len(scored["predictions"]) for scored in answer["data"]],
)


async def _texts(wire: Wire, model: str, load: Load, seed: int) -> Sender[Any]:
    dialect = _EMBED if "embedding" in await _outputs(wire, model) else _CLASSIFY
    deck, _ = await text_deck(wire, dialect, model, seed)
    return EmbedTraffic(wire, dialect, model, deck, Texts(load.batch, _exactly(load.tokens), seed))


async def _outputs(wire: Wire, model: str) -> set[str]:
    """Return the names of the model's outputs: an embedding, or the scores of a classifier."""
    path = f"/v2/models/{quote(model, safe='')}"
    return {output["name"] for output in (await wire.get(path)).checked(path).json()["outputs"]}


async def _rows(wire: Wire, model: str, load: Load, seed: int) -> Sender[Any]:
    return await infer_traffic(wire, model, Rows(load.batch, seed=seed))


def _exactly(tokens: int) -> Lengths:
    return Lengths(tokens, tokens)


_SENDERS: Mapping[Kind, Callable[[Wire, str, Load, int], Awaitable[Sender[Any]]]] = {
    "generate": _generations,
    "embed": _texts,
    "infer": _rows,
}
