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
from app.backends import cuda
from app.backends.cuda import CudaBackend
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.elementwise import activations, embedding, rope
from armature_kernels.elementwise import norms as layer_norm
from armature_kernels.elementwise import norms as rowwise
from armature_kernels.triton import attention, elementwise
from device_engine import MAX_LEN, DeviceServed, Said, prompt_of, request_of
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


# Of one token in one layer. On a GPU the products of BF16 weights add to the stream themselves, which takes away both `add_`.
LLAMA = "_rms_norm mm _attend_decodes mm add_ _rms_norm mm _gate mm add_"
GEMMA = "_rms_norm mm _attend_decodes mm _add_rms_norm _rms_norm mm _gate mm _add_rms_norm"


@only_interpreted
@pytest.mark.parametrize(("architecture", "expected"), [("LlamaForCausalLM", LLAMA), ("Gemma2ForCausalLM", GEMMA)])
def test_kernels_of_one_layer_are_counted(architecture: str, expected: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, seed=11)
    model: Any = load(tmp_path, max_model_len=MAX_LEN, device="cuda")
    config = model.config
    sizes = (config.num_kv_heads, config.head_dim)
    _, kv, step = made_step(Shape(config.num_heads, *sizes), [(1, 300)], 1, torch.device("cpu"))
    written = torch.zeros(1, dtype=torch.int64)

    def attend(layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        return TritonSimulatedDevice(torch.float32).attention(heads, kv, written, step, spec)[1].flatten(1)

    hidden = torch.randn(1, config.hidden_size)
    angles = model.angles.by_layer(model.angles(written))[0]
    with by_triton(), torch.no_grad(), counting() as counts:
        model.layers[0](hidden, angles, attend, None)
    assert " ".join(counts.names) == expected
