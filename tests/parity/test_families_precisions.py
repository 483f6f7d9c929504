"""Families in every precision: steps are native, replayed ones say what eager ones say, and the weights are the right ones.

One family for each feature of a layer: the order of stored rows, the norms, the MLP, the positions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load
from reference_attention import PlainAttend, context_of
from served_families import SERVED, VARIANTS, prompt_of, write_family
from tests.parity.test_engine_replay import BEST, MAX_LEN, served
from tiny_checkpoints import write_tokenizer

pytestmark = pytest.mark.skipif(not has_kernel(OpCode.ROPE), reason="no native kernels here")
FEATURES = {
    "GPT2LMHeadModel": "transposed weights, learned positions, LayerNorm, plain MLP",
    "falcon-new": "fused rows by groups, two norms side by side",
    "FalconForCausalLM": "one key/value head",
    "PhiForCausalLM": "a bias of the logits, partial rotation, one norm for two branches",
    "Olmo2ForCausalLM": "norms after branches, a norm of all heads together",
    "OlmoForCausalLM": "a norm without weights",
    "CohereForCausalLM": "interleaved rotation, a LayerNorm for each head, scaled logits",
    "HunYuanDenseV1ForCausalLM": "a norm after the rotation",
    "GraniteForCausalLM": "multipliers",
    "Glm4ForCausalLM": "norms around branches, fused gates, interleaved partial rotation",
    "NemotronForCausalLM": "LayerNorm of weight + 1, squared ReLU",
    "ApertusForCausalLM": "xIELU",
    "OPTForCausalLM": "positions from the second row on",
    "MiniCPM3ForCausalLM": "latent attention",
    "youtu-queries": "latent attention without a short row of queries, interleaved rotation",
    "Lfm2ForCausalLM": "short convolutions",
    "GptOssForCausalLM": "sinks, experts with biases and clamped gates",
    "phimoe-all-experts": "experts by sparsemixer, of which another one would change much, LayerNorm, biases",
    "Ernie4_5_MoeForCausalLM": "experts with a bias of their selection, interleaved rotation",
    "GraniteMoeSharedForCausalLM": "a fused shared expert",
    "Cohere2MoeForCausalLM": "experts beside attention, a shared expert that counts half",
    "FlexOlmoForCausalLM": "experts before a norm",
    "CodeGenForCausalLM": "fused rows by quarters",
    "NanoChatForCausalLM": "norms without weights, of embeddings and heads too, rotated backwards",
    "XGLMForCausalLM": "computed positions",
    "BloomForCausalLM": "ALiBi, a norm of embeddings",
    "Gemma3nForCausalLM": "several hidden states, lowered gates, inputs for each layer, keys that layers share",
    "Gemma4ForCausalLM": "larger heads in some layers, keys that layers share, inputs for each layer, factors of layers",
    "gemma4-moe": "experts beside an MLP with norms of their own, keys that are values",
    "AfmoeForCausalLM": "gates of attention in a product of their own",
    "nemotron-h-moe": "one branch for each layer, experts without gates",
    "FalconH1ForCausalLM": "attention beside a state, factors of weights",
    "OlmoHybridForCausalLM": "norms before the branches of some layers and after others'",
    "MptForCausalLM": "ALiBi, LayerNorm without biases",
}
CASES = {name: (name, values) for name, values in SERVED.items()} | dict(VARIANTS)
FAST = {
    ("GPT2LMHeadModel", "int4"),
    ("Olmo2ForCausalLM", "int8"),
    ("CohereForCausalLM", "float32"),
    ("Lfm2ForCausalLM", "bfloat16"),
    ("GptOssForCausalLM", "bfloat16"),
    ("Gemma3nForCausalLM", "int4"),
    ("gemma4-moe", "bfloat16"),
}
CLOSENESS = {"float32": 0.99999, "bfloat16": 0.999, "int8": 0.99, "int4": 0.75}  # cosine of logits with FP32's


def written(name: str, directory: Path) -> Path:
    architecture, values = CASES[name]
    write_family(directory, architecture, values)
    write_tokenizer(directory)
    return directory


@pytest.mark.cases(test=1, ci=4)
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (name, precision) if (name, precision) in FAST else pytest.param(name, precision, marks=pytest.mark.nightly)
        for name in FEATURES
        for precision in CLOSENESS
    ],
)
@torch.inference_mode()
def test_every_step_is_native_and_says_the_same(name: str, precision: str, tmp_path: Path) -> None:
    directory, prompt = written(name, tmp_path), prompt_of(24)
    exact = load(directory, "float32", max_model_len=MAX_LEN)(context_of(prompt, PlainAttend()))
    model = load(directory, precision, max_model_len=MAX_LEN)
    found = model(context_of(prompt, PlainAttend())).float()
    assert torch.cosine_similarity(found.flatten(), exact.flatten(), dim=0) > CLOSENESS[precision]

    kv = torch.float32 if precision == "float32" else torch.bfloat16
    eager, _ = served(model, False, BEST, kv)
    replayed, replay = served(model, True, BEST, kv)
    assert replay.reason == "" and replayed == eager
    # Others are only the steps that are recorded, and the very first, which allocates scratch memory.
    assert replay.num_steps - replay.num_replays == len(replay.recorded) + 1
    assert replay.num_replays > 20
