"""The rows of the table: a published figure, the runs that measure the same here, and our figure from their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from armature_bench.published import sources
from armature_bench.published.models import BERT_LARGE, GEMMAS, LARGE_LLAMAS, LLAMA_1B, LLAMA_110M, PublishedModel
from armature_bench.published.runs import PublishedRun, RunResult
from armature_bench.published.sources import PublishedFigure

Results = Mapping[PublishedRun, RunResult]
TOPICS: Mapping[str, str] = {
    "bert-128": "BERT-Large, 1 and 16 texts of 128 tokens",
    "bert-512": "BERT-Large, 1 and 16 texts of 512 tokens",
    "llama-110m": "a Llama of 110M on one thread",
    "graph": "eager, recorded and compiled steps",
    "levels": "kernels with and without the newest instructions",
    "int4": "FP32 and int4 of the largest Llama that fits",
}
QUICK_TOPICS = ("bert-128", "llama-110m", "graph", "levels", "int4")
_TEXT_LENGTHS, _BATCHES = {"bert-128": 128, "bert-512": 512}, (1, 16)
_PAPER_TOKENS = 256
_PROMPT = 512
_DECODE, _PREFILL = "decode ×1", f"prefill {_PROMPT}"


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A row: what was measured, theirs, and ours as a function of results that returns None if one is missing.

    `same_work` is False if our model is another one: then the two figures are shown without their ratio.
    """

    topic: str
    name: str
    unit: str
    ours: Callable[[Results], float | None]
    runs: tuple[PublishedRun, ...]
    theirs: PublishedFigure | None = None
    same_work: bool = True


def published_rows(
    topics: Sequence[str],
    levels: Sequence[str],
    largest: PublishedModel,
    is_quick: bool,
    gemma: PublishedModel = GEMMAS[0],
) -> list[PublishedRow]:
    """Return the rows of these topics of `TOPICS`.

    `levels` are this processor's levels of the native kernels, the best first. `largest` is the largest Llama, and
    `gemma` the largest Gemma, with FP32 weights that fit. `is_quick` measures smaller models.
    """
    found: list[PublishedRow] = []
    for topic in (topic for topic in _TEXT_LENGTHS if topic in topics):
        found += _bert_rows(topic)
    if "llama-110m" in topics:
        found += _one_thread_rows(levels)
    if "graph" in topics:
        found += _graph_rows(graph_run(LLAMA_110M, rounds=2), sources.BLOG_LLAMA)
        found += _graph_rows(graph_run(GEMMAS[-1] if is_quick else gemma), sources.BLOG_GEMMA)
    if "levels" in topics:
        found += _level_rows(levels, LLAMA_110M if is_quick else LLAMA_1B)
    if "int4" in topics:
        found += _int4_rows(LARGE_LLAMAS[-1] if is_quick else largest)
    return found


def _bert_rows(topic: str) -> list[PublishedRow]:
    rows, length = list[PublishedRow](), _TEXT_LENGTHS[topic]
    flags = (f"--rows={','.join(map(str, _BATCHES))}", f"--prompts={length}", "--rounds=1")
    for precision, label in (("fp32", "FP32"), ("auto", "the plan's precision")):
        run = PublishedRun(BERT_LARGE, precision, flags=flags)
        for batch in _BATCHES:
            name = f"BERT-Large, {label}, {batch} × {length} tokens"
            ours = _texts(run, f"×{batch} of {length}", batch)
            is_theirs = (batch, length, precision) == (1, 128, "fp32")
            beside = (sources.BERT_X86, sources.BERT_ARM) if is_theirs else (None,)
            rows += [PublishedRow(topic, name, "texts/s", ours, (run,), theirs) for theirs in beside]
    return rows


def _one_thread_rows(levels: Sequence[str]) -> list[PublishedRow]:
    flags = ("--rows=1", f"--steps={_PAPER_TOKENS}", "--rounds=2", "--max-model-len=1024")
    plain = PublishedRun(LLAMA_110M, "fp32", threads=1, level=levels[-1] if levels else None, flags=flags)
    best = PublishedRun(LLAMA_110M, "fp32", threads=1, flags=flags)
    rows = [
        _row("llama-110m", f"{_name(plain)}, {levels[-1] if levels else 'torch'}", plain, sources.PAPER_SCALAR),
        _row("llama-110m", _name(best), best, sources.PAPER_NEON),
        PublishedRow(
            "llama-110m", "the same over plain C", "times", _over(best, plain, _DECODE), (best, plain),
            sources.PAPER_SPEEDUP,
        ),
    ]  # fmt: skip
    for precision, theirs in (("bf16", sources.PAPER_COPROCESSOR), ("int4", None)):
        run = PublishedRun(LLAMA_110M, precision, threads=1, flags=flags)
        rows.append(_row("llama-110m", _name(run), run, theirs))
    return rows


def graph_run(model: PublishedModel, rounds: int = 1) -> PublishedRun:
    """Return the run that measures eager, recorded and compiled steps of a model."""
    flags = ("--rows=1", f"--rounds={rounds}", "--dtypes=fp32", "--max-model-len=1024")
    return PublishedRun(model, "int4", "eager", flags=flags)


def _graph_rows(run: PublishedRun, theirs_int4: PublishedFigure) -> list[PublishedRow]:
    pairs = (
        ("torch.compile over torch's eager steps, FP32", "step ×1, fp32, torch.compile", "step ×1, fp32, torch eager",
         sources.BLOG_GRAPH),
        ("recorded over eager steps, FP32", "decode ×1, fp32, recorded", "decode ×1, fp32, eager", sources.BLOG_GRAPH),
        ("recorded over eager steps, int4", "decode ×1, int4, recorded", "decode ×1, int4, eager", sources.BLOG_GRAPH),
        ("int4 recorded over torch's eager FP32", "decode ×1, int4, recorded", "step ×1, fp32, torch eager",
         theirs_int4),
    )  # fmt: skip
    return [
        PublishedRow("graph", f"{run.model.title}, {name}", "times", _ratio((run, fast), (run, slow)), (run,), theirs)
        for name, fast, slow, theirs in pairs
    ]


def _level_rows(levels: Sequence[str], model: PublishedModel) -> list[PublishedRow]:
    if len(levels) < 2:
        return []
    flags = ("--rows=1", f"--prompts={_PROMPT}", "--rounds=2", "--max-model-len=1024")
    newest, older = (PublishedRun(model, "int4", level=level, flags=flags) for level in levels[:2])
    return [
        PublishedRow(
            "levels", f"{model.title} int4, {what}: {levels[0]} over {levels[1]}", "times",
            _over(newest, older, figure), (newest, older), theirs,
        )
        for what, figure, theirs in (
            (f"prompt of {_PROMPT}", _PREFILL, sources.BLOG_PROMPT), ("decode", _DECODE, sources.BLOG_DECODE)
        )
    ]  # fmt: skip


def _int4_rows(model: PublishedModel) -> list[PublishedRow]:
    flags = ("--rows=1", "--steps=24", "--rounds=1", "--max-model-len=1024")
    exact, packed = (PublishedRun(model, precision, flags=flags) for precision in ("fp32", "int4"))
    same = model is LARGE_LLAMAS[0]
    return [
        _row("int4", f"{model.title} FP32, decode", exact, sources.TALK_FP32, same),
        _row("int4", f"{model.title} int4, decode", packed, sources.TALK_INT4, same),
        PublishedRow(
            "int4", f"{model.title}, int4 over FP32", "times", _over(packed, exact, _DECODE), (packed, exact),
            sources.TALK_SPEEDUP,
        ),
    ]  # fmt: skip


def _name(run: PublishedRun) -> str:
    return f"{run.model.title} {run.precision.replace('fp', 'FP').replace('bf', 'BF')}, decode, one thread"


def _row(
    topic: str, name: str, run: PublishedRun, theirs: PublishedFigure | None, same_work: bool = True
) -> PublishedRow:
    return PublishedRow(topic, name, "tok/s", _texts(run, _DECODE, 1), (run,), theirs, same_work)


def _texts(run: PublishedRun, figure: str, batch: int) -> Callable[[Results], float | None]:
    def rate(results: Results) -> float | None:
        seconds = results[run].seconds(figure) if run in results else None
        return None if seconds is None else batch / seconds

    return rate


def _over(fast: PublishedRun, slow: PublishedRun, figure: str) -> Callable[[Results], float | None]:
    return _ratio((fast, figure), (slow, figure))


def _ratio(fast: tuple[PublishedRun, str], slow: tuple[PublishedRun, str]) -> Callable[[Results], float | None]:
    """Return a function that says how many times as fast one figure of a run is as another."""

    def times(results: Results) -> float | None:
        one, other = (results[run].seconds(name) if run in results else None for run, name in (fast, slow))
        return None if one is None or other is None else other / one

    return times
