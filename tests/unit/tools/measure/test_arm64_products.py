"""Which library multiplied: read from oneDNN's own lines."""

from __future__ import annotations

from tools.measure.arm64_products import implementations

OUTPUT = """onednn_verbose,v1,info,oneDNN v3.7.1
onednn_verbose,v1,primitive,exec,cpu,matmul,gemm:acl,undef,before any product
product float32 ×1
product bfloat16 ×64
onednn_verbose,v1,primitive,create:dispatch,matmul,cpu,matmul,lowp_gemm:acl,undef,unsupported datatype combination
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:bf16::blocked:ba::f0,attr-scratchpad:user,,256x512,7.39
onednn_verbose,v1,primitive,exec,cpu,matmul,gemm:acl,undef,src:bf16::blocked:ab::f0,attr-scratchpad:user,,64x256:256x512,772
product float16 ×1
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:f16::blocked:ba::f0,attr-scratchpad:user,,256x512,7.39
"""


def test_only_products_that_ran_count() -> None:
    assert implementations(OUTPUT) == {
        "float32 ×1": "not oneDNN",
        "bfloat16 ×64": "oneDNN, gemm:acl",
        "float16 ×1": "not oneDNN",
    }
