"""Codes and arguments of the native operations: the structures of `csrc/ops.h`, whose sizes the library confirms.

`LanesArguments` is the argument of `armature_run_lanes` (csrc/lanes.c), which runs an encoder batch on several lanes: a
lane is a set of whole texts that one thread processes through all operations, in separate memory.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import ClassVar

_ADDRESS, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class OpCode(IntEnum):
    """Operation codes, equal to the `enum` in csrc/ops.h."""

    QUANTIZE = 0
    NORM = 1
    GATE = 2
    ROPE = 3
    LINEAR_INT = 4
    TOP_LOGITS = 5
    ATTENTION = 6
    EMBEDDING = 7
    GATHER = 8
    LINEAR_BF16 = 9
    ROPE_ANGLES = 10
    LAYER_NORM = 11
    ACTIVATE = 12
    TEXT_ATTENTION = 13
    INT4_SCALES = 14
    INT4_GPTQ = 15
    LINEAR_FP32 = 16
    TOP_ELEMENTS = 17
    POOL = 18
    LORA = 19
    ROUTE = 20
    EXPERTS = 21
    LATENT = 22
    ALTUP = 23
    MATCH = 24
    RECUR_INPUTS = 25
    RECUR = 26
    GATED_NORM = 27


class ProductOutput(IntEnum):
    """The destination format of a product's sums."""

    BF16 = 0
    FP32 = 1
    ADD_FP32 = 2


class RowSink(ctypes.Structure):
    """The output of a kernel that writes rows: bf16 or fp32 rows, or quantized tiles with scales and sums."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("rows", "tiles", "scales", "sums")),
        *((name, _INT) for name in ("group", "height")),
        ("wide", _ADDRESS),
        ("shared", _INT),
    )


class Arguments(ctypes.Structure):
    """Arguments of the operation `code`. Each operation has one subclass."""

    code: ClassVar[OpCode]


class QuantizeArguments(Arguments):
    """Arguments of the quantization of bf16 rows to int8 tiles."""

    code = OpCode.QUANTIZE
    _fields_ = (("x", _ADDRESS), *((name, _INT) for name in ("stride", "rows", "size")), ("out", RowSink))


class NormArguments(Arguments):
    """Arguments of RMSNorm, or of adding the RMSNorm of `branch` to `hidden`."""

    code = OpCode.NORM
    _fields_ = (
        *((name, _ADDRESS) for name in ("hidden", "branch", "weight")),
        *((name, _INT) for name in ("stride", "rows", "size", "wide")),
        ("eps", _FLOAT),
        ("out", RowSink),
        ("factor", _FLOAT),
    )


class LayerNormArguments(Arguments):
    """Arguments of LayerNorm."""

    code = OpCode.LAYER_NORM
    _fields_ = (
        *((name, _ADDRESS) for name in ("hidden", "weight", "bias")),
        *((name, _INT) for name in ("stride", "rows", "size", "in_place")),
        ("eps", _FLOAT),
        ("out", RowSink),
    )


# Activation codes, equal to the `enum` in csrc/ops.h; 0 is the identity.
ACTIVATION_CODES = {
    name: at
    for at, name in enumerate(("identity", "silu", "gelu_tanh", "gelu", "relu", "tanh", "relu2", "xielu", "swiglu_oai"))
}
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of `swiglu_oai`, as in csrc/activate.h


class ActivateArguments(Arguments):
    """Arguments of an elementwise activation."""

    code = OpCode.ACTIVATE
    _fields_ = (
        ("x", _ADDRESS),
        *((name, _INT) for name in ("stride", "rows", "size", "activation", "wide")),
        *((name, _FLOAT) for name in ("positive", "negative")),
        ("out", RowSink),
    )


class GateArguments(Arguments):
    """Arguments of a gated activation, act(gate) * up."""

    code = OpCode.GATE
    _fields_ = (
        ("gate_up", _ADDRESS),
        *((name, _INT) for name in ("rows", "size", "activation", "wide")),
        ("out", RowSink),
        *((name, _ADDRESS) for name in ("up", "cutoffs")),
        ("up_stride", _INT),
        ("deviations", _FLOAT),
    )


class LinearIntArguments(Arguments):
    """Arguments of the integer product with a weight in int4 or int8 panels."""

    code = OpCode.LINEAR_INT
    _fields_ = (
        *((name, _ADDRESS) for name in ("panels", "bias", "tiles", "scales", "sums", "y")),
        *(
            (name, _INT)
            for name in (
                "y_stride",
                "rows",
                "padded",
                "outputs",
                "group",
                "height",
                "bits",
                "header",
                "output",
                "activation",
                "shared",
            )
        ),
    )


class TopLogitsArguments(Arguments):
    """Arguments of the integer product that returns only the top outputs of each row."""

    code = OpCode.TOP_LOGITS
    _fields_ = (
        ("product", LinearIntArguments),
        *((name, _ADDRESS) for name in ("values", "ids", "logsumexp", "scratch", "allowed")),
        ("k", _INT),
        ("allowed_stride", _INT),
        ("softcap", _FLOAT),
    )


class EmbeddingArguments(Arguments):
    """Arguments of reading rows of a table or packed weight as fp32."""

    code = OpCode.EMBEDDING
    _fields_ = (
        *((name, _ADDRESS) for name in ("weight", "ids", "factors", "out")),
        *((name, _INT) for name in ("count", "outputs", "inputs", "padded", "group", "form", "header", "add")),
        ("factor", _FLOAT),
        ("absent_first", _INT),
    )


class GatherArguments(Arguments):
    """Arguments of copying rows by index."""

    code = OpCode.GATHER
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "ids", "out")),
        *((name, _INT) for name in ("stride", "count", "size", "out_stride")),
    )


class PoolArguments(Arguments):
    """Arguments of pooling the rows of each text, and of dividing rows by their lengths."""

    code = OpCode.POOL
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "starts", "skipped", "out")),
        *((name, _INT) for name in ("texts", "stride", "size", "mean", "unit")),
    )


class LinearBf16Arguments(Arguments):
    """Arguments of the product of bf16 rows with a packed weight; `bits`, `group` and `header` are those of integers."""

    code = OpCode.LINEAR_BF16
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "panels", "bias", "tiles", "y")),
        *(
            (name, _INT)
            for name in (
                *("x_stride", "y_stride", "rows", "inputs", "outputs", "output", "fixed", "activation"),
                *("bits", "group", "header"),
            )
        ),
    )


class RopeAnglesArguments(Arguments):
    """Arguments of the computation of RoPE angles."""

    code = OpCode.ROPE_ANGLES
    _fields_ = (
        *((name, _ADDRESS) for name in ("positions", "frequencies", "cos", "sin")),
        *((name, _INT) for name in ("count", "half")),
        ("scale", _FLOAT),
    )


class KvAddresses(ctypes.Structure):
    """The structure `kv_rows` of csrc/ops.h."""

    _fields_ = (*((name, _ADDRESS) for name in ("keys", "values", "key_scales", "value_scales")), ("token_bytes", _INT))


class AttentionArguments(Arguments):
    """Arguments of causal attention over a KV cache."""

    code = OpCode.ATTENTION
    _fields_ = (
        *((name, _ADDRESS) for name in ("query", "out", "step")),
        ("kv", KvAddresses),
        *((name, _INT) for name in ("query_stride", "out_stride", "heads", "kv_heads", "head_dim", "window", "wide")),
        *((name, _FLOAT) for name in ("scale", "softcap")),
        *((name, _ADDRESS) for name in ("sinks", "slopes")),
    )


class TextAttentionArguments(Arguments):
    """Arguments of attention within packed texts, without a KV cache."""

    code = OpCode.TEXT_ATTENTION
    _fields_ = (
        *((name, _ADDRESS) for name in ("query", "key", "value", "out", "texts", "bias")),
        *(
            (name, _INT)
            for name in ("stride", "out_stride", "heads", "kv_heads", "head_dim", "before", "after", "most", "wide")
        ),
        *((name, _FLOAT) for name in ("scale", "softcap")),
        *((name, _ADDRESS) for name in ("sinks", "slopes")),
    )


class RopeArguments(Arguments):
    """Arguments of per-head norms, RoPE and the KV cache write."""

    code = OpCode.ROPE
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "query_norm", "key_norm", "cos", "sin", "written")),
        ("kv", KvAddresses),
        *((name, _INT) for name in ("stride", "rows", "heads", "kv_heads", "head_dim", "dim", "wide")),
        ("eps", _FLOAT),
        ("scales", _ADDRESS),
        *((name, _INT) for name in ("own_weights", "subtracts_mean", "norm_last")),
        ("value_norm", _ADDRESS),
        ("norm_bias", _INT),
    )


class PackIntArguments(ctypes.Structure):
    """The arguments of `armature_pack_int` (csrc/pack_int.c), which is not an operation."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("codes", "scales", "others", "panels")),
        *((name, _INT) for name in ("outputs", "first", "padded", "group", "bits", "header")),
    )


class Int4ScalesArguments(Arguments):
    """Arguments of the search for the scales of four-bit weights."""

    code = OpCode.INT4_SCALES
    _fields_ = (
        *((name, _ADDRESS) for name in ("values", "divisors", "scales")),
        *((name, _INT) for name in ("groups", "group", "candidates")),
    )


class Int4GptqArguments(Arguments):
    """Arguments of rounding a block of inputs of a four-bit weight by GPTQ."""

    code = OpCode.INT4_GPTQ
    _fields_ = (
        *((name, _ADDRESS) for name in ("weight", "scales", "root", "order", "codes")),
        *((name, _INT) for name in ("inputs", "outputs", "groups", "group", "stride", "root_stride", "code_stride")),
    )


class LinearFp32Arguments(Arguments):
    """Arguments of the product with a weight in fp32 panels, or in bf16 panels that are widened."""

    code = OpCode.LINEAR_FP32
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "panels", "bias", "tiles", "y")),
        *((name, _INT) for name in ("x_stride", "y_stride", "rows", "inputs", "outputs", "output", "activation")),
        *((name, _INT) for name in ("narrow_x", "narrow_panels")),
    )


class TopElementsArguments(Arguments):
    """Arguments of the selection of each row's top elements."""

    code = OpCode.TOP_ELEMENTS
    _fields_ = (
        *((name, _ADDRESS) for name in ("logits", "values", "ids", "logsumexp", "scratch", "allowed")),
        *((name, _INT) for name in ("stride", "rows", "outputs", "k", "allowed_stride")),
        ("softcap", _FLOAT),
    )


MAX_LORA_PARTS = 3


class LoraArguments(Arguments):
    """Arguments of the products of LoRA adapters, which are added to the rows of a product."""

    code = OpCode.LORA
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "tiles", "scales", "y", "parts", "step", "shrunk")),
        *((name, _INT) for name in ("x_stride", "y_stride", "rows", "inputs", "padded", "group", "height")),
        *((name, _INT) for name in ("num_parts", "max_rank", "wide_x", "wide_y", "wide_weights")),
        *((name, _INT * MAX_LORA_PARTS) for name in ("first_outputs", "outputs")),
    )


class RouteArguments(Arguments):
    """Arguments of the selection of each row's experts."""

    code = OpCode.ROUTE
    _fields_ = (
        *((name, _ADDRESS) for name in ("logits", "bias", "ids", "weights")),
        *((name, _INT) for name in ("stride", "rows", "experts", "k", "scoring", "renormalise", "groups")),
        *((name, _INT) for name in ("best_groups", "rating")),
        *((name, _FLOAT) for name in ("scale", "epsilon", "jitter")),
        ("factors", _ADDRESS),
    )


class ExpertWeights(ctypes.Structure):
    """The structure `expert_weights` of csrc/ops.h: one product of all experts."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("panels", "biases")),
        *((name, _INT) for name in ("outputs", "inputs", "form", "group", "header", "wide_from", "fixed")),
        *((name, _INT) for name in ("narrow_panels", "shared")),
    )


class ExpertsArguments(Arguments):
    """Arguments of adding the experts of each row to the residual stream."""

    code = OpCode.EXPERTS
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "hidden", "ids", "weights", "scratch")),
        *((name, ExpertWeights) for name in ("gate_up", "down")),
        *((name, _INT) for name in ("x_stride", "hidden_stride", "rows", "experts", "k", "wide", "activation")),
        ("scales_inputs", _INT),
    )


class LatentArguments(Arguments):
    """Arguments of arranging queries, keys and values of multi-head latent attention as rows of heads."""

    code = OpCode.LATENT
    _fields_ = (
        *((name, _ADDRESS) for name in ("queries", "others", "rotated_keys", "out")),
        *((name, _INT) for name in ("query_stride", "other_stride", "key_stride", "rows", "heads")),
        *((name, _INT) for name in ("plain", "rotated", "value", "interleaved", "wide")),
    )


class AltUpArguments(Arguments):
    """Arguments of mixing the streams of each row, before a layer or with its result."""

    code = OpCode.ALTUP
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "logits", "weights", "activated", "factors")),
        *((name, _INT) for name in ("stride", "rows", "size", "streams")),
        ("scale", _FLOAT),
        ("out", RowSink),
    )


class MatchArguments(Arguments):
    """Arguments of scaling rows to the magnitude of other rows."""

    code = OpCode.MATCH
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "like", "out")),
        *((name, _INT) for name in ("stride", "like_stride", "out_stride", "rows", "size", "wide", "add")),
        ("floor", _FLOAT),
    )


class RecurInputsArguments(Arguments):
    """Arguments of the short convolution before a recurrence, and of its decays and factors."""

    code = OpCode.RECUR_INPUTS
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "steps", "betas", "step", "out", "scales", "states", "kept")),
        *((name, _ADDRESS) for name in ("filters", "bias", "rates", "step_bias")),
        *((name, _INT) for name in ("x_stride", "step_stride", "slot_stride", "channels", "heads", "width")),
        *((name, _INT) for name in ("wide", "wide_steps", "gated")),
        *((name, _FLOAT) for name in ("least", "most", "step_scale", "beta_scale")),
    )


class RecurArguments(Arguments):
    """Arguments of the gated delta rule and of Mamba-2."""

    code = OpCode.RECUR
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "scales", "skips", "step", "out", "states")),
        *((name, _INT) for name in ("slot_stride", "channels", "query", "key", "value", "heads", "key_heads")),
        *((name, _INT) for name in ("key_size", "value_size", "delta", "by_token")),
    )


class GatedNormArguments(Arguments):
    """Arguments of a norm times a gate."""

    code = OpCode.GATED_NORM
    _fields_ = (
        *((name, _ADDRESS) for name in ("x", "gate", "weight")),
        *((name, _INT) for name in ("x_stride", "gate_stride", "rows", "size", "group", "weights")),
        *((name, _INT) for name in ("gate_first", "sigmoid", "wide", "wide_gate")),
        *((name, _FLOAT) for name in ("eps", "gate_scale")),
        ("out", RowSink),
    )


class RowCountAddress(ctypes.Structure):
    """The structure `row_place` of csrc/ops.h."""

    _fields_ = (("word", _ADDRESS), ("which", _INT), ("is_height", _INT))


class TextBuffers(ctypes.Structure):
    """The structure `text_words` of csrc/ops.h."""

    _fields_ = tuple((name, _ADDRESS) for name in ("token_ids", "positions", "types", "wanted", "texts"))


class LaneOperations(ctypes.Structure):
    """The structure `text_steps` of csrc/ops.h."""

    _fields_ = (
        ("words", TextBuffers),
        ("hidden", _ADDRESS),
        ("operations", _ADDRESS),
        ("count", _INT),
        ("places", _ADDRESS),
        ("num_places", _INT),
    )


class LanesArguments(ctypes.Structure):
    """The arguments of `armature_run_lanes` (csrc/lanes.c), which is not an operation."""

    _fields_ = (
        ("batch", TextBuffers),
        *((name, _ADDRESS) for name in ("hidden", "texts", "wanted", "steps")),
        *((name, _INT) for name in ("count", "together", "threads", "size")),
    )
