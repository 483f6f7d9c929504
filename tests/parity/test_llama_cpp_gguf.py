"""The same GGUF file gives the same greedy text as in llama.cpp, and a mixture of experts the same logits."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from app.text.tokenizer import Tokenizer
from gguf_files import GROUPED, write_gguf, write_mixture
from loaded_models import load
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


@pytest.mark.parametrize("architecture", MIXTURES)
@torch.inference_mode()
def test_logits_of_a_mixture_are_the_same(tmp_path: Path, architecture: str) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    file, prompt = write_mixture(tmp_path, architecture, vocab_size=270, **sizes), list(range(5, 29))
    llama = import_module("llama_cpp").Llama(
        str(file), n_ctx=64, n_batch=64, n_threads=1, logits_all=True, type_k=0, type_v=0, verbose=False
    )
    llama.eval(prompt)
    ours = load(file, "float32")(context_of(prompt, PlainAttend())).float()
    torch.testing.assert_close(ours, torch.tensor(llama.scores[: len(prompt)]), atol=1e-4, rtol=0.0)
