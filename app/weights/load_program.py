"""Loads an exported program: its tensors out of the archive, weights of linear layers packed in the form that the recipe names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from app.hardware.plan import ServingPlan
from app.kernels.linear import Linear
from app.models.graph import Ref
from app.models.program import Product, Program
from app.weights.archive import Archive, Stored
from app.weights.choice import Choice
from app.weights.load import choice_of
from app.weights.program import ProgramCheckpoint

_CONVOLUTIONS = frozenset(
    f"torch.ops.aten.{name}" for name in ("conv1d.default", "conv2d.default", "conv3d.default", "convolution.default")
)
Progress = Callable[[int, int], None]


def load_program(checkpoint: ProgramCheckpoint, plan: ServingPlan, progress: Progress) -> Program:
    """Ready to run. `progress` hears (bytes done, bytes in all)."""
    archive = Archive(checkpoint.path)
    try:
        states = _states(checkpoint, archive, progress)
    finally:
        archive.close()
    choice, precision = choice_of(plan), plan.precision.value
    narrow = precision == "bf16"
    products = {
        weight: _product(states.pop(weight), None if bias is None else states[bias], choice, narrow)
        for weight, bias in checkpoint.linears.items()
    }
    if narrow:
        _narrow(checkpoint, states)
    return Program(checkpoint.graph, states, products, narrow)


def _states(checkpoint: ProgramCheckpoint, archive: Archive, progress: Progress) -> dict[str, Tensor]:
    """By the graph's names; tensors that share memory in the archive share it here."""
    members: dict[str, Tensor] = {}
    total, done = sum(archive.size(each.member) for each in checkpoint.states.values() if archive.has(each.member)), 0
    states = {}
    for name, stored in checkpoint.states.items():
        if stored.member not in members:
            members[stored.member] = _flat(archive, stored)
            done += members[stored.member].nbytes
            progress(min(done, total), total)
        states[name] = torch.as_strided(members[stored.member], stored.shape, stored.strides, stored.offset)
    progress(total, total)
    return states


def _flat(archive: Archive, stored: Stored) -> Tensor:
    dtype = getattr(torch, stored.dtype)
    if stored.last == 0:
        return torch.empty(0, dtype=dtype)
    data = bytearray(archive.read(stored.member))
    return torch.frombuffer(data, dtype=dtype, count=len(data) // dtype.itemsize)


def _product(weight: Tensor, bias: Tensor | None, choice: Choice, narrow: bool) -> Product:
    rows, columns = weight.shape
    linear = Linear(("program",), columns, rows, bias is not None)
    packing = choice.packing(linear)
    form = packing.pack(weight.to(choice.dtype).contiguous(), None if bias is None else bias.to(choice.dtype))
    return Product(form, choice.dtype, narrow)


def _narrow(checkpoint: ProgramCheckpoint, states: dict[str, Tensor]) -> None:
    """Weights that only convolutions read are stored as autocast would make them at every step."""
    others, own = set[str](), set[str]()
    for node in checkpoint.graph.nodes:
        names = {item.name for item in (*node.arguments, *node.keywords.values()) if isinstance(item, Ref)}
        (own if node.target in _CONVOLUTIONS else others).update(names)
    for name in own - others:
        if name in states and states[name].dtype == torch.float32:
            states[name] = states[name].to(torch.bfloat16)
