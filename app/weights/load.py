"""Fills a model, or an exported program, with a checkpoint's weights.

Weights that are used as stored are memory-mapped; the others are packed one at a time from the mapped file. Peak memory
is the finished weights plus one tensor; the largest are packed first. For a model in device memory, the host holds a
few MiB at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from app.backends.base import BaseBackend
from app.errors import CheckpointInvalid, PlanImpossible
from app.hardware.plan.plan import ServingPlan
from app.models.decoders.decoder import Decoder, Embedding, SinusoidalPositions, build_decoder_model
from app.models.decoders.draft_head import Head, build_draft_head
from app.models.decoders.layers import Filters, HeadNorm, Norm, StoredVector, Xielu
from app.models.decoders.shapes import narrow_products
from app.models.encoders.encoder import DistanceBias, Encoder, build_encoder_model
from app.models.encoders.heads import DenseLayer, LayerNorm
from app.models.program import PackedProduct, Program
from app.models.program_graph import Ref
from app.weights.checkpoint import Checkpoint
from app.weights.form_choice import CacheableForm, CacheablePacking, FormChoice, LayerPacking, form_choice
from app.weights.forms import INT8, INT8_ROWS, MOST_ROW_SCALE_COST, QUANTIZED, choose_upgrades, is_output, is_value
from app.weights.packs import PackedWeights, PackFile, PackFolder, PackNotes, Progress
from app.weights.program import CONVOLUTIONS, Archive, ProgramCheckpoint, StoredTensor
from app.weights.safetensors import TensorEntry
from app.weights.tensor_reader import TensorReader, check_fp8, check_values, row_ranges
from armature_kernels.compute_threads import ComputeThreads
from armature_kernels.linear.bf16_panels import Bf16PanelLinear, HybridLinear
from armature_kernels.linear.device import DeviceLinear
from armature_kernels.linear.device_fp8 import DeviceFp8Linear
from armature_kernels.linear.int_panels import IntPanelLinear
from armature_kernels.linear.layout import PANEL_OUTPUTS
from armature_kernels.linear.linear import EmptyForm, ExactLinear, FormFactory, Linear, LinearForm
from armature_kernels.linear.quantization import GptqFactors, InputStatistics
from armature_kernels.linear.row_split import RowSplitLinear
from armature_kernels.linear.smoothing import (
    activation_aware_scales,
    column_maxima,
    column_squares,
    mean_of_squares,
    smooth_scales,
)
from armature_kernels.linear.torchao_config import is_torchao
from armature_kernels.linear.torchao_linear import TorchaoFactory
from armature_kernels.native.library import native_library

Model = Decoder | Encoder | Head
ReportCost = Callable[[float], None]  # takes the cost of quantization in quality, see `Packing`
_Block = tuple[str, TensorEntry, range, int]  # source, tensor, rows of it, and the first of the layer's outputs


class PackCalibrator(Protocol):
    """Runs a calibration text through a model while its layers are packed one after the other."""

    @property
    def losses(self) -> Mapping[tuple[str, ...], float]:
        """Relative error of the residual stream by each packed product, by its sources; known after `stages`."""

    def stages(
        self, model: Decoder, exact: Callable[[Linear], ExactLinear]
    ) -> Iterator[Mapping[Linear, InputStatistics]]:
        """Yield the statistics of the products of each layer in turn; they must be packed before the next stage."""

    def measure_cost(self, model: Decoder, exact: Callable[[Linear], ExactLinear]) -> float | None:
        """Return by which share the packed model raises perplexity on other text; None: unknown."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How weights are packed and kept.

    - `folder`: where packed weights are kept; None: they are not kept.
    - `make_calibrator`: returns what improves the quantization, or None. It is called only if a decoder's weights must
    be packed, because it reads the text.
    - `replaces_pack`: weights are packed again although a pack exists.
    - `measure_encoder`: returns what the packing of an encoder costs in quality; None: unknown.
    - `report_layers`: gets the phase (`packing weights`, ...), the linear layers done, and of how many.
    - `report_cost`: gets the cost that was measured while packing, now or earlier: the increase of perplexity, or of an
    encoder 1 minus the lowest cosine of a vector with the exact one.
    """

    folder: PackFolder | None = None
    make_calibrator: Callable[[], PackCalibrator | None] = lambda: None
    replaces_pack: bool = False
    measure_encoder: Callable[[Encoder, Callable[[Linear], ExactLinear]], float | None] = lambda model, exact: None
    report_cost: ReportCost = lambda cost: None
    report_layers: Callable[[str, int, int], None] = lambda phase, done, total: None


NOT_KEPT = Packing()


def load_model(
    checkpoint: Checkpoint,
    plan: ServingPlan,
    backend: BaseBackend,
    progress: Progress | None = None,
    packing: Packing = NOT_KEPT,
) -> Model:
    """Return the model with its weights, ready to run; `progress` gets (bytes done, bytes in total)."""
    loading = _ModelLoader(checkpoint, plan, backend, progress or (lambda done, total: None), packing)
    with closing(loading.streams), loading.threads:
        loading.fill()
    return loading.model


def pack_weights(
    checkpoint: Checkpoint,
    plan: ServingPlan,
    backend: BaseBackend,
    progress: Progress,
    packing: Packing,
) -> PackFile | None:
    """Load as for serving, so that the weights are packed and kept; None if this form is not kept."""
    loading = _ModelLoader(checkpoint, plan, backend, progress, packing)
    with closing(loading.streams), loading.threads:
        return loading.fill()


def _build(checkpoint: Checkpoint, dtype: torch.dtype, max_model_len: int, device: torch.device) -> Model:
    if checkpoint.kind == "encoder":
        return build_encoder_model(checkpoint.encoder, dtype, max_model_len, device)
    build = build_draft_head if checkpoint.decoder.is_draft_head else build_decoder_model
    return build(checkpoint.decoder, dtype, max_model_len, device)


class _ModelLoader:
    """The state of one load: the model, the progress, and the smooth scales of each layer."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: ServingPlan,
        backend: BaseBackend,
        progress: Progress,
        packing: Packing,
    ) -> None:
        self.checkpoint, self.progress, self.packing = checkpoint, progress, packing
        self.choice = form_choice(plan, checkpoint.model_config, backend.device, checkpoint.tensors)
        self.model = _build(checkpoint, self.choice.dtype, plan.memory.max_model_len, backend.device)
        # The plan counts on the speed of groups. With AMX rows are multiplied in bf16, which gains nothing by fewer scales.
        has_vectors = isinstance(self.model, Encoder) and "embedding" in self.model.config.outputs
        if has_vectors and self.choice.recipe is INT8 and not native_library().wide_rows:
            self.choice = replace(self.choice, recipe=INT8_ROWS)
        self.precision = plan.weights.precision
        self.is_quantized = self.precision in QUANTIZED and self.choice.device is None
        # Codes of the checkpoint that are kept are not rounded again.
        self.is_calibrated = self.is_quantized and isinstance(self.model, Decoder) and not self.choice.stored
        self.calibrator: PackCalibrator | None = None
        self.streams, self.threads = TensorReader(checkpoint.tensors), ComputeThreads()
        self.smooth_scales: dict[tuple[str, ...], Tensor] = {}  # scales of the columns, by a layer's sources
        self.exact: dict[Linear, ExactLinear] = {}  # layers that the calibrator runs
        self.done, self.total = 0, sum(entry.nbytes for entry in checkpoint.tensors.values())
        # Correlations of the last product whose columns were not scaled, its group, and the factors for it.
        self.shared_factors: tuple[tuple[Tensor, ...], int, tuple[GptqFactors, ...]] = ((), 0, ())
        self.phase, self.done_layers, self.num_layers = "loading weights", 0, 0

    @torch.inference_mode()
    def fill(self) -> PackFile | None:
        linears = [module for module in self.model.modules() if isinstance(module, Linear)]
        norms = [module for module in self.model.modules() if isinstance(module, Norm)]
        self.num_layers = len(linears)
        for module in self.model.modules():
            if isinstance(module, Norm | Filters | HeadNorm | StoredVector | Xielu):
                self._set_norm(module)
        self.feeding = {norm.feeds: norm for norm in norms if norm.feeds is not None}
        layers, folder = self._layers(linears, self.choice), self.packing.folder
        self._check_torchao(layers)
        pack_file = None if folder is None else folder.open(self.checkpoint, self.choice, layers)
        kept = None if pack_file is None else self._read_pack(pack_file, linears)
        if kept is not None:
            self.choice = replace(self.choice, upgraded=kept.notes.upgraded)
            layers = self._layers(linears, self.choice)
        else:
            self._begin("packing weights" if self.is_quantized else self.phase)
            self.calibrator = self.packing.make_calibrator() if self.is_calibrated else None
        if self.calibrator is not None:
            layers = self._pack_calibrated(self.calibrator, linears)
        else:
            for layer in sorted(layers, key=lambda layer: -layer.linear.in_features * layer.linear.out_features):
                self._pack(layer, None if kept is None else kept.blobs)
        self._fill_tables({linear.sources: linear.form for linear in linears})
        notes = PackNotes(self.choice.upgraded, self._measure_cost()) if kept is None else kept.notes
        if kept is None and self.choice.recipe is INT8_ROWS:
            layers, notes = self._pack_finer(linears, layers, notes)
        self.progress(self.total, self.total)
        if pack_file is not None and kept is None:
            blobs = [blob for layer in layers for blob in layer.blobs(self.smooth_scales.get(layer.linear.sources))]
            pack_file.write(dict(blobs), notes)
        if notes.cost is not None:
            self.packing.report_cost(notes.cost)
        return pack_file

    def _pack_finer(
        self, linears: Sequence[Linear], layers: list[LayerPacking], notes: PackNotes
    ) -> tuple[list[LayerPacking], PackNotes]:
        """Pack an encoder's products with scales of groups, as many as it takes for vectors that are close enough."""
        # The last product of a block reads activations, which have the largest outliers.
        narrowing = [linear for linear in linears if linear.in_features > linear.out_features]
        for finer in (narrowing, linears):
            if notes.cost is not None and notes.cost <= MOST_ROW_SCALE_COST:
                break
            upgraded = frozenset(source for linear in finer for source in linear.sources)
            layers = self._pack_upgraded(linears, layers, upgraded)
            notes = PackNotes(upgraded, self._measure_cost())
        return layers, notes

    def _read_pack(self, pack_file: PackFile, linears: Sequence[Linear]) -> PackedWeights | None:
        if self.is_calibrated and self.packing.replaces_pack:
            return None
        return pack_file.read(lambda upgraded: self._blob_bytes(linears, upgraded), self._report_pack_progress)

    def _fill_tables(self, packed: Mapping[tuple[str, ...], LinearForm]) -> None:
        for module in self.model.modules():
            if isinstance(module, Embedding):
                self._embed(module, packed.get((module.source,)))
            elif isinstance(module, LayerNorm | DenseLayer | DistanceBias):
                self._set_weight_and_bias(module)

    def _measure_cost(self) -> float | None:
        if self.is_quantized:
            self._begin("measuring the cost of quantization")
        if isinstance(self.model, Encoder):
            return self.packing.measure_encoder(self.model, self._exact_packed) if self.is_quantized else None
        if self.calibrator is None:
            return None
        assert isinstance(self.model, Decoder), "only decoders are calibrated"
        cost = self.calibrator.measure_cost(self.model, self._exact_form)
        self.exact.clear()
        return cost

    def _layers(self, linears: Sequence[Linear], choice: FormChoice) -> list[LayerPacking]:
        layers = []
        for linear in linears:
            packing = choice.packing(linear)
            norm = self.feeding.get(linear) if choice.equalizes(linear, packing) else None
            layers.append(LayerPacking(linear, packing, norm))
        return layers

    def _check_torchao(self, layers: Sequence[LayerPacking]) -> None:
        """Raise `PlanImpossible` if a config of torchao that was asked for suits no layer."""
        if is_torchao(self.precision) and not any(isinstance(layer.packing, TorchaoFactory) for layer in layers):
            raise PlanImpossible(
                f"{self.precision} suits no layer of this model: none has a whole number of its groups."
            )

    def _blob_bytes(self, linears: Sequence[Linear], upgraded: frozenset[str]) -> dict[str, int]:
        layers = self._layers(linears, replace(self.choice, upgraded=upgraded))
        return {name: nbytes for layer in layers for name, nbytes in layer.blob_bytes()}

    def _pack_calibrated(self, calibrator: PackCalibrator, linears: Sequence[Linear]) -> list[LayerPacking]:
        """Pack layer by layer while a text runs through the model, then pack again what is upgraded."""
        assert isinstance(self.model, Decoder), "only decoders are calibrated"
        always = narrow_products(self.model.config)
        upgraded = frozenset(
            source for source in self.choice.upgraded if is_value(source) or is_output(source) or source in always
        )
        self.choice = replace(self.choice, upgraded=upgraded)
        layers = {layer.linear: layer for layer in self._layers(linears, self.choice)}
        for module in self.model.modules():
            if isinstance(module, Embedding):
                self._set_weight(module)
        for statistics in calibrator.stages(self.model, self._exact_form):
            self.exact = {linear: self.exact[linear] for linear in statistics}  # dequantized weights are not a mapping
            for linear, shown in statistics.items():
                self._pack(layers[linear], None, shown)
        if self.choice.recipe.upgrade is not None:
            upgraded = choose_upgrades(self.checkpoint.decoder, self.choice.recipe, calibrator.losses)
        return self._pack_upgraded(linears, tuple(layers.values()), upgraded)

    def _pack_upgraded(
        self, linears: Sequence[Linear], packed: Sequence[LayerPacking], upgraded: frozenset[str]
    ) -> list[LayerPacking]:
        """Pack the layers again whose form another choice of upgraded ones changes."""
        before = {layer.linear: layer.packing for layer in packed}
        self.choice = replace(self.choice, upgraded=upgraded)
        final = self._layers(linears, self.choice)
        for layer in final:
            if layer.packing != before[layer.linear]:
                entries = self.streams.entries(layer.linear.sources)
                factors = self.smooth_scales.get(layer.linear.sources)
                layer.linear.form = self._form(layer.linear, layer.packing, entries, factors)
        return final

    def _exact_form(self, linear: Linear) -> ExactLinear:
        weights = [self.streams.stored(entry) for entry in self.streams.entries(linear.sources)]
        bias = self.streams.bias(linear.sources, self.choice.dtype) if linear.has_bias else None
        self.exact[linear] = ExactLinear(
            weights, bias, partial(self.streams.drop, self.streams.entries(linear.sources))
        )
        return self.exact[linear]

    def _exact_packed(self, linear: Linear) -> ExactLinear:
        """Return the form that multiplies by the stored weights of a packed layer, whose norm may be divided."""
        form = self._exact_form(linear)
        form.scales = self.smooth_scales.get(linear.sources)
        return form

    def _report_pack_progress(self, done: int, total: int) -> None:
        self.done = self.total * done // max(1, total)
        self.progress(self.done, self.total)

    def _embed(self, embedding: Embedding, tied: LinearForm | None) -> None:
        if isinstance(tied, Bf16PanelLinear | IntPanelLinear | HybridLinear | DeviceLinear):
            embedding.tie(tied, self.smooth_scales.get((embedding.source,)))
            self._advance(self.streams.entries((embedding.source,)))
        else:
            self._set_weight(embedding)

    def _set_norm(self, norm: Norm | Filters | HeadNorm | StoredVector | Xielu) -> None:
        entries = [self.streams.tensors[f"{norm.source}.{kind}"] for kind in norm.kinds]
        for entry, kind in zip(entries, norm.kinds, strict=True):
            check_values(f"{norm.source}.{kind}", self.streams.stored(entry), self.choice.dtype)
        if entries:
            norm.set_weight(*(self.streams.resident(entry, self.choice.device) for entry in entries))
        else:
            norm.fill(1.0, self.choice.device)
        self._advance(entries)

    def _set_weight(self, module: Embedding) -> None:
        if isinstance(module, SinusoidalPositions):
            module.fill(self.choice.device)
            return
        (entry,) = self.streams.entries((module.source,))
        module.set_weight(self.streams.resident(entry, self.choice.device))
        self._advance((entry,))

    def _set_weight_and_bias(self, module: LayerNorm | DenseLayer | DistanceBias) -> None:
        kinds = ("weight", "bias") if module.has_bias else ("weight",)
        entries = [entry for kind in kinds for entry in self.streams.entries((module.source,), kind)]
        module.set_weight(*(self.streams.resident(entry, self.choice.device) for entry in entries))
        self._advance(entries)

    def _pack(
        self, layer: LayerPacking, blobs: Mapping[str, Tensor] | None, statistics: InputStatistics | None = None
    ) -> None:
        linear, entries = layer.linear, self.streams.entries(layer.linear.sources)
        factors = None
        if layer.norm is not None:
            if blobs is not None:
                factors = layer.smooth_scales(blobs)
            else:
                factors = self._smooth_scales(layer.norm, layer, entries, statistics)
            layer.norm.divide_weight(factors)
            self.smooth_scales[linear.sources] = linear.input_scales = factors
            if linear in self.exact:
                self.exact[linear].scales = factors
        if blobs is not None and isinstance(layer.packing, CacheablePacking):
            linear.form = layer.packing.from_parts(
                linear.out_features, linear.in_features, self._bias(linear), layer.form_parts(blobs)
            )
        else:
            linear.form = self._form(linear, layer.packing, entries, factors, statistics)
        self.done_layers += 1
        self._begin(self.phase)
        self._advance(entries)

    def _smooth_scales(
        self,
        norm: Norm,
        layer: LayerPacking,
        entries: Sequence[TensorEntry],
        statistics: InputStatistics | None,
    ) -> Tensor:
        if statistics is not None:
            blocks = [(entry, rows) for entry in entries for rows in row_ranges(entry)]
            sums = self.threads.run([partial(self._column_squares, *block) for block in blocks])
            weight_squares = mean_of_squares(sums, layer.linear.in_features, layer.linear.out_features)
            return activation_aware_scales(statistics.mean_squares, weight_squares)
        parts = (rows for _, rows in self._blocks(entries))
        return smooth_scales(norm.weight, column_maxima(parts, layer.linear.in_features, self.choice.device))

    def _column_squares(self, entry: TensorEntry, rows: range) -> Tensor:
        return column_squares(self.streams.block(entry, rows))

    def _blocks(self, entries: Sequence[TensorEntry]) -> Iterator[tuple[int, Tensor]]:
        """Yield the stacked rows of the entries on the model's device; each is valid until the next."""
        for first, rows in self.streams.row_blocks(entries):
            yield first, rows if self.choice.device is None else rows.to(self.choice.device)

    def _bias(self, linear: Linear) -> Tensor | None:
        if not linear.has_bias:
            return None
        self._advance(self.streams.entries(linear.sources, "bias"))
        for source, entry in zip(linear.sources, self.streams.entries(linear.sources, "bias"), strict=True):
            check_values(f"{source}.bias", self.streams.stored(entry), self.choice.dtype)
        return self.streams.bias(linear.sources, self.choice.dtype)

    def _form(
        self,
        linear: Linear,
        packing: FormFactory,
        entries: Sequence[TensorEntry],
        factors: Tensor | None,
        statistics: InputStatistics | None = None,
    ) -> LinearForm:
        bias = self._bias(linear)
        empty = packing.empty_form(linear.out_features, linear.in_features, bias)
        if empty is not None:
            fill = self._fill_function(empty, factors, statistics)
            jobs = [
                partial(self._fill_blocks, empty, fill, factors, blocks) for blocks in _fill_blocks(linear, entries)
            ]
            self.threads.run_all(jobs, alone=self.choice.device is not None)
            return empty
        weight, mapped = self.streams.whole(entries, self.choice.dtype, packing.keeps_weight)
        form = packing.pack(weight if factors is None else weight * factors, bias)
        if not (mapped and packing.keeps_weight):
            self.streams.drop(entries)
        return form

    def _fill_function(
        self, empty: EmptyForm, factors: Tensor | None, statistics: InputStatistics | None
    ) -> Callable[[int, Tensor], None]:
        if statistics is None or not isinstance(empty, CacheableForm):
            return empty.fill
        first = empty.few if isinstance(empty, HybridLinear) else empty
        if isinstance(first, RowSplitLinear):
            first = min(first.forms, key=lambda form: form.packing.bits)
        if first.packing.bits != 4:
            return empty.fill
        return partial(empty.fill, gptq_factors=self._gptq_factors(statistics, factors, first.group))

    def _gptq_factors(self, statistics: InputStatistics, factors: Tensor | None, group: int) -> tuple[GptqFactors, ...]:
        """Return the factors of a product; all experts of a layer have the same."""
        sums, known, found = self.shared_factors
        is_same = factors is None and known == group and len(sums) == len(statistics.correlations) > 0
        if is_same and all(one is other for one, other in zip(sums, statistics.correlations, strict=True)):
            return found
        found = tuple(self.threads.run(statistics.gptq_jobs(factors, group)))
        if factors is None:
            self.shared_factors = statistics.correlations, group, found
        return found

    def _fill_blocks(
        self,
        form: EmptyForm,
        fill: Callable[[int, Tensor], None],
        factors: Tensor | None,
        blocks: Sequence[_Block],
    ) -> None:
        for source, entry, rows, first in blocks:
            if source in self.choice.fp8 and isinstance(form, DeviceFp8Linear):
                kept = self.streams.fp8_codes(entry, rows)
                check_fp8(f"{source}.weight", *kept)
                form.fill_stored(first, *kept)
                continue
            block = self.streams.block(entry, rows)
            block = block if self.choice.device is None else block.to(self.choice.device)
            if self.is_quantized or self.choice.dtype == torch.float16:  # else the warm-up tells, without another pass
                check_values(f"{source}.weight", block, self.choice.dtype)
            bits = self.choice.code_bits(source)
            codes = None if bits is None else self.streams.stored_codes(entry, rows, bits)
            if codes is not None and isinstance(form, CacheableForm):
                form.fill(first, block, stored=codes)
            else:
                fill(first, block if factors is None else block * factors)

    def _begin(self, phase: str) -> None:
        self.phase = phase
        self.packing.report_layers(phase, self.done_layers, self.num_layers)

    def _advance(self, entries: Sequence[TensorEntry]) -> None:
        self.done = min(
            self.total, self.done + sum(entry.nbytes for entry in entries)
        )  # a tied embedding is counted twice
        self.progress(self.done, self.total)


def _fill_blocks(linear: Linear, entries: Sequence[TensorEntry]) -> list[list[_Block]]:
    """Return the blocks of rows of a layer; those that share a panel of outputs are together, for one thread."""
    jobs: list[list[_Block]] = []
    first = 0
    for source, entry in zip(linear.sources, entries, strict=True):
        for rows in row_ranges(entry):
            block = (source, entry, rows, first + rows.start)
            if jobs and block[-1] % PANEL_OUTPUTS:
                jobs[-1].append(block)
            else:
                jobs.append([block])
        first += entry.shape[0]
    return jobs


def read_flat(archive: Archive, stored: StoredTensor) -> Tensor:
    """Return all elements of a member, [elements], mapped from the file: processes share the memory."""
    dtype = getattr(torch, stored.dtype)
    if stored.min_member_elements == 0:
        return torch.empty(0, dtype=dtype)
    data = archive.map(stored.member)
    return torch.frombuffer(data, dtype=dtype, count=len(data) // dtype.itemsize)


def pack_weight(packing: FormFactory, weight: Tensor, bias: Tensor | None) -> LinearForm:
    return packing.pack(weight.contiguous(), bias)


@dataclass(frozen=True, slots=True)
class ProgramValues:
    """The source of values: the archive, or synthetic values if steps are only timed."""

    flat: Callable[[Archive, StoredTensor], Tensor] = read_flat
    packed: Callable[[FormFactory, Tensor, Tensor | None], LinearForm] = pack_weight


ARCHIVE_VALUES = ProgramValues()


def load_program(
    checkpoint: ProgramCheckpoint, plan: ServingPlan, progress: Progress, making: ProgramValues = ARCHIVE_VALUES
) -> Program:
    """Return the program, ready to run. `progress` is called with (bytes done, bytes in total)."""
    states = program_states(checkpoint, progress, making)
    choice, precision = form_choice(plan, None), plan.weights.precision
    narrow = precision == "bf16"
    products = {
        weight: PackedProduct(
            _form(states.pop(weight), None if bias is None else states[bias], choice, making), choice.dtype, narrow
        )
        for weight, bias in checkpoint.linears.items()
    }
    if narrow:
        _convert_to_bf16(checkpoint, states)
    try:
        return Program(checkpoint.graph, states, products, narrow)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointInvalid(f"{checkpoint.path.name}: a call of the program is damaged: {error!r}.") from error


def program_states(checkpoint: ProgramCheckpoint, progress: Progress, making: ProgramValues) -> dict[str, Tensor]:
    """Return the tensors by the graph's names; those that share memory in the archive share it here."""
    members: dict[str, Tensor] = {}
    states = {}
    with closing(Archive(checkpoint.path)) as archive:
        total = sum(archive.size(each.member) for each in checkpoint.states.values() if archive.has(each.member))
        done = 0
        for name, stored in checkpoint.states.items():
            if stored.member not in members:
                members[stored.member] = making.flat(archive, stored)
                done += members[stored.member].nbytes
                progress(min(done, total), total)
            states[name] = torch.as_strided(members[stored.member], stored.shape, stored.strides, stored.offset)
    progress(total, total)
    return states


def _form(weight: Tensor, bias: Tensor | None, choice: FormChoice, making: ProgramValues) -> LinearForm:
    rows, columns = weight.shape
    packing = choice.packing(Linear(("program",), columns, rows, bias is not None))
    return making.packed(packing, weight.to(choice.dtype), None if bias is None else bias.to(choice.dtype))


def _convert_to_bf16(checkpoint: ProgramCheckpoint, states: dict[str, Tensor]) -> None:
    """Convert weights that only convolutions read to BF16 once, as autocast would at every step."""
    others, own = set[str](), set[str]()
    for node in checkpoint.graph.nodes:
        names = {item.name for item in (*node.arguments, *node.keywords.values()) if isinstance(item, Ref)}
        (own if node.target in CONVOLUTIONS else others).update(names)
    for name in own - others:
        if name in states and states[name].dtype == torch.float32:
            states[name] = states[name].to(torch.bfloat16)
