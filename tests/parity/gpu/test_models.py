"""Whole models with the Triton kernels give the tokens of the references; also counts the kernels per token and layer,
because small models wait for launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

triton = pytest.importorskip("triton", reason="Triton is not installed")
from armature_kernels.attention.attention import KvRows, QkvHeads, token_bytes, view_kv_rows
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import PagedStep
from armature_kernels.elementwise import activations, embedding, rope
from armature_kernels.elementwise import norms as layer_norm
from armature_kernels.elementwise import norms as rowwise
from armature_kernels.linear.device import DeviceForm
from armature_kernels.linear.linear import Linear
from armature_kernels.triton import attention, elementwise
from armature_kernels.triton.prompts import attend_prompts
from device_engine import MAX_LEN, DeviceServed, Said, prompt_of, request_of
from loaded_models import load
from simulated_device import SimulatedDeviceBackend
from tiny_checkpoints import write_checkpoint

only_interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/device has this on the GPU itself")
REQUESTS = [
    request_of("greedy", prompt_of(5, 1), temperature=0.0, max_tokens=3),
    request_of("seeded", prompt_of(3, 2), seed=3, max_tokens=2),
]


class TritonSimulatedDevice(SimulatedDeviceBackend):
    """Attends by Triton's kernels."""

    def attention(self, query: Tensor, kv: KvRows, step: PagedStep, spec: AttentionSpec) -> Tensor:
        out = torch.zeros(query.shape, dtype=query.dtype)
        if step.num_decodes:
            attention.attend_decodes(query, kv, step, spec, out)
        if len(query) > step.num_decodes:
            attend_prompts(query, kv, step, spec, out)
        return out


@contextmanager
def by_triton() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (activations, layer_norm, rowwise, embedding, rope):
            patch.setattr(module, "triton_usable", lambda tensor: True)
            patch.setattr(module, "has_kernel", lambda code: False)
        patch.setattr(attention, "_TARGET_PROGRAMS", 2)  # in the interpreter they run one after the other
        yield


def said(model: Any, backend: SimulatedDeviceBackend) -> Said:
    return DeviceServed(model, backend).add(*REQUESTS).finish().said


@pytest.mark.full
@only_interpreted
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "SmolLM3ForCausalLM", "Gemma2ForCausalLM"])
def test_a_model_says_what_the_references_say(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, seed=11)
    model = load(tmp_path, max_model_len=MAX_LEN, device="cuda")
    expected = said(model, SimulatedDeviceBackend(torch.float32))
    with by_triton():
        found = said(model, TritonSimulatedDevice(torch.float32))
    assert found == expected
    assert sorted(len(ids) for ids in found.values()) == [2, 3]


@dataclass
class Launches(TorchDispatchMode):
    """Counts what a GPU would be asked to run: launches of Triton's, and torch's operators but those that only describe memory."""

    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket.__name__ not in ("empty", "_unsafe_view", "detach", "alias"):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def launched(self, kernel: Any) -> None:
        self.names.append(kernel.fn.__name__)


@contextmanager
def counting() -> Iterator[Launches]:
    counts = Launches()
    kind = type(elementwise._rms_norm)
    plain = kind.run

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        counts.launched(kernel)
        with _disable_current_modes():  # what the interpreter does is no launch
            return plain(kernel, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "run", counted)
        with counts:
            yield counts


# Of one token in one layer, beside its attention, which is one launch, or two where the context is cut into parts. On a GPU the products
# of BF16 weights add to the stream themselves, which takes away both `add_`.
LLAMA = "_rms_norm mm _apply_rope mm add_ _rms_norm mm _gate mm add_"
GEMMA = "_rms_norm mm _apply_rope mm _add_rms_norm _rms_norm mm _gate mm _add_rms_norm"
# The same with the kernel for few rows.
FEW_LLAMA = "_multiply_few _apply_rope _multiply_few _multiply_few _multiply_few"
FEW_GEMMA = "_multiply_few _apply_rope _multiply_few _add_rms_norm _multiply_few _multiply_few _add_rms_norm"
FEW_BLOOM = "_layer_norm _multiply_few _apply_rope _multiply_few _layer_norm _multiply_few _activate _multiply_few"


@only_interpreted
@pytest.mark.parametrize(
    ("architecture", "dtype", "layer", "expected"),
    [
        ("LlamaForCausalLM", "bfloat16", 0, FEW_LLAMA),
        ("LlamaForCausalLM", "int8", 1, FEW_LLAMA),
        ("Gemma2ForCausalLM", "bfloat16", 0, FEW_GEMMA),
        ("Qwen3ForCausalLM", "bfloat16", 1, FEW_LLAMA),
        ("BloomForCausalLM", "bfloat16", 0, FEW_BLOOM),
        ("Phi3ForCausalLM", "bfloat16", 0, FEW_LLAMA),
    ],
)
def test_a_layer_of_few_rows_is_the_layer_of_separate_kernels(
    architecture: str, dtype: str, layer: int, expected: str, tmp_path: Path
) -> None:
    """A LayerNorm is computed before its product, and an MLP without gates applies its activation behind it."""
    write_checkpoint(tmp_path, architecture, seed=11)
    model: Any = load(tmp_path, dtype, max_model_len=MAX_LEN, device="cuda")
    sizes = (model.config.num_kv_heads, model.config.head_dim)
    memory = torch.zeros(64, token_bytes(*sizes, torch.bfloat16), dtype=torch.uint8)
    kv, written = view_kv_rows(memory, *sizes, torch.bfloat16), torch.tensor([3, 9])

    def attend(layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        return rope.apply_rope_and_write_kv(heads, kv, written).flatten(1)

    before, angles = torch.randn(2, model.config.hidden_size), model.layer_angles(written)[layer]
    with by_triton(), torch.inference_mode():
        twin = model.layers[layer](before.clone(), angles, attend, None)
        logits = model.logits(twin.clone())
        for form in {id(one.form): one.form for one in model.modules() if isinstance(one, Linear)}.values():
            assert isinstance(form, DeviceForm) and form.few_rows == 0, "no GPU, no trial"
            form.few_rows = 2
        found = before.clone()
        with counting() as counts:
            model.layers[layer](found, angles, attend, None)
        few_logits = model.logits(twin.clone())
    assert " ".join(counts.names) == expected
    close = 0.02 * float((twin - before).std())
    torch.testing.assert_close(found, twin, rtol=0, atol=4 * close)
    torch.testing.assert_close(few_logits, logits, rtol=0, atol=0.1 * float(logits.std()))
    assert (found - twin).std() < close


@only_interpreted
@pytest.mark.parametrize(("architecture", "expected"), [("LlamaForCausalLM", LLAMA), ("Gemma2ForCausalLM", GEMMA)])
def test_kernels_of_one_layer_are_counted(architecture: str, expected: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, seed=11)
    model: Any = load(tmp_path, max_model_len=MAX_LEN, device="cuda")
    config = model.config
    sizes = (config.num_kv_heads, config.head_dim)
    kv = view_kv_rows(torch.zeros(64, token_bytes(*sizes, torch.float32), dtype=torch.uint8), *sizes, torch.float32)
    written = torch.zeros(1, dtype=torch.int64)

    def attend(layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        return rope.apply_rope_and_write_kv(heads, kv, written).flatten(1)

    hidden = torch.randn(1, config.hidden_size)
    angles = model.angles.by_layer(model.angles(written))[0]
    with by_triton(), torch.no_grad(), counting() as counts:
        model.layers[0](hidden, angles, attend, None)
    assert " ".join(counts.names) == expected
