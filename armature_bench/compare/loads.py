"""The fixed set of loads that `bench compare` runs, and the senders of their requests.

Every model of a kind gets the same loads, as far as the model and its plan allow them. The requests are the same on
every machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from armature_bench.compare.result import LoadKind, LoadSpec
from armature_bench.console import MeasurementFailed
from armature_bench.http.client import ArmatureClient
from armature_bench.http.dialects import GENERATE_DIALECTS, EmbedDialect
from armature_bench.http.embed import EmbedTraffic, EmbedWorkload, text_prompts_for
from armature_bench.http.infer import InferWorkload, infer_traffic_for
from armature_bench.http.load import TrafficSender
from armature_bench.http.tally import GenerateTraffic, GenerateWorkload
from armature_bench.http.wire import HttpClient
from armature_bench.http.workload import UniformLengths

LENGTHS = (128, 512)  # tokens per prompt or text
ANSWER_TOKENS = 128
CLIENTS = (1, 2, 4, 8, 16, 32)
BATCHES = (1, 4, 8, 16, 32)
KINDS: Mapping[str, LoadKind] = {"decoder": "generate", "encoder": "embed", "program": "infer"}


@dataclass(frozen=True, slots=True)
class LoadProtocol:
    """The loads to measure, smallest first.

    `left_out`: one sentence for each load of the protocol that this model cannot serve.
    """

    loads: Sequence[LoadSpec]
    left_out: Sequence[str] = ()


def protocol_loads(info: Mapping[str, Any]) -> LoadProtocol:
    """Return the loads for the model in `/info`. Raises `MeasurementFailed` if it is no Armature server's."""
    try:
        kind, plan = KINDS[info["model"]["kind"]], info["plan"]
        context, most_clients = int(plan["max_model_len"]["value"]), int(plan["max_running_seqs"]["value"])
    except (LookupError, TypeError, ValueError) as error:
        raise MeasurementFailed(
            f"the server's /info has no model and plan ({error!r}): bench compare only measures Armature servers"
        ) from error
    if kind == "infer":
        return LoadProtocol(tuple(_row_loads()))
    return _generation_loads(context, most_clients) if kind == "generate" else _embedding_loads(context)


def _generation_loads(context: int, most_clients: int) -> LoadProtocol:
    lengths = [length for length in LENGTHS if length + ANSWER_TOKENS <= context]
    left_out = [
        _left_out_sentence(length + ANSWER_TOKENS, context, "Prompts") for length in LENGTHS if length not in lengths
    ]
    answer = ANSWER_TOKENS
    if not lengths:
        lengths, answer = [max(1, context // 2)], max(1, context - max(1, context // 2))
        left_out.append(f"Measured instead: prompts of {lengths[0]} and answers of {answer} tokens.")
    clients = [number for number in CLIENTS if number <= max(1, most_clients)]
    if len(clients) < len(CLIENTS):
        left_out.append(
            f"More than {clients[-1]} clients are left out: this plan runs {most_clients} sequences at once."
        )
    loads = [
        LoadSpec(kind="generate", clients=number, tokens=length, max_tokens=answer)
        for length in lengths
        for number in clients
    ]
    return LoadProtocol(loads, left_out)


def _embedding_loads(context: int) -> LoadProtocol:
    lengths = [length for length in LENGTHS if length <= context]
    left_out = [_left_out_sentence(length, context, "Texts") for length in LENGTHS if length not in lengths]
    if not lengths:
        lengths = [context]
        left_out.append(f"Measured instead: texts of {context} tokens.")
    loads = [LoadSpec(kind="embed", clients=1, batch=batch, tokens=length) for length in lengths for batch in BATCHES]
    together = [LoadSpec(kind="embed", clients=number, tokens=lengths[0]) for number in CLIENTS if number > 1]
    return LoadProtocol([*loads, *together], left_out)


def _row_loads() -> Iterator[LoadSpec]:
    yield from (LoadSpec(kind="infer", clients=1, batch=batch, tokens=0) for batch in BATCHES)
    yield from (LoadSpec(kind="infer", clients=number, tokens=0) for number in CLIENTS if number > 1)


def _left_out_sentence(tokens: int, context: int, what: str) -> str:
    length = tokens - ANSWER_TOKENS if what == "Prompts" else tokens
    answered = f" with answers of {ANSWER_TOKENS}" if what == "Prompts" else ""
    return f"{what} of {length} tokens{answered} are left out: the model has a context of {context} tokens."


async def make_sender(wire: HttpClient, model: str, load: LoadSpec, seed: int) -> TrafficSender[Any]:
    """Return the sender of a load's requests. Raises `MeasurementFailed` if the server cannot serve them.

    `seed` must differ between loads, or the server's prefix cache answers from earlier prompts.
    """
    return await _SENDERS[load.kind](wire, model, load, seed)


async def _generation_sender(wire: HttpClient, model: str, load: LoadSpec, seed: int) -> TrafficSender[Any]:
    wanted = GenerateWorkload(_fixed_length(load.tokens), _fixed_length(load.max_tokens), seed=seed)
    return GenerateTraffic(
        wire, GENERATE_DIALECTS["native"], None, await ArmatureClient(wire).token_prompts(seed), wanted
    )


# A text as long as the model's context may come out one token too long: the server truncates it.
_EMBED = EmbedDialect(
    lambda model: "/encode",
    lambda texts, model: {"inputs": list(texts), "truncate": True},
    lambda answer: [len(vector) for vector in answer["embeddings"]],
)
_CLASSIFY = EmbedDialect(
    lambda model: "/v1/classify",
    lambda texts, model: {"input": list(texts), "truncate": True},
    lambda answer: [len(scored["predictions"]) for scored in answer["data"]],
)


async def _text_sender(wire: HttpClient, model: str, load: LoadSpec, seed: int) -> TrafficSender[Any]:
    dialect = _EMBED if "embedding" in await _output_names(wire, model) else _CLASSIFY
    deck, _ = await text_prompts_for(wire, dialect, model, seed)
    return EmbedTraffic(wire, dialect, model, deck, EmbedWorkload(load.batch, _fixed_length(load.tokens), seed))


async def _output_names(wire: HttpClient, model: str) -> set[str]:
    """Return the names of the model's outputs: an embedding, or the scores of a classifier."""
    path = f"/v2/models/{quote(model, safe='')}"
    return {output["name"] for output in (await wire.get(path)).raise_for_status(path).json()["outputs"]}


async def _row_sender(wire: HttpClient, model: str, load: LoadSpec, seed: int) -> TrafficSender[Any]:
    return await infer_traffic_for(wire, model, InferWorkload(load.batch, seed=seed))


def _fixed_length(tokens: int) -> UniformLengths:
    return UniformLengths(tokens, tokens)


_SENDERS: Mapping[LoadKind, Callable[[HttpClient, str, LoadSpec, int], Awaitable[TrafficSender[Any]]]] = {
    "generate": _generation_sender,
    "embed": _text_sender,
    "infer": _row_sender,
}
