"""Accuracy of weight and KV precisions: perplexity of a text, and agreement with FP32 on the most likely next token.

Each precision is planned and loaded as for serving, but without the int8 copy that can accompany int4 weights,
because the int4 weights themselves are to be measured.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

from app.backends.base import HostBackend
from app.backends.selection import select_host_backend
from app.engine.calibration.streaming import Window, WindowScorer, calibration_for, read_windows
from app.engine.decoder.kv_cache import kv_dtype
from app.errors import NoRecipe, PlanImpossible
from app.hardware.facts import Facts
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.plan.precision import QUANTIZED_PRECISIONS
from app.settings import Settings
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import Checkpoint
from app.weights.forms import RECIPES
from app.weights.load import Packing, load_model
from app.weights.packs import PackFolder
from armature_bench.console import AdvanceProgress, BenchOutcome, Figure, progress
from armature_bench.engine.llama_cpp import FORMATS, LlamaCppPeer, PeerEvent
from armature_kernels.linear.linear import Linear


def host_precisions() -> list[str]:
    """Return the precisions of weights that can serve on a CPU, in the order of the setting."""
    choices = get_args(Settings.model_fields["precision"].annotation)
    on_host = {precision for device, _, precision in RECIPES if device == "cpu"}
    return [choice for choice in choices if choice in on_host]


REFERENCE = "fp32"
# Precision of weights, and of keys and values (`auto`: that of the activations). The first entry is the reference.
PRECISION_PAIRS = {REFERENCE: (REFERENCE, "auto")} | {
    name: pair
    for precision in host_precisions()
    if precision != REFERENCE
    for name, pair in ((precision, (precision, "bf16")), (f"{precision}, int8 KV", (precision, "int8")))
}
DEFAULT_TOKENS = 4096  # of the default text
# Relative to the perplexity of FP32.
PERPLEXITY_TARGETS = {
    "bf16, int8 KV": 1.005,
    "int8": 1.004,
    "int8, int8 KV": 1.006,
    "int4": 1.05,
    "int4, int8 KV": 1.05,
}


@dataclass(slots=True)
class PrecisionScore:
    """Results of one precision.

    `nats` and `likeliest` have each window's negative log-likelihood and most likely tokens, in order; `weight_bytes`
    is the size of the weights as loaded, or of a peer's file.
    """

    weight_bytes: int = 0
    nats: list[float] = field(default_factory=list)
    likeliest: list[Tensor] = field(default_factory=list)

    def add_window(self, nats: float, likeliest: Tensor) -> None:
        self.nats.append(nats)
        self.likeliest.append(likeliest)

    def perplexity(self, windows: int) -> float:
        return math.exp(sum(self.nats[:windows]) / sum(len(tokens) for tokens in self.likeliest[:windows]))

    def agreement(self, other: PrecisionScore) -> float:
        """Return the share of tokens with the same most likely successor, in windows that both have read."""
        pairs = list(zip(self.likeliest, other.likeliest, strict=False))
        return sum(int((mine == theirs).sum()) for mine, theirs in pairs) / sum(len(mine) for mine, _ in pairs)


@dataclass(frozen=True, slots=True)
class QualityJob:
    checkpoint: Checkpoint
    settings: Settings
    facts: Facts

    def plan(self, precision: str, kv_precision: str) -> ServingPlan:
        kept = self.settings.keep_layers if precision in QUANTIZED_PRECISIONS else ""
        settings = self.settings.with_weight_format(
            precision, kv_precision=kv_precision, int8_copy="off", keep_layers=kept
        )
        return make_plan(self.facts, None, settings, self.checkpoint.needs(), RECIPES.keys())


def measure_quality(
    subject: QualityJob, text: Path | None, max_tokens: int | None, peer: LlamaCppPeer | None = None
) -> BenchOutcome:
    """Measure every precision that this machine supports, on `text`, or on `DEFAULT_TOKENS` of the default text if None.

    Ctrl-C keeps the windows read so far; comparisons use the windows that both precisions have read. The `peer` reads
    the same windows after our precisions; raises `MeasurementFailed` if it is not installed, or failed.
    """
    checkpoint, facts = subject.checkpoint, subject.facts
    if peer is not None:
        peer.require(checkpoint)
    max_tokens = DEFAULT_TOKENS if text is None and max_tokens is None else max_tokens
    windows = read_windows(Tokenizer(checkpoint.location), text, checkpoint.decoder.max_model_len, max_tokens)
    plans, refused = plan_pairs(subject, PRECISION_PAIRS)
    scores = {name: PrecisionScore() for name in (*plans, *(FORMATS if peer else ()))}
    with progress(len(scores) * len(windows), "loading") as advance, torch.inference_mode():
        complete = _read_all(checkpoint, windows, plans, scores, advance)
        if complete and peer is not None and plans:
            threads = next(iter(plans.values())).cpu.threads
            complete = _read_peer(peer.read(checkpoint, windows, threads), scores, advance)
    num_tokens = sum(len(window) - 1 for window in windows)
    details = {"machine": facts.to_json(), "torch": torch.__version__, "tokens": num_tokens, "windows": len(windows)}
    figures = tuple(_figures(scores, checkpoint.needs().num_parameters))
    text_name = "Python's documentation" if text is None else text.name
    subject_line = f"{checkpoint.name}, {text_name}, {num_tokens:,} tokens"
    details |= {"refused": refused}
    return BenchOutcome("quality", subject_line, figures, details, complete, value_name="perplexity")


def plan_pairs(job: QualityJob, pairs: Mapping[str, tuple[str, str]]) -> tuple[dict[str, ServingPlan], dict[str, str]]:
    """Return a plan for each supported pair of precisions, and the reason for each one that is not supported.

    If a precision or a config of torchao is set, only that one and the reference are measured.
    """
    plans, refused, wanted = {}, {}, job.settings.weight_format
    torchao = {wanted: (wanted, "auto")} if job.settings.quantization else {}
    for name, (precision, kv_precision) in {**pairs, **torchao}.items():
        if wanted not in ("auto", precision) and precision != REFERENCE:
            continue
        try:
            plans[name] = job.plan(precision, kv_precision)
        except (NoRecipe, PlanImpossible) as error:
            refused[name] = error.message
    return plans, refused


def _read_all(
    checkpoint: Checkpoint,
    windows: list[Window],
    plans: dict[str, ServingPlan],
    scores: dict[str, PrecisionScore],
    advance: AdvanceProgress,
) -> bool:
    """Read all windows with one precision after the other; returns False after Ctrl-C.

    The weights stay loaded while only the precision of keys and values changes.
    """
    configured, model, loaded = False, None, ""
    try:
        for name, plan in plans.items():
            backend = select_host_backend(plan)
            if not configured:  # thread pools are sized once and are the same for all plans
                backend.configure(plan)
                configured = True
            if model is None or loaded != plan.weights.precision:
                model, loaded = _load(checkpoint, plan, backend), plan.weights.precision
            scores[name].weight_bytes = loaded_weight_bytes(model)
            reader = WindowScorer(model, checkpoint.decoder, kv_dtype(plan), backend)
            for window in windows:
                scores[name].add_window(*reader.score(window))
                advance(name)
    except KeyboardInterrupt:
        return False
    return True


def _read_peer(
    events: Generator[PeerEvent, None, None], scores: dict[str, PrecisionScore], advance: AdvanceProgress
) -> bool:
    """Add a peer's results; returns False after Ctrl-C."""
    advance("llama.cpp: converting", 0)
    try:
        with closing(events):
            for event in events:
                score = scores[event.name]
                if event.file_bytes:
                    score.weight_bytes = event.file_bytes
                    continue
                score.add_window(event.nats, torch.tensor(event.likeliest))
                advance(event.name)
    except KeyboardInterrupt:
        return False
    return True


def _load(checkpoint: Checkpoint, plan: ServingPlan, backend: HostBackend) -> nn.Module:
    folder = plan.weights.pack_folder
    packs = None if folder is None else PackFolder(Path(folder), lambda done, total: None)
    return load_model(
        checkpoint, plan, backend, packing=Packing(packs, partial(calibration_for, checkpoint, plan, backend))
    )


def loaded_weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights, each counted once.

    Packed forms count as stored; plain tensors, such as norms and embedding tables, count in addition.
    """
    forms = {id(module.form): module.form.nbytes for module in model.modules() if isinstance(module, Linear)}
    shared = [
        module
        for module in model.modules()
        if getattr(module, "form", None) is not None and not isinstance(module, Linear)
    ]
    unused = {id(weight) for module in shared for weight in module.parameters()}
    return sum(forms.values()) + sum(weight.nbytes for weight in model.parameters() if id(weight) not in unused)


def _figures(scores: dict[str, PrecisionScore], num_parameters: int) -> Iterator[Figure]:
    """Yield one figure for each precision, held against our FP32 on the windows that both have read."""
    reference = scores.get(REFERENCE)  # None: this machine cannot serve it
    for name, score in scores.items():
        if not score.nats:
            continue
        windows = len(score.nats)
        perplexity, ratio, parts = score.perplexity(windows), None, {}
        if reference is not None:
            parts["same top token, %"] = 100 * score.agreement(reference)
            ratio = None if score is reference else perplexity / reference.perplexity(windows)
        if PRECISION_PAIRS.get(name, ("", ""))[1] != "int8":  # keys and values do not change the weights
            parts |= {"bytes": score.weight_bytes, "bytes per weight": score.weight_bytes / num_parameters}
        yield Figure(
            name,
            perplexity,
            "",
            ratio=ratio,
            against="" if ratio is None else "FP32",
            target=PERPLEXITY_TARGETS.get(name),
            at_most=True,
            parts=parts,
            digits=4,
        )
