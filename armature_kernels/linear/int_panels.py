"""Native linear forms in four and eight bits: panels of codes with scales, multiplied by int8 activations.

Layout and arithmetic are described in `csrc/ops.h`. `armature_kernels/linear/quantization.py` computes the codes. One packed
form serves any number of rows, and a row's result does not depend on the number of other rows. The reference
implementation multiplies by the dequantized weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from armature_kernels.elementwise.activations import (
    MAX_TOP_LOGITS,
    TopLogits,
    TopLogitsRequest,
    empty_top_logits,
    top_logits_scratch,
)
from armature_kernels.elementwise.embedding import EmbeddingTable, RowFactor, TableLayout
from armature_kernels.linear.activations import (
    Activations,
    QuantizedActivations,
    RowGroups,
    quantize,
    quantize_torch,
    rows_of,
    unquantized,
)
from armature_kernels.linear.bf16_product import PackedWeight, WideRows, run_bf16_product
from armature_kernels.linear.layout import PanelLayout
from armature_kernels.linear.quantization import (
    GptqFactors,
    Int4Weight,
    Int8Weight,
    gptq_int4,
    quantize_int4,
    quantize_int8,
)
from armature_kernels.native.arguments import (
    ACTIVATION_CODES,
    LinearIntArguments,
    OpCode,
    PackIntArguments,
    ProductOutput,
    TopLogitsArguments,
)
from armature_kernels.native.library import native_library
from armature_kernels.native.memory import allocate_packed, empty
from armature_kernels.native.operations import has_kernel, run_operation

_STREAM_ROWS = 2048  # outputs quantized at a time

# Groups of 32 inputs of a row that have the same scale if the weight was rounded to four bits here. Its inputs were
# equalised, so on SmolLM2-135M that costs 0.2% at most (docs/quality.md), and products of 32 rows and more take a tenth
# less time (docs/kernels.md). Before codes that a checkpoint brings, which have plain scales, it costs 0.5 to 0.7%.
_SHARED_GROUPS = 4


@dataclass(frozen=True, slots=True)
class IntPanelFactory:
    """Packs weights to `bits` 4 or 8, with `group` inputs per scale (None: all inputs of an output).

    `zero_points`: each scale has a minimum. `double_quantized`: scales have eight bits. `wide`: when rows are
    multiplied in bf16.
    """

    bits: int
    group: int | None
    zero_points: bool = False
    double_quantized: bool = False
    wide: WideRows = WideRows.MANY
    keeps_weight: ClassVar[bool] = False

    @property
    def layout(self) -> PanelLayout:
        """Sizes of the packed panels."""
        return PanelLayout(self.bits, self.group, self.zero_points, self.double_quantized)

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if the native library has the integer product."""
        return has_kernel(OpCode.LINEAR_INT)

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> IntPanelLinear:
        """Return an empty form [outputs, inputs] that `fill` completes."""
        return IntPanelLinear(self, outputs, inputs, bias)

    def part_bytes(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the bytes of each tensor in `IntPanelLinear.parts`."""
        return (self.layout.nbytes(outputs, inputs),)

    def from_parts(self, outputs: int, inputs: int, bias: Tensor | None, parts: Sequence[Tensor]) -> IntPanelLinear:
        """Build a form from saved `parts`."""
        (panels,) = parts
        return IntPanelLinear(self, outputs, inputs, bias, panels)

    def pack(self, weight: Tensor, bias: Tensor | None) -> IntPanelLinear:
        """Pack weight [out, in] of any float dtype."""
        form = self.empty_form(weight.shape[0], weight.shape[1], bias)
        for first in range(0, weight.shape[0], _STREAM_ROWS):
            form.fill(first, weight[first : first + _STREAM_ROWS])
        return form


class IntPanelLinear:
    """A quantized weight [out, in] in panels."""

    __slots__ = ("bias", "group", "inputs", "outputs", "packing", "padded", "panels")

    def __init__(
        self, packing: IntPanelFactory, outputs: int, inputs: int, bias: Tensor | None, panels: Tensor | None = None
    ) -> None:
        """Create the form from `panels` packed before (a cache), or with zeroed panels if None."""
        self.packing, self.outputs, self.inputs = packing, outputs, inputs
        self.group = packing.layout.group_of(inputs)
        self.padded = -(-inputs // self.group) * self.group
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)
        self.panels = allocate_packed(self.panels_bytes) if panels is None else panels
        assert self.panels.numel() == self.panels_bytes and self.panels.data_ptr() % 64 == 0, (
            "panels must have the size of this weight and begin at a cache line"
        )

    @property
    def panels_bytes(self) -> int:
        """Bytes of the panels, without the bias."""
        return self.packing.layout.nbytes(self.outputs, self.inputs)

    @property
    def nbytes(self) -> int:
        """Bytes of panels and bias."""
        return self.panels.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that can be saved, uint8: all but the bias."""
        return (self.panels,)

    def fill(
        self,
        first: int,
        rows: Tensor,
        gptq_factors: Sequence[GptqFactors] = (),
        stored: Int4Weight | Int8Weight | None = None,
    ) -> None:
        """Quantize rows [n, in] of any float dtype as outputs `[first, first + n)`, each given once.

        `rows` may be reused afterwards. Four-bit weights are rounded by GPTQ if `gptq_factors` are given. They are not
        rounded if `stored` has the codes of the rows in this form.
        """
        assert first + len(rows) <= self.outputs, "the rows exceed the weight's outputs"
        if self.packing.bits == 4:
            zero_points, double_quantized = self.packing.zero_points, self.packing.double_quantized
            if stored is not None:
                assert isinstance(stored, Int4Weight), "codes of another form"
                four = stored
                assert (stored.minimums is not None, stored.group) == (zero_points, self.group), "codes of another form"
                assert not double_quantized, "codes have plain scales"
            elif not gptq_factors:
                four = quantize_int4(rows, self.group, zero_points, double_quantized=double_quantized)
            else:
                four = gptq_int4(rows, self.group, zero_points, gptq_factors, double_quantized=double_quantized)
            codes, scales, others = four.codes, four.scales, four.minimums
            if four.double_scales is not None:
                scales, others = four.double_scales.codes, four.double_scales.output_scales
        elif isinstance(stored, Int8Weight):
            codes, scales, others = stored.codes, stored.scales, None
            assert scales.shape == (len(codes), self.padded // self.group), "codes of another form"
        else:
            codes, scales, others = *self._eight_bits(rows), None
        self.fill_codes(first, codes.contiguous(), scales.contiguous(), others)

    def fill_codes(self, first: int, codes: Tensor, scales: Tensor, others: Tensor | None) -> None:
        """Pack codes [n, padded] as outputs `[first, first + n)`.

        Args:
            first: The first output.
            codes: uint8 for four bits, int8 for eight.
            scales: [n, groups], bf16, or int8 if they are quantized.
            others: bf16; minimums [n, groups], or the outputs' own scales [n, 1].
        """
        arguments = PackIntArguments(
            codes.data_ptr(), scales.data_ptr(), None if others is None else others.data_ptr(), self.panels.data_ptr(),
            len(codes), first, self.padded, self.group, self.packing.bits, self.packing.layout.header,
        )  # fmt: skip
        library = native_library().library
        assert library is not None, "the form requires the native library"
        library.armature_pack_int(ctypes.byref(arguments))

    def _eight_bits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize rows to codes int8 [n, padded] and scales [n, groups]; padding is 0."""
        if self.padded != self.inputs:
            rows = torch.nn.functional.pad(rows, (0, self.padded - self.inputs))
        eight = quantize_int8(rows.reshape(-1, self.group))
        return eight.codes.view(len(rows), self.padded), eight.scales.view(len(rows), -1)

    @property
    def row_groups(self) -> RowGroups:
        """How rows are quantized. Those of other forms may have scales of fewer groups."""
        shares = self.packing.double_quantized and self.group == 32
        return RowGroups(self.group, _SHARED_GROUPS if shares else 1)

    def activation_group(self, rows: int) -> RowGroups | None:
        """Return the groups of inputs in which activations must be quantized.

        None: this many rows are multiplied in bf16, and the weight is widened.
        """
        return None if self.packing.wide.applies(rows) else self.row_groups

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] bf16, summed in fp32."""
        return self.multiply_activated(x, "identity")

    def multiply_activated(self, x: Activations, activation: str) -> Tensor:
        """Return act(x times the weight) [tokens, out] bf16; the activation is applied before rounding."""
        y = empty((rows_of(x), self.outputs), torch.bfloat16)
        self.multiply_into(y, 0, x, ProductOutput.BF16, ACTIVATION_CODES[activation])
        return y

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        self.multiply_into(hidden, 0, x, ProductOutput.ADD_FP32)

    def top_logits(self, x: Activations, request: TopLogitsRequest, softcap: float | None = None) -> TopLogits:
        """Return each row's top outputs without writing the others; sums and comparisons are in fp32.

        At most `MAX_TOP_LOGITS` outputs are supported. With a soft cap, values are softcap · tanh(logit / softcap).
        """
        k = request.k
        assert 1 <= k <= min(MAX_TOP_LOGITS, self.outputs), "k must be between 1 and what the kernel keeps"
        x = x if isinstance(x, QuantizedActivations) else quantize(unquantized(x), self.row_groups)
        best, scratch = empty_top_logits(x.rows, request), top_logits_scratch(x.rows, request)
        logsumexp = None if best.logsumexp is None else best.logsumexp.data_ptr()
        product = self.product_arguments(x, None, 0, ProductOutput.FP32)
        mask, mask_stride = request.mask_place()
        run_operation(
            TopLogitsArguments(
                product,
                *(best.values.data_ptr(), best.ids.data_ptr(), logsumexp, scratch.data_ptr(), mask),
                *(k, mask_stride, softcap or 0.0),
            ),
        )
        return best

    def multiply_into(self, y: Tensor, first: int, x: Activations, output: ProductOutput, activation: int = 0) -> None:
        """Write the product to columns `[first, first + out)` of y, whose dtype is that of `output`."""
        if not isinstance(x, QuantizedActivations):
            rows = unquantized(x)
            if self.activation_group(len(rows)) is None:
                run_bf16_product(self._packed, rows, y, first, output, activation)
                return
            x = quantize(rows, self.row_groups)
        address = y.data_ptr() + first * y.element_size()
        product = self.product_arguments(x, address, y.stride(0), output)
        product.activation = activation
        run_operation(product)

    @property
    def _packed(self) -> PackedWeight:
        bits, header = self.packing.bits, self.packing.layout.header
        return PackedWeight(self.panels, self.bias, self.outputs, self.inputs, bits, self.group, header)

    def product_arguments(
        self, x: QuantizedActivations, y: int | None, stride: int, output: ProductOutput
    ) -> LinearIntArguments:
        """Return the arguments of the native product of x; `y` is the output's address and `stride` its row stride."""
        assert (x.size, x.group) == (self.inputs, self.group), "activations must have the weight's inputs and group"
        bias = None if self.bias is None else self.bias.data_ptr()
        return LinearIntArguments(
            self.panels.data_ptr(), bias, x.codes.data_ptr(), x.scales.data_ptr(), x.sums.data_ptr(), y, stride,
            x.rows, self.padded, self.outputs, self.group, x.height, self.packing.bits, self.packing.layout.header, output,
            shared=x.shared,
        )  # fmt: skip

    def rows(self, ids: Tensor, factor: RowFactor = 1.0) -> Tensor:
        """Return rows of the dequantized weight, fp32 [n, in], for ids [n] int64, times a factor.

        A tied embedding therefore needs no second copy.
        """
        form, header = TableLayout(self.packing.bits), self.packing.layout.header
        table = EmbeddingTable(self.panels, form, self.outputs, self.inputs, self.padded, self.group, header)
        return table.rows(ids, factor)

    def dequantized(self) -> Tensor:
        """Return the dequantized weight, fp32 [out, in]."""
        return self.rows(torch.arange(self.outputs))

    def multiply_torch(self, x: Tensor) -> Tensor:
        """Multiply in fp32 by torch, with quantized activations and the dequantized weight.

        Many rows may be multiplied in bf16 instead, by the weight rounded to it. This is the reference implementation
        of `multiply`.
        """
        if self.activation_group(len(x)) is None:
            return torch.nn.functional.linear(x.float(), self.dequantized().bfloat16().float(), self.bias)
        codes, scales = quantize_torch(x, self.row_groups)
        rounded = (codes.float() * scales[..., None]).flatten(1)[:, : self.inputs]
        product = rounded @ self.dequantized().T
        return product if self.bias is None else product + self.bias
