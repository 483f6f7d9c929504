"""Reads a text through a model window by window, for its perplexity or for the input correlations of each product.

`read_windows` and `WindowScorer` return the loss and the likeliest tokens; nothing is scheduled. The input
correlations are the Hessians of GPTQ, which quantization uses (kernels/linear/quantization.py). A token is weighted by
the uncertainty of the next one. If only one token can follow, quantization errors do not change that, and most text is
like this. On the demo model this weighting reduces the loss of four bits by a fifth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from app.backends.base import HostBackend
from app.engine.decoder.cpu_runner import StepAttention
from app.engine.decoder.kv_cache import KvCache, KvShape, kv_dtype
from app.engine.scheduler.batch import ScheduledSpan, make_sequence
from app.errors import SettingsInvalid
from app.hardware.plan.plan import ServingPlan
from app.kernels.attention.context import StepContext
from app.kernels.linear.activations import Activations, unquantised
from app.kernels.linear.linear import Linear, LinearForm
from app.messages import Generate, SamplingParams
from app.models.decoders.config import ModelConfig
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import Checkpoint
from app.weights.load import load_model

WINDOW_TOKENS = 512  # tokens that attend to each other
LOGITS_TOKENS = 128  # tokens whose logits are computed at once: with a vocabulary of 128k these are 64 MB
DOCUMENT_SEPARATOR = "---"  # separator line between documents, which do not attend to each other

Window = list[int]


def read_windows(tokenizer: Tokenizer, text: Path, max_model_len: int, max_tokens: int | None = None) -> list[Window]:
    """Cut the text's documents into windows of token ids, each with the checkpoint's usual first token.

    Raises `SettingsInvalid` if there is nothing to read.
    """
    try:
        documents = _documents(text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(f"The text {text} cannot be read: {error}") from error
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    chunk_tokens, left, windows = min(WINDOW_TOKENS, max_model_len) - len(begin), max_tokens, []
    for document in documents:
        ids = tokenizer.encode(document, add_special_tokens=False)[:left]
        chunks = [[*begin, *ids[start : start + chunk_tokens]] for start in range(0, len(ids), chunk_tokens)]
        windows += [chunk for chunk in chunks if len(chunk) > 1]
        left = None if left is None else left - len(ids)
        if left == 0:
            break
    if not windows:
        raise SettingsInvalid(f"The text {text} has fewer than two consecutive tokens.")
    return windows


def _documents(text: str) -> Iterator[str]:
    """Yield the parts between separator lines, without leading and trailing line breaks."""
    lines: list[str] = []
    for line in [*text.split("\n"), DOCUMENT_SEPARATOR]:
        if line.strip() != DOCUMENT_SEPARATOR:
            lines.append(line)
        elif document := "\n".join(lines).strip("\n"):
            yield document
            lines = []


class WindowScorer:
    """Runs one sequence at a time through a model and returns the logits of every token."""

    def __init__(self, model: nn.Module, config: ModelConfig, kv_dtype: torch.dtype, backend: HostBackend) -> None:
        self._model = model
        shape = KvShape(
            config.num_layers, 1, min(WINDOW_TOKENS, config.max_model_len), config.num_kv_heads, config.head_dim
        )
        self._attention = StepAttention(KvCache(shape, kv_dtype), backend)

    def score(self, window: Window) -> tuple[float, Tensor]:
        """Return the loss in nats over all tokens after the first, and the likeliest token at each position."""
        nats, likeliest = 0.0, []
        for targets, logits in self.targets_and_logits(window):
            nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            likeliest.append(logits.argmax(-1))
        return nats, torch.cat(likeliest)

    def targets_and_logits(self, window: Window) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield consecutive target tokens [n] and the FP32 logits [n, vocab] that predict them."""
        for start in range(0, len(window) - 1, LOGITS_TOKENS):
            targets = torch.tensor(window[start + 1 : start + LOGITS_TOKENS + 1])
            yield targets, self._logits(window, start, start + len(targets)).float()

    def _logits(self, window: Window, start: int, end: int) -> Tensor:
        request = Generate("reading", tuple(window), SamplingParams(max_tokens=1), arrived_at=0.0)
        span = ScheduledSpan(
            make_sequence(request), start, end - start, slot=0, prefix_slot=None, prefix_tokens=0, samples=True
        )
        attend = self._attention.begin((span,))
        tokens, positions = torch.tensor(window[start:end]), torch.arange(start, end)
        logits: Tensor = self._model(StepContext(tokens, positions, torch.arange(end - start), attend))
        return logits


# key: the sources of a product; value: the weighted sum of x xᵀ over its inputs, FP32 [in, in]
Correlations = Mapping[tuple[str, ...], Tensor]


class InputCorrelations:
    """A linear form that multiplies as before and keeps the last inputs until their weights are known."""

    __slots__ = ("form", "rows", "total")

    def __init__(self, form: LinearForm, size: int) -> None:
        self.form, self.total = form, torch.zeros(size, size)
        self.rows = torch.empty(0, size)

    @property
    def nbytes(self) -> int:
        """Bytes of the wrapped form."""
        return self.form.nbytes

    def activation_group(self, rows: int) -> int | None:
        """Return the activation group size that the wrapped form takes for `rows` rows."""
        return self.form.activation_group(rows)

    def multiply(self, x: Activations) -> Tensor:
        """Multiply by the wrapped form and keep the inputs."""
        self.rows = unquantised(x).float()
        return self.form.multiply(x)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to `hidden` and keep the inputs."""
        self.rows = unquantised(x).float()
        self.form.add_to(hidden, x)

    def accumulate(self, weights: Tensor) -> None:
        """Add the step's inputs to the sum, weighted by `weights` [tokens]."""
        self.total.addmm_((self.rows * weights[:, None]).T, self.rows)


@torch.inference_mode()
def measure_input_correlations(
    checkpoint: Checkpoint,
    plan: ServingPlan,
    backend: HostBackend,
    windows: Sequence[Window],
    progress: Callable[[int, int], None],
) -> Correlations:
    """Return the correlations of every product over all windows.

    `plan` names a precision without quantization. `progress` is called with (windows done, windows in total).
    Memory: the model and one square matrix for the inputs of each product, 5 GB for a Llama of 1B.
    """
    model = load_model(checkpoint, plan, backend)
    accumulators = {}
    for linear in (module for module in model.modules() if isinstance(module, Linear)):
        accumulators[linear.sources] = linear.form = InputCorrelations(linear.form, linear.in_features)
    reader = WindowScorer(model, checkpoint.decoder, kv_dtype(plan), backend)
    for done, window in enumerate(windows):
        for _, logits in reader.targets_and_logits(window):
            openness = (1 - logits.softmax(-1).square_().sum(-1)).clamp_min(0).sqrt()
            for accumulator in accumulators.values():
                accumulator.accumulate(openness)
        progress(done + 1, len(windows))
    return {sources: accumulator.total for sources, accumulator in accumulators.items()}
