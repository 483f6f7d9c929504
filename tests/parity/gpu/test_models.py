"""Whole models with the Triton kernels give the tokens of the references; also counts the kernels per token and layer,
because small models wait for launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

triton = pytest.importorskip("triton", reason="Triton is not installed")
from app.backends import cuda
from app.backends.cuda import CudaBackend
from app.engine.scheduler.speculation import Speculation
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import Attend, AttentionSpec
from armature_kernels.elementwise import activations, embedding, rope
from armature_kernels.elementwise import norms as layer_norm
from armature_kernels.elementwise import norms as rowwise
from armature_kernels.linear.device import DeviceForm
from armature_kernels.linear.linear import Linear
from armature_kernels.triton import attention, elementwise
from device_engine import MAX_LEN, DeviceServed, Said, prompt_of, request_of
from engine_simulation import FreeRows
from loaded_models import load
from paged_steps import Shape, made_step
from simulated_device import SimulatedDeviceBackend
from tiny_checkpoints import write_checkpoint

only_interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/device has this on the GPU itself")
REQUESTS = [
    request_of("greedy", prompt_of(5, 1), temperature=0.0, max_tokens=3),
    request_of("seeded", prompt_of(3, 2), seed=3, max_tokens=2),
]


class TritonSimulatedDevice(SimulatedDeviceBackend):
    """Attends by Triton's kernels."""

    attention = CudaBackend.attention


@contextmanager
def by_triton() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (activations, layer_norm, rowwise, embedding, rope, cuda):
            patch.setattr(module, "triton_usable", lambda tensor: True)
            patch.setattr(module, "has_kernel", lambda code: False, raising=module is not cuda)
        patch.setattr(cuda, "_agrees", lambda *asked: True)
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


@pytest.mark.full
@only_interpreted
def test_drafts_change_no_token(tmp_path: Path) -> None:
    """Each is a decode; the keys of those before it are not read from memory."""
    write_checkpoint(tmp_path, seed=11)
    model = load(tmp_path, max_model_len=MAX_LEN, device="cuda")
    request = request_of("drafted", prompt_of(62, 1), temperature=0.0, max_tokens=8)
    expected = DeviceServed(model).add(request).finish().said

    class Seer:
        """Drafts what the sequence will say, and one token too many."""

        def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
            return (*expected["drafted", 0][len(token_ids) - 62 :], 7)[:most]

    speculation = Speculation(lambda sequence: Seer(), FreeRows())
    with by_triton():
        served = DeviceServed(model, TritonSimulatedDevice(torch.float32), speculation=speculation)
        served.add(request).finish()
    assert served.said == expected and sum(step.accepted_tokens for step in served.stats) > 3


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


def attend_by_triton(config: Any, lengths: list[int], dtype: torch.dtype, written: Tensor) -> Attend:
    """Return the attention of a step of decodes; without ALiBi, which has no kernel."""
    shape = Shape(config.num_heads, config.num_kv_heads, config.head_dim, dtype)
    _, kv, step = made_step(shape, [(1, length) for length in lengths], len(lengths), torch.device("cpu"))

    def attend(layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        spec = replace(spec, slopes=None)
        return TritonSimulatedDevice(dtype).attention(heads, kv, written, step, spec)[1].flatten(1)

    return attend


# Of one token in one layer. On a GPU the products of BF16 weights add to the stream themselves, which takes away both `add_`.
LLAMA = "_rms_norm mm _attend_decodes mm add_ _rms_norm mm _gate mm add_"
GEMMA = "_rms_norm mm _attend_decodes mm _add_rms_norm _rms_norm mm _gate mm _add_rms_norm"
# The same with the kernel for few rows.
FEW_LLAMA = "_multiply_few _attend_decodes _multiply_few _multiply_few _multiply_few"
FEW_GEMMA = "_multiply_few _attend_decodes _multiply_few _add_rms_norm _multiply_few _multiply_few _add_rms_norm"
FEW_BLOOM = "_layer_norm _multiply_few _attend_decodes _multiply_few _layer_norm _multiply_few _activate _multiply_few"


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
    written = torch.tensor([3, 9])
    attend = attend_by_triton(model.config, [100, 3], torch.bfloat16, written)
    before = torch.randn(2, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    angles = model.layer_angles(written)[layer]
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
    written = torch.zeros(1, dtype=torch.int64)
    attend = attend_by_triton(config, [300], torch.float32, written)
    hidden = torch.randn(1, config.hidden_size)
    angles = model.angles.by_layer(model.angles(written))[0]
    with by_triton(), torch.no_grad(), counting() as counts:
        model.layers[0](hidden, angles, attend, None)
    assert " ".join(counts.names) == expected
