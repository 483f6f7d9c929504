"""What rounding costs: a text's perplexity at each precision, and how often its likeliest next token is the one that FP32 has.

Each precision is planned and loaded as serving does it, without the int8 copy that may stand beside four bits: those are what is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from app.backends.base import Backend
from app.backends.selection import select_backend
from app.bench.console import Advance, progress
from app.bench.stats import Figure, MeasurementFailed, Outcome
from app.engine.batch import Span
from app.engine.build import KV_DTYPES
from app.engine.kv_cache import KVCache, KVShape
from app.engine.runner import StepAttention
from app.engine.sequence import sequence_of
from app.errors import NoRecipe, PlanImpossible
from app.hardware.facts import Facts
from app.hardware.plan import ServingPlan, make_plan
from app.kernels.linear import Linear
from app.messages import Generate, SamplingParams
from app.models.context import StepContext
from app.settings import Settings
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import Checkpoint
from app.weights.load import load_model
from app.weights.recipes import RECIPES

PRECISIONS = ("fp32", "bf16", "int8", "int4")  # the first is what the others are held against
TARGETS = {"int8": 1.005, "int4": 1.03}  # of FP32's perplexity
WINDOW = 512  # tokens that see each other
STEP = 128  # tokens whose logits are worked out at once: with a vocabulary of 128k, 64 MB of them
BREAK = "---"  # a line of its own between documents, which do not see each other

Window = list[int]


@dataclass(slots=True)
class Score:
    """Of one precision: each window's surprise in nats and likeliest tokens, in order, and what its weights take."""

    weight_bytes: int = 0
    nats: list[float] = field(default_factory=list)
    likeliest: list[Tensor] = field(default_factory=list)

    def hold(self, nats: float, likeliest: Tensor) -> None:
        """One window more."""
        self.nats.append(nats)
        self.likeliest.append(likeliest)

    def perplexity(self, windows: int) -> float:
        """Of the first so many windows."""
        return math.exp(sum(self.nats[:windows]) / sum(len(picked) for picked in self.likeliest[:windows]))

    def agreement(self, other: Score) -> float:
        """The share of tokens whose likeliest successor is the other's too, where both have looked."""
        pairs = list(zip(self.likeliest, other.likeliest, strict=False))
        return sum(int((mine == theirs).sum()) for mine, theirs in pairs) / sum(len(mine) for mine, _ in pairs)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is judged."""

    checkpoint: Checkpoint
    settings: Settings
    facts: Facts

    def plan(self, precision: str) -> ServingPlan:
        settings = self.settings.model_copy(update={"precision": precision, "int8_copy": "off"})
        return make_plan(self.facts, None, settings, self.checkpoint.needs(), RECIPES.keys())


def measure(subject: Subject, text: Path, max_tokens: int | None) -> Outcome:
    """Every precision that this machine has a recipe for. Ctrl-C keeps the windows that were read, and compares what both have."""
    checkpoint, facts = subject.checkpoint, subject.facts
    windows = windows_of(Tokenizer(checkpoint.directory), text, checkpoint.model_config.max_model_len, max_tokens)
    plans, refused = _plans(subject)
    scores = {precision: Score() for precision in plans}
    with progress(len(plans) * len(windows), "loading") as advance, torch.inference_mode():
        complete = _read_all(checkpoint, windows, plans, scores, advance)
    num_tokens = sum(len(window) - 1 for window in windows)
    details = {"machine": facts.to_json(), "torch": torch.__version__, "tokens": num_tokens, "windows": len(windows)}
    figures = tuple(_figures(scores, checkpoint.needs().num_parameters))
    subject_line = f"{checkpoint.name}, {text.name}, {num_tokens:,} tokens"
    return Outcome("quality", subject_line, figures, details | {"refused": refused}, complete)


def windows_of(tokenizer: Tokenizer, text: Path, max_model_len: int, max_tokens: int | None) -> list[Window]:
    """The text's documents cut into pieces of ids, each beginning with what this checkpoint's texts begin with."""
    try:
        documents = _documents(text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise MeasurementFailed(f"{text} cannot be read: {error}") from error
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room, left, windows = min(WINDOW, max_model_len) - len(begin), max_tokens, []
    for document in documents:
        ids = tokenizer.encode(document, add_special_tokens=False)[:left]
        pieces = [[*begin, *ids[start : start + room]] for start in range(0, len(ids), room)]
        windows += [piece for piece in pieces if len(piece) > 1]
        left = None if left is None else left - len(ids)
        if left == 0:
            break
    if not windows:
        raise MeasurementFailed(f"{text} has no two tokens one after the other.")
    return windows


def _documents(text: str) -> Iterator[str]:
    """Parts between lines that say BREAK, without the ends of lines around them."""
    lines: list[str] = []
    for line in [*text.split("\n"), BREAK]:
        if line.strip() != BREAK:
            lines.append(line)
        elif document := "\n".join(lines).strip("\n"):
            yield document
            lines = []


def _plans(subject: Subject) -> tuple[dict[str, ServingPlan], dict[str, str]]:
    """A plan for each precision, and why there is none for the others."""
    plans, refused = {}, {}
    for precision in PRECISIONS:
        try:
            plans[precision] = subject.plan(precision)
        except (NoRecipe, PlanImpossible) as error:
            refused[precision] = error.message
    return plans, refused


def _read_all(
    checkpoint: Checkpoint, windows: list[Window], plans: dict[str, ServingPlan], scores: dict[str, Score], advance: Advance
) -> bool:
    """One precision after the other. Answers False after Ctrl-C."""
    configured = False
    try:
        for precision, plan in plans.items():
            backend = select_backend(plan)
            if not configured:  # pools are sized once, and are the same for all
                backend.configure(plan)
                configured = True
            reader = Reader(checkpoint, plan, backend)
            scores[precision].weight_bytes = reader.weight_bytes
            for window in windows:
                scores[precision].hold(*reader.read(window))
                advance(precision)
    except KeyboardInterrupt:
        return False
    return True


def held_bytes(model: nn.Module) -> int:
    """All weights, each once: packed forms, and whatever lies as plain tensors (norms, a table of its own)."""
    forms = {id(module.form): module.form.nbytes for module in model.modules() if isinstance(module, Linear)}
    shared = [
        module for module in model.modules() if getattr(module, "form", None) is not None and not isinstance(module, Linear)
    ]
    unused = {id(weight) for module in shared for weight in module.parameters()}
    return sum(forms.values()) + sum(weight.nbytes for weight in model.parameters() if id(weight) not in unused)


class Reader:
    """A model as it is served, and one sequence at a time through it, with the logits of every token."""

    def __init__(self, checkpoint: Checkpoint, plan: ServingPlan, backend: Backend) -> None:
        config = checkpoint.model_config
        self._model = load_model(checkpoint, plan, backend)
        self.weight_bytes = held_bytes(self._model)
        shape = KVShape(config.num_layers, 1, min(WINDOW, config.max_model_len), config.num_kv_heads, config.head_dim)
        self._attention = StepAttention(KVCache(shape, KV_DTYPES[plan.kv_precision.value]), backend)

    def read(self, window: Window) -> tuple[float, Tensor]:
        """Nats of all tokens but the first, and which token was likeliest at each of these places."""
        nats, likeliest = 0.0, []
        for start in range(0, len(window) - 1, STEP):
            wanted = torch.tensor(window[start + 1 : start + STEP + 1])
            logits = self._logits(window, start, start + len(wanted)).float()
            nats += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            likeliest.append(logits.argmax(-1))
        return nats, torch.cat(likeliest)

    def _logits(self, window: Window, start: int, end: int) -> Tensor:
        request = Generate("quality", tuple(window), SamplingParams(max_tokens=1), arrived_at=0.0)
        span = Span(sequence_of(request), start, end - start, slot=0, prefix_slot=None, prefix_tokens=0, samples=True)
        attend = self._attention.begin((span,))
        tokens, positions = torch.tensor(window[start:end]), torch.arange(start, end)
        logits: Tensor = self._model(StepContext(tokens, positions, torch.arange(end - start), attend))
        return logits


def _figures(scores: dict[str, Score], num_parameters: int) -> Iterator[Figure]:
    reference = scores.get(PRECISIONS[0])
    for precision, score in scores.items():
        if not score.nats:
            continue
        windows = len(score.nats)
        perplexity, ratio, against = score.perplexity(windows), None, ""
        if reference is not None and reference is not score:
            ratio, against = perplexity / reference.perplexity(windows), "FP32"
        yield Figure(
            f"{precision}, perplexity", perplexity, "", ratio=ratio, against=against, target=TARGETS.get(precision), at_most=True
        )
        if ratio is not None and reference is not None:
            yield Figure(f"{precision}, same likeliest token", 100 * score.agreement(reference), "% of tokens", against="FP32")
        yield Figure(f"{precision}, weights", score.weight_bytes / num_parameters, "B a parameter")
