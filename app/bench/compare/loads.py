"""What a machine is asked for to be compared: the same loads for every model of a kind, as far as the model and its plan allow them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.compare.result import Kind, Load
from app.bench.stats import MeasurementFailed

LENGTHS = (128, 512)  # tokens of a prompt or a text
ANSWER_TOKENS = 128
CLIENTS = (1, 2, 4, 8, 16, 32)
BATCHES = (1, 4, 8, 16, 32)
KINDS: Mapping[str, Kind] = {"decoder": "generate", "encoder": "embed", "program": "infer"}


@dataclass(frozen=True, slots=True)
class Loads:
    """The first one is the smallest. `left_out`: sentences on what belongs to the protocol and cannot be asked of this model."""

    loads: Sequence[Load]
    left_out: Sequence[str] = ()


def loads_for(info: Mapping[str, Any]) -> Loads:
    """By what `/info` says. Raises `MeasurementFailed` where that is no server of ours."""
    try:
        kind, plan = KINDS[info["model"]["kind"]], info["plan"]
        context, most_clients = int(plan["max_model_len"]["value"]), int(plan["max_running_seqs"]["value"])
    except (LookupError, TypeError, ValueError) as error:
        raise MeasurementFailed(
            f"the server's /info does not tell its model and its plan ({error!r}): only servers of this program are compared"
        ) from error
    if kind == "infer":
        return Loads(tuple(_rows()))
    return _generations(context, most_clients) if kind == "generate" else _embeddings(context)


def _generations(context: int, most_clients: int) -> Loads:
    lengths = [length for length in LENGTHS if length + ANSWER_TOKENS <= context]
    told = [_unread(length + ANSWER_TOKENS, context, "Prompts") for length in LENGTHS if length not in lengths]
    answer = ANSWER_TOKENS
    if not lengths:
        lengths, answer = [max(1, context // 2)], max(1, context - max(1, context // 2))
        told.append(f"In their place: prompts of {lengths[0]} and answers of {answer} tokens.")
    clients = [number for number in CLIENTS if number <= max(1, most_clients)]
    if len(clients) < len(CLIENTS):
        told.append(f"More than {clients[-1]} clients are left out: {most_clients} sequences run at once by this plan.")
    loads = [Load(kind="generate", clients=number, tokens=length, max_tokens=answer) for length in lengths for number in clients]
    return Loads(loads, told)


def _embeddings(context: int) -> Loads:
    lengths = [length for length in LENGTHS if length <= context]
    told = [_unread(length, context, "Texts") for length in LENGTHS if length not in lengths]
    if not lengths:
        lengths = [context]
        told.append(f"In their place: texts of {context} tokens.")
    loads = [Load(kind="embed", clients=1, batch=batch, tokens=length) for length in lengths for batch in BATCHES]
    together = [Load(kind="embed", clients=number, tokens=lengths[0]) for number in CLIENTS if number > 1]
    return Loads([*loads, *together], told)


def _rows() -> Iterator[Load]:
    yield from (Load(kind="infer", clients=1, batch=batch, tokens=0) for batch in BATCHES)
    yield from (Load(kind="infer", clients=number, tokens=0) for number in CLIENTS if number > 1)


def _unread(tokens: int, context: int, what: str) -> str:
    length = tokens - ANSWER_TOKENS if what == "Prompts" else tokens
    answered = f" with answers of {ANSWER_TOKENS}" if what == "Prompts" else ""
    return f"{what} of {length} tokens{answered} are left out: the model reads {context} at the most."
