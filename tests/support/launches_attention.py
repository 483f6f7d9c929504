"""Launches of the attention kernels, which tests/support/compiled_kernels.py compiles for absent GPUs."""

from __future__ import annotations

import torch

from armature_kernels.attention.attention import KvRows, QkvHeads, token_bytes, view_kv_rows
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import PackedTexts
from armature_kernels.triton.attention import attend_decodes
from armature_kernels.triton.prompts import attend_packed, attend_prompts, gather_fresh_kv
from paged_steps import NOWHERE, Shape, alone, made_step

_HERE = torch.device("cpu")
_GEMMA = AttentionSpec(0.1, window=512, softcap=50.0)


def _in_int8(shape: Shape, kv: KvRows) -> KvRows:
    size = token_bytes(shape.kv_heads, shape.head_dim, torch.int8)
    memory = torch.zeros((len(kv.keys), size), dtype=torch.uint8)
    return view_kv_rows(memory, shape.kv_heads, shape.head_dim, torch.int8)


def _decode(
    shape: Shape,
    sequences: int,
    spec: AttentionSpec,
    is_int8: bool = False,
    normed: bool = False,
    dim: int | None = None,
) -> None:
    """Launch decodes with RoPE of `dim` elements, all by default."""
    query, kv, step = made_step(shape, [(1, 3)] * sequences, sequences, _HERE)
    kv = _in_int8(shape, kv) if is_int8 else kv
    product = torch.zeros((sequences, (shape.heads + 2 * shape.kv_heads) * shape.head_dim), dtype=shape.dtype)
    angle = torch.zeros(sequences, 1, shape.head_dim if dim is None else dim)
    norms = (torch.zeros(shape.head_dim),) * 2 if normed else (None, None)
    sizes = (shape.heads, shape.kv_heads, shape.head_dim)
    heads = QkvHeads(
        product, *sizes, *norms, 1e-6, (angle, angle), value_norm=norms[0] if shape.head_dim > 256 else None
    )
    out, written = torch.empty(query.shape, dtype=query.dtype), torch.zeros(sequences, dtype=torch.int64)
    attend_decodes(heads, kv, written, step, spec, out)


def _prompt(shape: Shape, spec: AttentionSpec, is_int8: bool = False) -> None:
    query, kv, step = made_step(shape, [(1, 3), (5, 9)], 1, _HERE)
    kv = _in_int8(shape, kv) if is_int8 else kv
    attend_prompts(query, kv, step, spec, torch.empty(query.shape, dtype=query.dtype))


def _texts(shape: Shape, spec: AttentionSpec) -> None:
    product = torch.zeros((8, shape.heads + 2 * shape.kv_heads, shape.head_dim), dtype=shape.dtype)
    query, key, value = product.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    attend_packed(query, key, value, PackedTexts(torch.tensor([0, 8], dtype=torch.int32), 8), spec)


def launch_decode_64() -> None:
    _decode(Shape(32, 8, 64, torch.bfloat16), 1, AttentionSpec(0.1))


def launch_decode_128() -> None:
    _decode(Shape(32, 8, 128, torch.bfloat16), 64, AttentionSpec(0.1))


def launch_decode_128_int8() -> None:
    _decode(Shape(32, 8, 128, torch.bfloat16), 64, AttentionSpec(0.1), is_int8=True)


def launch_prompt_128_int8() -> None:
    _prompt(Shape(32, 8, 128, torch.bfloat16), AttentionSpec(0.1), is_int8=True)


def launch_decode_128_normed() -> None:
    """Qwen3, one sequence and many."""
    _decode(Shape(32, 8, 128, torch.bfloat16), 1, AttentionSpec(0.1), normed=True)
    _decode(Shape(32, 8, 128, torch.bfloat16), 64, AttentionSpec(0.1), is_int8=True, normed=True)


def launch_decode_80_partly_rotated() -> None:
    _decode(Shape(32, 32, 80, torch.float16), 4, AttentionSpec(0.1), dim=32)


def launch_decode_of_written_keys() -> None:
    query, kv, step = made_step(Shape(32, 8, 128, torch.bfloat16), [(1, 3)], 1, _HERE)
    attend_decodes(alone(query), kv, NOWHERE, step, AttentionSpec(0.1), torch.empty(query.shape, dtype=query.dtype))


def launch_decode_256() -> None:
    _decode(Shape(4, 1, 256, torch.bfloat16), 1, _GEMMA)


def launch_decode_512_normed() -> None:
    """Gemma 4, whose values have norms too."""
    _decode(Shape(8, 1, 512, torch.bfloat16), 4, AttentionSpec(0.1), normed=True)


def launch_decode_8() -> None:
    """The heads of the tests' tiny models."""
    _decode(Shape(4, 2, 8), 3, AttentionSpec(0.1))


def launch_prompt_8() -> None:
    _prompt(Shape(4, 2, 8), AttentionSpec(0.1))


def launch_decode_fp32() -> None:
    _decode(Shape(32, 8, 128), 4, AttentionSpec(0.1))


def launch_prompt_fp32() -> None:
    _prompt(Shape(32, 8, 64), AttentionSpec(0.1))


def launch_prompt_64() -> None:
    _prompt(Shape(32, 8, 64, torch.bfloat16), AttentionSpec(0.1))


def launch_prompt_128() -> None:
    _prompt(Shape(32, 8, 128, torch.bfloat16), AttentionSpec(0.1))


def launch_prompt_256() -> None:
    _prompt(Shape(4, 1, 256, torch.bfloat16), _GEMMA)


def launch_fresh_rows() -> None:
    _, kv, step = made_step(Shape(32, 8, 64, torch.bfloat16), [(9, 9)], 0, _HERE)
    gather_fresh_kv(kv, step, 9)


def launch_texts_with_distances() -> None:
    bias = torch.zeros((12, 257))
    _texts(Shape(12, 12, 64, torch.bfloat16), AttentionSpec(0.1, bidirectional=True, distance_bias=bias))
