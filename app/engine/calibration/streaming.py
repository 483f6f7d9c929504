"""Runs a calibration text through a decoder layer by layer, while the loader packs each layer.

Quantization needs to know a product's inputs: their mean squares balance inputs and weights
(`activation_aware_scales`), and their correlations tell which weights can compensate for a rounding error (GPTQ). The
text runs through the exact layers. Memory beside the packed model: the stored weights of one layer, the hidden states
of the text, and the correlations of one layer.

After a layer is packed, each of its products runs alone in its packed form, for a few tokens. The change of the
layer's result, relative to the residual stream, is the product's loss; `choose_upgrades` gives more bits to those that
lose most. Every fourth window is left out of the statistics. On these windows the packed model is compared with the
exact one at the end: the mean Kullback-Leibler divergence D of the next token's distribution is the expected increase
of the loss in nats, so perplexity rises by e^D - 1. Unlike a ratio of two perplexities it needs only some hundred
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.backends.base import HostBackend
from app.engine.decoder.cpu_runner import StepAttention
from app.engine.decoder.kv_cache import KvCache, kv_dtype, kv_shape_of
from app.engine.encoder.batching import EncodeState
from app.engine.encoder.cpu_runner import EncoderRunner
from app.engine.scheduler.batch import ScheduledSpan, make_sequence
from app.errors import ArmatureError, SettingsInvalid
from app.hardware.plan.plan import ServingPlan
from app.hardware.plan.precision import INT4_PRECISIONS, QUANTIZED_PRECISIONS
from app.messages import Encode, Generate, SamplingParams, Text
from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import Decoder
from app.models.decoders.shapes import is_expert, is_router
from app.models.encoders.encoder import Encoder
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import Checkpoint
from app.weights.forms import is_value
from armature_kernels.attention.context import StepContext
from armature_kernels.elementwise.activations import TopLogits
from armature_kernels.linear.activations import Activations, quantize_torch, unquantized
from armature_kernels.linear.bf16_panels import HybridLinear
from armature_kernels.linear.int_panels import IntPanelLinear
from armature_kernels.linear.linear import ExactLinear, Linear, LinearForm
from armature_kernels.linear.quantization import MAX_CORRELATED, InputStatistics
from armature_kernels.linear.row_split import RowSplitLinear

WINDOW_TOKENS = 512  # tokens that attend to each other
LOGITS_TOKENS = 128  # tokens whose logits are computed at once: with a vocabulary of 128k these are 64 MB
DEFAULT_TEXT_CHARACTERS = 60_000  # about 15,000 tokens
DOCUMENT_SEPARATOR = "---"  # separator line between documents, which do not attend to each other
Window = list[int]
CALIBRATION_TEXT = Path(__file__).with_name("calibration_text.txt")
# Tokens that attend to each other in a large model, of which few are read. The first token of a window is an outlier, so
# long windows give better statistics: on SmolLM2-135M windows of 512 instead of 256 cost 4.4 instead of 4.8% in int4.
SHORT_WINDOW = 256
MEASURED_WINDOWS = 4  # every fourth window is not part of the statistics, and measures the whole model
# Tokens that show the loss of each product of a layer, of a small model and of a large one, which takes longer.
SMALL_PROBE_TOKENS, PROBE_TOKENS = 128, 32
# Tokens times weights that run through a large model: about 20 s of two cores in FP32. A small one reads more.
TOKEN_WEIGHTS = 0.8e12
SMALL_MODEL, SMALL_MODEL_TOKENS = 300_000_000, 13_000
MIN_TOKENS = 512
LOGITS_ELEMENTS = 2**25  # logits that are compared at a time: 128 MiB in each of the two models
SCALES_SHARE = 4  # int8 needs only mean squares, for which a fourth of the tokens is enough
WORDS = (1, 2, 4, 8, 16, 32, 64) * 2  # of the texts


def default_text() -> str:
    """Return the text on which quality is measured by default: the language reference that Python installs."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics))[:DEFAULT_TEXT_CHARACTERS]


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(f"The text {file} cannot be read: {error}") from error


def read_windows(
    tokenizer: Tokenizer,
    text: Path | None,
    max_model_len: int,
    max_tokens: int | None = None,
    window_tokens: int | None = None,
) -> list[Window]:
    """Cut the text's documents into windows of token ids, each with the checkpoint's usual first token.

    `text` None: `default_text`. `window_tokens` None: `WINDOW_TOKENS`. Raises `SettingsInvalid` if there is nothing to
    read.
    """
    documents = _documents(default_text() if text is None else read_text(text))
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    chunk_tokens, left, windows = min(window_tokens or WINDOW_TOKENS, max_model_len) - len(begin), max_tokens, []
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
    lines: list[str] = []
    for line in [*text.split("\n"), DOCUMENT_SEPARATOR]:
        if line.strip() != DOCUMENT_SEPARATOR:
            lines.append(line)
        elif document := "\n".join(lines).strip("\n"):
            yield document
            lines = []


def window_span(window: Window, start: int, end: int, samples: bool) -> ScheduledSpan:
    """Return the step that reads tokens [start, end) of a window in slot 0. `samples`: logits are computed."""
    request = Generate("reading", tuple(window), SamplingParams(max_tokens=1), arrived_at=0.0)
    return ScheduledSpan(
        make_sequence(request), start, end - start, slot=0, prefix_slot=None, prefix_tokens=0, samples=samples
    )


def window_logits(model: nn.Module, attention: StepAttention, window: Window, start: int, end: int) -> Tensor:
    """Return the logits [end - start, vocab] of a window's tokens; the tokens before `start` were computed before."""
    attend = attention.begin((window_span(window, start, end, samples=True),))
    tokens, positions = torch.tensor(window[start:end]), torch.arange(start, end)
    logits: Tensor = model(StepContext(tokens, positions, torch.arange(end - start), attend))
    return logits


class WindowScorer:
    def __init__(self, model: nn.Module, config: ModelConfig, kv_dtype: torch.dtype, backend: HostBackend) -> None:
        self._model = model
        shape = kv_shape_of(config, 1, min(WINDOW_TOKENS, config.max_model_len))
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
            logits = window_logits(self._model, self._attention, window, start, start + len(targets))
            yield targets, logits.float()


@dataclass(slots=True)
class WatchedForm:
    form: ExactLinear

    @property
    def nbytes(self) -> int:
        return self.form.nbytes

    def activation_group(self, rows: int) -> None: ...

    def multiply(self, x: Activations) -> Tensor:
        return self.form.multiply(x)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        hidden += self.multiply(x)


@dataclass(slots=True)
class InputSums:
    """Sums over the inputs of a product, or of several products with the same kind of inputs."""

    squares: Tensor
    correlations: list[Tensor]
    least_rows: int = 0  # with fewer rows the correlations say too little
    num_rows: int = 0

    @classmethod
    def of(cls, size: int, correlate: bool, least_rows: int = 0) -> InputSums:
        sizes = [min(MAX_CORRELATED, size - first) for first in range(0, size, MAX_CORRELATED)] if correlate else []
        return cls(torch.zeros(size), [torch.zeros(part, part) for part in sizes], least_rows)

    def observe(self, rows: Tensor) -> None:
        self.squares += rows.square().sum(0)
        self.num_rows += len(rows)
        for total, part in zip(self.correlations, torch.split(rows, MAX_CORRELATED, dim=1), strict=False):
            total.addmm_(part.T, part)

    def statistics(self) -> InputStatistics:
        correlations = tuple(self.correlations) if self.num_rows >= self.least_rows else ()
        return InputStatistics(self.squares / max(1, self.num_rows), correlations, self.num_rows)


@dataclass(slots=True)
class InputMeter(WatchedForm):
    """Collects statistics of its inputs while `counts`; returns `product`, if set, instead of multiplying."""

    sums: InputSums
    counts: bool = True
    product: Tensor | None = None

    @classmethod
    def of(cls, form: ExactLinear, size: int, correlate: bool) -> InputMeter:
        return cls(form, InputSums.of(size, correlate))

    def multiply(self, x: Activations) -> Tensor:
        if self.product is not None:
            return self.product.clone()
        self.observe(unquantized(x))
        return self.form.multiply(x)

    def observe(self, x: Tensor) -> None:
        if not self.counts:
            return
        self.sums.observe(x.float())

    def statistics(self) -> InputStatistics:
        return self.sums.statistics()


@dataclass(slots=True)
class _RoundedForm(WatchedForm):
    """Multiplies by the packed weight Q without the error of rounding inputs x to r: W x + (Q r - W r).

    Eight bits would not reduce that error, so it must not decide which weights get them. `product` is W x.
    """

    packed: IntPanelLinear | RowSplitLinear
    product: Tensor

    def multiply(self, x: Activations) -> Tensor:
        rows = unquantized(x)
        group, change = self.packed.activation_group(len(rows)), torch.zeros(len(rows), self.packed.outputs)
        rounded = rows.bfloat16().float()
        if group is not None:
            codes, scales = quantize_torch(rows, group)
            rounded = (codes.float() * scales[..., None]).flatten(1)[:, : rows.shape[1]]
        self.packed.add_to(change, rows)
        return self.product + change.sub_(self.form.multiply(rounded)).to(self.product.dtype)


@dataclass(slots=True)
class _RecordingForm(WatchedForm):
    linear: Linear
    products: dict[Linear, Tensor]

    def multiply(self, x: Activations) -> Tensor:
        product = self.form.multiply(x)
        self.products[self.linear] = product.clone()
        return product


class StreamedCalibration:
    def __init__(
        self, checkpoint: Checkpoint, plan: ServingPlan, backend: HostBackend, text: Path | None = None
    ) -> None:
        """Read the text, the built-in one if None. Raises `SettingsInvalid` if it cannot be read."""
        config, self._correlate = checkpoint.decoder, plan.weights.precision in INT4_PRECISIONS
        size = checkpoint.needs().num_parameters
        is_small, limit = size < SMALL_MODEL, min(config.max_model_len, plan.memory.max_model_len)
        num_tokens = SMALL_MODEL_TOKENS if is_small else max(MIN_TOKENS, int(TOKEN_WEIGHTS / size))
        window_tokens = min(WINDOW_TOKENS if is_small else SHORT_WINDOW, limit)
        num_tokens = num_tokens if self._correlate else max(MIN_TOKENS // 2, num_tokens // SCALES_SHARE)
        tokenizer = Tokenizer(checkpoint.location)
        known = read_windows(tokenizer, text or CALIBRATION_TEXT, limit, num_tokens, window_tokens)
        windows = [[token for token in each if token < config.vocab_size] for each in known]
        self._windows: list[Window] = [window for window in windows if window]
        if not self._windows:
            raise SettingsInvalid("The model knows none of the tokens that its tokenizer makes of the text.")
        self._probed = max(range(len(self._windows)), key=lambda number: len(self._windows[number]))
        self._probe_tokens = SMALL_PROBE_TOKENS if is_small else PROBE_TOKENS
        shape = kv_shape_of(config, 1, window_tokens)
        self._attention = StepAttention(KvCache(shape, kv_dtype(plan)), backend)
        self.losses: dict[tuple[str, ...], float] = {}
        self._expected: dict[int, Tensor] = {}  # rows before the exact output layer, by the window's number

    def stages(
        self, model: Decoder, exact: Callable[[Linear], ExactLinear]
    ) -> Iterator[Mapping[Linear, InputStatistics]]:
        hidden: list[Tensor] = []
        yield from self._around(model.entry, exact, lambda: self._embed(model, hidden))
        for index, layer in enumerate(model.layers):
            linears = [module for module in layer.modules() if isinstance(module, Linear)]
            meters = self._meters(linears, exact)
            for linear, meter in meters.items():
                linear.form = meter
            probe = hidden[self._probed][: self._probe_tokens].clone()
            for number, window in enumerate(self._windows):
                self._count(meters, number)
                hidden[number] = self._run(model, index, hidden[number], window)
            yield {linear: meter.statistics() for linear, meter in meters.items()}
            if self._correlate:
                self._measure_losses(model, index, probe, meters)
            for meter in meters.values():
                meter.form.release()
        yield from self._around(model.exit, exact, lambda: self._merge(model, hidden))
        output = InputMeter.of(exact(model.output), model.output.in_features, self._correlate)
        model.output.form = output  # the norm then returns plain rows
        for number, rows in enumerate(hidden):
            last = unquantized(model.norm(rows))
            if self._is_shown(number):
                output.observe(last)
            else:
                self._expected[number] = last.clone()
        yield {model.output: output.statistics()}

    def _around(
        self,
        part: nn.Module | None,
        exact: Callable[[Linear], ExactLinear],
        run: Callable[[], Iterator[int]],
    ) -> Iterator[Mapping[Linear, InputStatistics]]:
        """Run a part before or after the layers on windows, whose numbers `run` yields; yield statistics."""
        linears = [] if part is None else [module for module in part.modules() if isinstance(module, Linear)]
        meters = self._meters(linears, exact)
        for linear, meter in meters.items():
            linear.form = meter
        for number in run():
            self._count(meters, number)
        if meters:
            yield {linear: meter.statistics() for linear, meter in meters.items()}
        for meter in meters.values():
            meter.form.release()

    def _embed(self, model: Decoder, hidden: list[Tensor]) -> Iterator[int]:
        for number, window in enumerate(self._windows):
            yield number
            hidden.append(model.embedded(torch.tensor(window), torch.arange(len(window))))

    def _merge(self, model: Decoder, hidden: list[Tensor]) -> Iterator[int]:
        for number, rows in enumerate(hidden):
            yield number
            hidden[number] = model.merged(rows)

    def _count(self, meters: Mapping[Linear, InputMeter], number: int) -> None:
        for meter in meters.values():
            meter.counts = self._is_shown(number)

    def _meters(self, linears: Sequence[Linear], exact: Callable[[Linear], ExactLinear]) -> dict[Linear, InputMeter]:
        """Return a meter for each product of a layer.

        The first products of all experts share sums, since they read parts of the same rows. An expert's second product
        that saw fewer rows than it has inputs is rounded without GPTQ.
        """
        meters, shared = dict[Linear, InputMeter](), dict[int, InputSums]()
        for one in linears:
            size = one.in_features
            if not is_expert(one.sources[0]):
                sums = InputSums.of(size, self._correlate)
            elif one.sources[0].endswith(".down_proj"):
                sums = InputSums.of(size, self._correlate, least_rows=size)
            else:
                if size not in shared:
                    shared[size] = InputSums.of(size, self._correlate)
                sums = shared[size]
            meters[one] = InputMeter(exact(one), sums)
        return meters

    def measure_cost(self, model: Decoder, exact: Callable[[Linear], ExactLinear]) -> float | None:
        """Return the relative increase of perplexity; None if the model predicts the text no better than chance."""
        packed, stored = model.output.form, exact(model.output)
        nats, surprise, count, step = 0.0, 0.0, 0, max(1, LOGITS_ELEMENTS // model.output.out_features)
        for number, rows in self._expected.items():
            window = self._windows[number]
            for start in range(0, len(window), step):
                end = min(start + step, len(window))
                model.output.form = stored
                expected = model.outputs(rows[start:end], None)
                model.output.form = packed
                found = window_logits(model, self._attention, window, start, end)
                nats += _divergence(expected, found)
                surprise += _surprise(expected, window[start + 1 : end + 1])
                count += end - start
        self._expected.clear()
        if not count or not math.isfinite(nats) or surprise >= count * math.log(model.output.out_features):
            return None
        return math.expm1(nats / count)

    def _is_shown(self, number: int) -> bool:
        every = min(MEASURED_WINDOWS, len(self._windows))
        return every == 1 or (number + 1) % every != 0

    def _run(self, model: Decoder, index: int, hidden: Tensor, window: Window) -> Tensor:
        """Run one layer on the hidden states of a window's first tokens; `hidden` is overwritten."""
        attend = self._attention.begin((window_span(window, 0, len(hidden), samples=False),))
        positions = torch.arange(len(hidden))
        angles = model.layer_angles(positions)[index]
        result: Tensor = model.layers[index](hidden, angles, attend, None)
        return result

    def _measure_losses(self, model: Decoder, index: int, probe: Tensor, meters: Mapping[Linear, InputMeter]) -> None:
        """Run the probe with the packed weight of each product, the others exact."""
        packed, products = {linear: linear.form for linear in meters}, dict[Linear, Tensor]()
        window = self._windows[self._probed]
        for linear, meter in meters.items():
            meter.counts = False
            kept = is_expert(linear.sources[0]) or is_router(linear.sources[0])  # never upgraded
            linear.form = meter if kept else _RecordingForm(meter.form, linear, products)
        expected = self._run(model, index, probe.clone(), window)
        for linear, meter in meters.items():
            linear.form, meter.counts = meter, False
        for linear in products:  # in the order in which they ran
            linear.form = _rounded_form(packed[linear], meters[linear].form, products[linear])
            error = self._run(model, index, probe.clone(), window) - expected
            linear.form, meters[linear].product = meters[linear], products[linear]
            loss = _relative_error(error, expected)
            if sources := tuple(source for source in linear.sources if not is_value(source)):
                self.losses[sources] = loss if math.isfinite(loss) else 0.0
        for linear, form in packed.items():
            linear.form = form


def _rounded_form(packed: LinearForm, exact: ExactLinear, product: Tensor) -> LinearForm:
    """Return a form that shows what the packed weight loses, not an int8 copy; other forms are returned as they are."""
    four = packed.few if isinstance(packed, HybridLinear) else packed
    return _RoundedForm(exact, four, product) if isinstance(four, IntPanelLinear | RowSplitLinear) else packed


def _relative_error(error: Tensor, expected: Tensor) -> float:
    """Return the mean over rows of |error|² / |expected|², from rows [tokens, hidden].

    Each token counts alike: the first token's residual stream is often hundreds of times larger.
    """
    return float((error.square().sum(-1) / expected.square().sum(-1).clamp_min(1e-30)).mean())


def _divergence(expected: Tensor | TopLogits, found: Tensor | TopLogits) -> float:
    """Return the sum over rows of the divergence of softmax(found) from softmax(expected), in nats."""
    assert isinstance(expected, Tensor) and isinstance(found, Tensor), "all logits were asked for"
    total = 0.0
    for rows in (slice(first, first + 16) for first in range(0, len(expected), 16)):  # what stays in the cache
        wanted, other = expected[rows].float().log_softmax(-1), found[rows].float().log_softmax(-1)
        total += float(torch.nn.functional.kl_div(other, wanted, reduction="sum", log_target=True))
    return total


def _surprise(logits: Tensor | TopLogits, following: Sequence[int]) -> float:
    """Return the sum of -log p of the tokens that follow the first rows, in nats."""
    assert isinstance(logits, Tensor), "all logits were asked for"
    rows = logits[: len(following)].float()
    return float(torch.nn.functional.cross_entropy(rows, torch.tensor(following, dtype=torch.long), reduction="sum"))


def calibration_for(
    checkpoint: Checkpoint, plan: ServingPlan, backend: HostBackend, text: Path | None = None
) -> StreamedCalibration | None:
    """Return the calibration of a quantized decoder with a tokenizer, else None. Raises `SettingsInvalid`."""
    if (
        plan.weights.precision not in QUANTIZED_PRECISIONS
        or checkpoint.kind != "decoder"
        or plan.placement.device != "cpu"
    ):
        return None
    try:
        return StreamedCalibration(checkpoint, plan, backend, text)
    except ArmatureError:
        if text is not None:
            raise
        return None


@dataclass(slots=True)
class _ReleasedForm(WatchedForm):
    """Frees its FP32 copy after each product, so that one layer is in memory at a time."""

    def multiply(self, x: Activations) -> Tensor:
        product = self.form.multiply(x)
        self.form.release()
        return product


def measure_encoder_cost(
    checkpoint: Checkpoint, plan: ServingPlan, model: Encoder, exact: Callable[[Linear], ExactLinear]
) -> float | None:
    """Return 1 minus the lowest cosine of a vector of `model` with the vector of the stored weights.

    `exact` returns the exact form of a product. None: the model has no vectors or no tokenizer, is not quantized, or
    does not run on the processor.
    """
    if plan.weights.precision not in QUANTIZED_PRECISIONS or plan.placement.device != "cpu":
        return None
    if "embedding" not in model.config.outputs:
        return None
    try:
        tokenizer = Tokenizer(checkpoint.location, model.config.lowercases)
    except ArmatureError:
        return None
    texts = tokenizer.encode_texts(sample_texts(), plan.memory.max_model_len)
    if any(max(text.token_ids, default=0) >= checkpoint.encoder.vocab_size for text in texts):
        return None  # the tokenizer has tokens that the model does not know
    found = _vectors(model, texts)
    packed = {linear: linear.form for linear in model.modules() if isinstance(linear, Linear)}
    for linear in packed:
        linear.form = _ReleasedForm(exact(linear))
    expected = _vectors(model, texts)
    for linear, form in packed.items():
        linear.form = form
    cosine = float(F.cosine_similarity(found, expected).min())
    return max(0.0, 1 - cosine) if cosine == cosine else None


def sample_texts() -> list[str]:
    words = CALIBRATION_TEXT.read_text(encoding="utf-8").split()
    step = (len(words) - max(WORDS)) // len(WORDS)
    return [" ".join(words[at * step : at * step + count]) for at, count in enumerate(WORDS)]


def _vectors(model: Encoder, texts: list[Text]) -> Tensor:
    runner = EncoderRunner(model, sum(len(text.token_ids) for text in texts), "it runs once")
    state = EncodeState.from_message(Encode("cost", tuple(texts), ("embedding",), arrived_at=0.0))
    rows = runner.run(state.spans())
    return torch.stack([torch.frombuffer(bytearray(row["embedding"]), dtype=torch.float32) for row in rows])
