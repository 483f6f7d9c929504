"""torch.compile beside torch's eager execution, on steps written in PyTorch's own operations.

The steps are a Llama-like decoder's and a BERT-like encoder's, with random weights of the checkpoint's shapes, and the
graph of an exported program. Shapes are fixed and projections are fused, which is the best case for a compiler: serving
would have to compile for each number of rows. Kernels that are called natively cannot be part of such a graph.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.engine.program import synthetic_inputs
from app.models.decoders.config import ModelConfig
from app.models.encoders.config import EncoderConfig
from app.weights.open import OpenedModel
from app.weights.program import ProgramCheckpoint
from armature_bench.console import Figure, percentile
from armature_kernels.elementwise.activations import ACTIVATIONS

EAGER, COMPILED = "torch eager", "torch.compile"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONTEXT_TOKENS = 64  # of each sequence of a decode step
TEXT_TOKENS = 128  # of each text of an encoder
STEPS = 20
_COMPILERS = ("g++", "clang++", "c++")
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class TorchStep:
    """A step of `rows` rows that torch can trace; `name` is its dtype."""

    name: str
    rows: int
    module: Callable[..., object]
    inputs: Sequence[Tensor]


class DecodeStep(nn.Module):
    """One decode step of a Llama-like model: ids [rows], keys and values [layers, rows, heads, tokens, size]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.activation = config, ACTIVATIONS[config.activation]
        hidden, kv, heads = (
            config.hidden_size,
            config.num_kv_heads * config.head_dim,
            config.num_heads * config.head_dim,
        )
        inner = config.intermediate_size
        sizes = ((hidden, heads + 2 * kv), (heads, hidden), (hidden, 2 * inner), (inner, hidden))
        self.layers = nn.ModuleList(
            nn.ModuleList(_linear(*size, dtype) for size in sizes) for _ in range(config.num_layers)
        )
        self.embedding = nn.Embedding(config.vocab_size, hidden, dtype=dtype)
        self.norm = nn.RMSNorm(hidden, dtype=dtype)

    def forward(self, ids: Tensor, angles: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary]."""
        config = self.config
        x: Tensor = self.embedding(ids)
        kv, groups = config.num_kv_heads, config.num_heads // config.num_kv_heads
        for index, layer in enumerate(self.layers):
            qkv, out, gate_up, down = cast("Sequence[nn.Linear]", layer)
            parts = qkv(self.norm(x)).view(len(ids), -1, config.head_dim)
            query, key, value = parts.split((config.num_heads, kv, kv), 1)
            query, key = _rotate(query, angles), _rotate(key, angles)
            all_keys = torch.cat((keys[index], key[:, :, None]), 2).repeat_interleave(groups, 1)
            all_values = torch.cat((values[index], value[:, :, None]), 2).repeat_interleave(groups, 1)
            attended = F.scaled_dot_product_attention(query[:, :, None], all_keys, all_values)
            x = x + out(attended.reshape(len(ids), -1))
            gate, up = gate_up(self.norm(x)).chunk(2, -1)
            x = x + down(self.activation(gate) * up)
        return F.linear(self.norm(x), self.embedding.weight)


class EncodeStep(nn.Module):
    """One step of a BERT-like model: ids [texts, tokens] to vectors [texts, tokens, hidden]."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, hidden, inner = config, config.hidden_size, config.intermediate_size
        sizes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden))
        self.layers = nn.ModuleList(
            nn.ModuleList(_linear(*size, dtype) for size in sizes) for _ in range(config.num_layers)
        )
        self.embedding, self.norm = (
            nn.Embedding(config.vocab_size, hidden, dtype=dtype),
            nn.LayerNorm(hidden, dtype=dtype),
        )

    def forward(self, ids: Tensor) -> Tensor:
        config = self.config
        x: Tensor = self.norm(self.embedding(ids))
        for layer in self.layers:
            qkv, out, up, down = cast("Sequence[nn.Linear]", layer)
            parts = qkv(x).view(*ids.shape, 3, config.num_heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
            x = self.norm(x + out(attended.transpose(1, 2).flatten(2)))
            x = self.norm(x + down(F.gelu(up(x))))
        return x


def _linear(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=dtype)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def missing_compiler() -> str | None:
    """Return a sentence if torch.compile cannot work here, because no C++ compiler is found; else None."""
    named = os.environ.get("CXX")
    if any(shutil.which(name) for name in ([named] if named else _COMPILERS)):
        return None
    where = f"CXX={named} is not found" if named else f"none of {', '.join(_COMPILERS)} is on the PATH"
    return f"torch.compile was not measured: it needs a C++ compiler at run time, and {where}."


def torch_steps(checkpoint: OpenedModel, rows: Sequence[int], dtypes: Sequence[str]) -> Iterator[TorchStep]:
    """Yield the steps of a checkpoint's kind in these dtypes of `DTYPES`; an exported program has its own dtype."""
    if isinstance(checkpoint, ProgramCheckpoint):
        module = torch.export.load(str(checkpoint.path)).module()
        for count in rows:
            named = synthetic_inputs(checkpoint.signature, count)
            yield TorchStep("program", count, module, [named[spec.name] for spec in checkpoint.signature.inputs])
        return
    for name in dtypes:
        dtype = DTYPES[name]
        if checkpoint.kind == "encoder":
            encoder = EncodeStep(checkpoint.encoder, dtype)
            for count in rows:
                yield TorchStep(name, count, encoder, [torch.randint(0, 100, (count, TEXT_TOKENS))])
            continue
        config, decoder = checkpoint.decoder, DecodeStep(checkpoint.decoder, dtype)
        for count in rows:
            cache = torch.randn(config.num_layers, count, config.num_kv_heads, CONTEXT_TOKENS, config.head_dim).to(
                dtype
            )
            inputs = [torch.randint(0, 100, (count,)), torch.rand(count, 1, config.head_dim // 2), cache, cache]
            yield TorchStep(name, count, decoder, inputs)


def measure_torch_steps(steps: Iterator[TorchStep], rounds: int, can_compile: bool) -> Iterator[Figure]:
    """Yield, for each step, its milliseconds in eager and compiled execution, by turns, and the seconds to compile.

    Without a compiler only eager execution is measured.
    """
    for step in steps:
        modules, parts = {EAGER: step.module}, dict[str, float]()
        if can_compile:
            modules[COMPILED], parts["seconds to compile"] = _compiled(step)
        found: dict[str, list[float]] = {how: [] for how in modules}
        for _ in range(rounds):
            for how, module in modules.items():
                found[how] += _seconds(module, step.inputs)
        eager = statistics.median(found[EAGER])
        for how, seconds in found.items():
            middle = statistics.median(seconds)
            yield Figure(
                f"step ×{step.rows}, {step.name}, {how}", middle * 1e3, "ms", p99=percentile(seconds, 0.99) * 1e3,
                ratio=eager / middle, against=EAGER, parts=parts if how == COMPILED else {},
            )  # fmt: skip


def _compiled(step: TorchStep) -> tuple[Callable[..., object], float]:
    """Return the compiled module of a step, and how many seconds its first call took."""
    torch.compiler.reset()
    module: Callable[..., object] = torch.compile(step.module, fullgraph=True, dynamic=False)
    began = time.perf_counter()
    module(*step.inputs)
    return module, time.perf_counter() - began


def _seconds(step: Callable[..., object], inputs: Sequence[Tensor]) -> list[float]:
    """Time steps; the first is not counted, since it reloads what the other execution evicted from the caches."""
    seconds = []
    for _ in range(STEPS + 1):
        began = time.perf_counter()
        step(*inputs)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]
