"""The table of docs/hardware.md: the target of each figure, the measured value, and its command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEPS = 100  # of each measurement of `steps.py`
# What one row of a step asks for, beside greedy ones.
RULES: Mapping[str, Mapping[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.05},
    "log-probabilities": {"logprobs": 5},
    "min_tokens": {"min_tokens": 4 * STEPS, "stop_token_ids": (2, 3)},
    "top_k and top_p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
}
BEGIN, END = "<!-- table: python -m tools.hardware writes it -->", "<!-- end of the table -->"
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `least` or `most` is the target. `value` is None if it was not measured; `why` says why not."""

    name: str
    unit: str
    value: float | None = None
    least: float | None = None
    most: float | None = None
    why: str = ""

    @property
    def holds(self) -> bool | None:
        """Return True if the target is met; None without a target or a value."""
        if self.value is None or (self.least is None and self.most is None):
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def cells(self) -> tuple[str, str, str]:
        targets = (("≥", self.least), ("≤", self.most))
        asked = next((f"{sign} {value:,g}" for sign, value in targets if value is not None), "")
        found = f"{self.value:,.4g}" if self.value is not None else self.why or NOT_MEASURED
        return f"{self.name} ({self.unit})", asked, found + {True: "", False: " **missed**", None: ""}[self.holds]


@dataclass(frozen=True, slots=True)
class Asked:
    """The place of a figure in a bench's result: `part` (empty: its value) of the figure `figure`, times `scale`."""

    name: str
    unit: str
    bench: str
    figure: str
    part: str = ""
    scale: float = 1.0
    least: float | None = None
    most: float | None = None

    def found(self, benches: Mapping[str, Mapping[str, Any]], why: str = "") -> Row:
        figures = {each["name"]: each for each in benches.get(self.bench, {}).get("figures", ())}
        figure = figures.get(self.figure)
        value = None if figure is None else figure["value"] if not self.part else figure["parts"].get(self.part)
        scaled = None if value is None else value * self.scale
        return Row(self.name, self.unit, scaled, self.least, self.most, why)


# The targets for an NVIDIA H200.
ASKED: tuple[Asked, ...] = (
    Asked("memory copy, both ways", "TB/s", "llama-1b bf16", "memory copy, both ways", scale=1e-3),
    Asked("products in BF16", "TFLOP/s", "llama-1b bf16", "products, bfloat16", scale=1e-3),
    Asked("llama-1b BF16 decode ×1, of the copy bandwidth", "share", "llama-1b bf16", "decode ×1", "of read", least=0.75),
    Asked("llama-1b BF16 decode ×1", "tok/s", "llama-1b bf16", "decode ×1", "tok/s"),
    Asked("llama-1b BF16 decode ×64", "tok/s", "llama-1b bf16", "decode ×64", "tok/s", least=25_000),
    Asked("llama-1b BF16 prefill 8 × 2,048, of the product rate", "share", "llama-1b bf16", "prefill 8 × 2048",
          "of products", least=0.6),
    Asked("llama-8b BF16 decode ×1, of the copy bandwidth", "share", "llama-8b bf16", "decode ×1", "of read", least=0.75),
    Asked("llama-8b BF16 decode ×1", "tok/s", "llama-8b bf16", "decode ×1", "tok/s"),
    Asked("llama-8b int4 decode ×1", "tok/s", "llama-8b int4", "decode ×1", "tok/s"),
    Asked("llama-8b FP8 decode ×1", "tok/s", "llama-8b fp8", "decode ×1", "tok/s"),
    Asked("llama-8b FP8 prefill 8 × 2,048", "tok/s", "llama-8b fp8", "prefill 8 × 2048", "tok/s"),
    Asked("llama-8b BF16 prefill 8 × 2,048", "tok/s", "llama-8b bf16", "prefill 8 × 2048", "tok/s"),
    Asked("bert-large BF16, 256 texts of 128, of the product rate", "share", "bert-large bf16", "×256 of 128", "of bf16",
          least=0.4),
    Asked("bert-large BF16, 256 texts of 128", "texts/s", "bert-large bf16", "×256 of 128", "samples/s"),
    Asked("llama-1b over HTTP, 1 client, first token", "ms", "http", "×1 TTFT"),
    Asked("llama-1b over HTTP, 64 clients", "tok/s", "http", "×64 tokens"),
    Asked("llama-1b over HTTP, 256 clients", "tok/s", "http", "×256 tokens"),
)  # fmt: skip


def rows_of(benches: Mapping[str, Mapping[str, Any]], why: Mapping[str, str]) -> list[Row]:
    """Return the rows. `benches` are results by bench; `why` has the reason for each missing one."""
    rows = [asked.found(benches, why.get(asked.bench, "")) for asked in ASKED]
    values = {row.name: row.value for row in rows}
    exact, rounded = values["llama-8b BF16 decode ×1"], values["llama-8b int4 decode ×1"]
    ratio = rounded / exact if exact and rounded else None
    rows.append(Row("llama-8b int4 over BF16, decode ×1", "times", ratio, least=2.0))
    served, engine = values["llama-1b over HTTP, 64 clients"], values["llama-1b BF16 decode ×64"]
    share = served / engine if served and engine else None
    rows.append(Row("llama-1b over HTTP, 64 clients, of the engine", "share", share, least=0.9))
    return [*rows, *step_rows(benches.get("steps", {}), why.get("steps", ""))]


def step_rows(found: Mapping[str, Any], why: str) -> Iterable[Row]:
    """Return the rows of `steps.py`."""
    why = found.get("reason", why)
    yield Row("device idle, decode ×64", "share", found.get("idle"), most=0.05, why=why)
    rules = found.get("rules", {})
    for name in RULES:
        yield Row(f"a step of 64, one with {name}, over greedy ones", "times", rules.get(name), most=1.15, why=why)
    for rows, seconds in found.get("sampling_seconds", {}).items():
        yield Row(f"top_k and top_p of {rows} rows of logits", "µs", 1e6 * seconds)
    longest = found.get("long_context")
    yield Row("a step of 64, one with a context of nearly 8,192, over short ones", "times", longest, most=1.15, why=why)
    first = found.get("first_token_seconds")
    milliseconds = None if first is None else 1e3 * first
    yield Row("first token of 512, of the engine", "ms", milliseconds, most=5, why=why)


def markdown(head: Sequence[str], rows: Iterable[Row]) -> str:
    lines = [*head, "", "| figure | asked | found |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.cells())} |" for row in rows)])


def placed(document: str, table: str) -> str:
    """Return the document with this table between its markers. Raises `ValueError` if they are missing."""
    before, found, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"the document has no markers for the table: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"
