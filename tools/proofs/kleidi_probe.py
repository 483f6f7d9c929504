"""Report the int4 form of the layers and the operator that multiplies them, in the image without our library."""

import json
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from app.engine.build import BuildRequest
from app.engine.decoder.build import build_decoder_engine
from app.messages import Generate, SamplingParams
from app.server.prepare import prepare
from app.settings import load_settings
from app.weights.open import require_checkpoint
from armature_kernels.linear.linear import Linear
from armature_kernels.linear.quantization import quantize_int4
from armature_kernels.linear.torchao_config import KLEIDI_INT4
from armature_kernels.linear.torchao_linear import TorchaoFactory, TorchaoLinear

OPERATOR = "aten::_dyn_quant_matmul_4bit"
TOKENS = 3


def engine_run() -> dict[str, object]:
    prepared = prepare(load_settings(precision="int4", calibrate="off", compile="off", speculation="off")[0])
    built = build_decoder_engine(BuildRequest(require_checkpoint(prepared.checkpoint), prepared.plan))
    layers = [layer.form for layer in built.model.modules() if isinstance(layer, Linear)]
    weights = [form.module.weight if isinstance(form, TorchaoLinear) else form for form in layers]
    forms = Counter(type(weight).__name__ for weight in weights)
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    built.engine.add(Generate("proof", (5, 283, 441), params, 0.0))
    steps = 0
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        while built.engine.has_work:
            built.engine.step()
            steps += 1
    products = sum(event.count for event in watched.key_averages() if event.key == OPERATOR)
    return {"forms": dict(forms), "layers": sum(forms.values()), "steps": steps, "products": products}


def one_product() -> dict[str, object]:
    torch.manual_seed(0)
    weight, rows = torch.randn(256, 192), torch.randn(5, 192)
    form = TorchaoFactory(KLEIDI_INT4[32]).pack(weight, None)
    plain_weight = TorchaoFactory(KLEIDI_INT4[32].replace("opaque_aten_kleidiai", "unpacked_to_int8")).pack(
        weight, None
    )
    # The weights that KleidiAI multiplies, read back by rows of one element. Processors with BF16 instructions round a
    # few codes that lie near the middle the other way than torch, so torch's codes are no reference for its products.
    held = form.multiply(torch.eye(192)).T
    rounding = (held - weight).abs().max() / (plain_weight.module.weight.dequantize().float() - weight).abs().max()
    exact = rows @ held.T
    error = (form.multiply(rows) - exact).abs().max() / exact.abs().max()
    # KleidiAI does not support FP32 scales per group; torch then uses its own loop.
    codes = quantize_int4(weight, 64, zero_points=False)
    pairs = codes.codes[:, 1::2] << 4 | codes.codes[:, ::2]
    plain = torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, codes.scales.float(), None, 64, 192, 256)
    return {
        "packed": str(form.module.weight.packed_weights.dtype),
        "reference": str(plain.dtype),
        "error": float(error),
        "rounding": float(rounding),
    }


print(json.dumps(engine_run() | one_product()))
