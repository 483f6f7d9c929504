"""The same GGUF file gives the same greedy text as in llama.cpp, and a mixture of experts the same logits."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from app.text.tokenizer import Tokenizer
from gguf_files import GROUPED, write_gguf, write_mixture
from gguf_hybrids import HYBRIDS, write_hybrid
from loaded_models import load
from mxfp4_files import write_mxfp4, write_mxfp4_gguf
from reference_attention import PlainAttend, context_of
from tiny_checkpoints import MIXTURES

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"),
]
TEXTS = ("the weather in the town", "an even and another one")
NUM_TOKENS = 16


@torch.inference_mode()
def greedy(file: Path, ids: list[int]) -> list[int]:
    model, made = load(file, "float32"), list(ids)
    for _ in range(NUM_TOKENS):
        made.append(int(model(context_of(made, PlainAttend())).float()[-1].argmax()))
    return made[len(ids) :]


@pytest.mark.parametrize("text", TEXTS)
def test_greedy_text_is_the_same(tmp_path: Path, text: str) -> None:
    # llama.cpp wants as many tokens as the embedding has rows. Of quantized weights it rounds activations.
    file = write_gguf(tmp_path, vocab_size=270, **GROUPED)
    ids = Tokenizer(file).encode(text)
    llama = import_module("llama_cpp").Llama(str(file), n_ctx=128, n_threads=1, type_k=0, type_v=0, verbose=False)
    assert llama.tokenize(text.encode(), add_bos=True, special=True) == ids
    theirs = []
    for token in llama.generate(ids, temp=0.0, repeat_penalty=1.0):
        theirs.append(token)
        if len(theirs) == NUM_TOKENS:
            break
    assert greedy(file, ids) == theirs


def llama_logits(file: Path, prompt: list[int]) -> torch.Tensor:
    """llama.cpp's logits [tokens, vocab] of a prompt."""
    llama = import_module("llama_cpp").Llama(
        str(file), n_ctx=64, n_batch=64, n_threads=1, logits_all=True, type_k=0, type_v=0, verbose=False
    )
    llama.eval(prompt)
    return torch.tensor(llama.scores[: len(prompt)])


@pytest.mark.parametrize("architecture", MIXTURES)
@torch.inference_mode()
def test_logits_of_a_mixture_are_the_same(tmp_path: Path, architecture: str) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    file, prompt = write_mixture(tmp_path, architecture, vocab_size=270, **sizes), list(range(5, 29))
    ours = load(file, "float32")(context_of(prompt, PlainAttend())).float()
    torch.testing.assert_close(ours, llama_logits(file, prompt), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", HYBRIDS)
@torch.inference_mode()
def test_logits_of_a_hybrid_are_the_same(tmp_path: Path, name: str) -> None:
    file, prompt = write_hybrid(tmp_path, name), list(range(5, 29))
    ours = load(file, "float32")(context_of(prompt, PlainAttend())).float()
    difference = (llama_logits(file, prompt) - ours).abs().max() / ours.abs().max()
    # llama.cpp reads GELU from a table of 16-bit numbers, which is 5e-4 of the first token's logits.
    assert difference < (5e-3 if name.startswith("gemma4") else 1e-4)


@pytest.mark.parametrize("kind", ["F32", "MXFP4"])
@torch.inference_mode()
def test_logits_of_gpt_oss_are_the_same(tmp_path: Path, kind: str) -> None:
    packed, _ = write_mxfp4(tmp_path, vocab_size=270)
    file, prompt = write_mxfp4_gguf(packed, tmp_path / "tiny.gguf", kind), list(range(5, 29))
    ours = load(file, "float32")(context_of(prompt, PlainAttend())).float()
    difference = (llama_logits(file, prompt) - ours).norm() / ours.norm()
    assert difference < (1e-5 if kind == "F32" else 0.03)  # llama.cpp rounds activations that meet codes
