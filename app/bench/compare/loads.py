"""The fixed set of loads that `bench compare` runs.

Every model of a kind gets the same loads, as far as the model and its plan allow them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.compare.result import Kind, Load
from app.bench.stats import MeasurementFailed

LENGTHS = (128, 512)  # tokens per prompt or text
ANSWER_TOKENS = 128
CLIENTS = (1, 2, 4, 8, 16, 32)
BATCHES = (1, 4, 8, 16, 32)
KINDS: Mapping[str, Kind] = {"decoder": "generate", "encoder": "embed", "program": "infer"}


@dataclass(frozen=True, slots=True)
class Loads:
    """The loads to measure, smallest first.

    `left_out`: one sentence for each load of the protocol that this model cannot serve.
    """

    loads: Sequence[Load]
    left_out: Sequence[str] = ()


def loads_for(info: Mapping[str, Any]) -> Loads:
    """Return the loads for the model that the server describes in `/info`.

    Raises:
        MeasurementFailed: `/info` does not come from an Armature server.
    """
    try:
        kind, plan = KINDS[info["model"]["kind"]], info["plan"]
        context, most_clients = int(plan["max_model_len"]["value"]), int(plan["max_running_seqs"]["value"])
    except (LookupError, TypeError, ValueError) as error:
        raise MeasurementFailed(
            f"the server's /info has no model and plan ({error!r}): bench compare only measures Armature servers"
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
        told.append(f"Measured instead: prompts of {lengths[0]} and answers of {answer} tokens.")
    clients = [number for number in CLIENTS if number <= max(1, most_clients)]
    if len(clients) < len(CLIENTS):
        told.append(f"More than {clients[-1]} clients are left out: this plan runs {most_clients} sequences at once.")
    loads = [Load(kind="generate", clients=number, tokens=length, max_tokens=answer) for length in lengths for number in clients]
    return Loads(loads, told)


def _embeddings(context: int) -> Loads:
    lengths = [length for length in LENGTHS if length <= context]
    told = [_unread(length, context, "Texts") for length in LENGTHS if length not in lengths]
    if not lengths:
        lengths = [context]
        told.append(f"Measured instead: texts of {context} tokens.")
    loads = [Load(kind="embed", clients=1, batch=batch, tokens=length) for length in lengths for batch in BATCHES]
    together = [Load(kind="embed", clients=number, tokens=lengths[0]) for number in CLIENTS if number > 1]
    return Loads([*loads, *together], told)


def _rows() -> Iterator[Load]:
    yield from (Load(kind="infer", clients=1, batch=batch, tokens=0) for batch in BATCHES)
    yield from (Load(kind="infer", clients=number, tokens=0) for number in CLIENTS if number > 1)


def _unread(tokens: int, context: int, what: str) -> str:
    length = tokens - ANSWER_TOKENS if what == "Prompts" else tokens
    answered = f" with answers of {ANSWER_TOKENS}" if what == "Prompts" else ""
    return f"{what} of {length} tokens{answered} are left out: the model has a context of {context} tokens."
