"""Loads an exported program: reads its tensors from the archive and packs the weights of linear layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from app.errors import CheckpointInvalid
from app.hardware.plan.plan import ServingPlan
from app.models.program import PackedProduct, Program
from app.models.program_graph import Ref
from app.weights.form_choice import FormChoice, form_choice
from app.weights.program import CONVOLUTIONS, ProgramCheckpoint
from app.weights.program_archive import Archive, StoredTensor
from armature_kernels.linear.linear import FormFactory, Linear, LinearForm

Progress = Callable[[int, int], None]


def read_flat(archive: Archive, stored: StoredTensor) -> Tensor:
    """Return all elements of a member, [elements]."""
    dtype = getattr(torch, stored.dtype)
    if stored.min_member_elements == 0:
        return torch.empty(0, dtype=dtype)
    data = bytearray(archive.read(stored.member))
    return torch.frombuffer(data, dtype=dtype, count=len(data) // dtype.itemsize)


def pack_weight(packing: FormFactory, weight: Tensor, bias: Tensor | None) -> LinearForm:
    """Return a weight [out, in] packed in that form."""
    return packing.pack(weight.contiguous(), bias)


@dataclass(frozen=True, slots=True)
class ProgramValues:
    """The source of values: the archive, or synthetic values if steps are only timed."""

    flat: Callable[[Archive, StoredTensor], Tensor] = read_flat
    packed: Callable[[FormFactory, Tensor, Tensor | None], LinearForm] = pack_weight


ARCHIVE_VALUES = ProgramValues()


def load_program(
    checkpoint: ProgramCheckpoint, plan: ServingPlan, progress: Progress, making: ProgramValues = ARCHIVE_VALUES
) -> Program:
    """Return the program, ready to run. `progress` is called with (bytes done, bytes in total)."""
    archive = Archive(checkpoint.path)
    try:
        states = _states(checkpoint, archive, progress, making)
    finally:
        archive.close()
    choice, precision = form_choice(plan, None), plan.weights.precision
    narrow = precision == "bf16"
    products = {
        weight: PackedProduct(
            _form(states.pop(weight), None if bias is None else states[bias], choice, making), choice.dtype, narrow
        )
        for weight, bias in checkpoint.linears.items()
    }
    if narrow:
        _convert_to_bf16(checkpoint, states)
    try:
        return Program(checkpoint.graph, states, products, narrow)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointInvalid(f"{checkpoint.path.name}: a call of the program is damaged: {error!r}.") from error


def _states(
    checkpoint: ProgramCheckpoint, archive: Archive, progress: Progress, making: ProgramValues
) -> dict[str, Tensor]:
    """Return the tensors by the graph's names; those that share memory in the archive share it here."""
    members: dict[str, Tensor] = {}
    total, done = sum(archive.size(each.member) for each in checkpoint.states.values() if archive.has(each.member)), 0
    states = {}
    for name, stored in checkpoint.states.items():
        if stored.member not in members:
            members[stored.member] = making.flat(archive, stored)
            done += members[stored.member].nbytes
            progress(min(done, total), total)
        states[name] = torch.as_strided(members[stored.member], stored.shape, stored.strides, stored.offset)
    progress(total, total)
    return states


def _form(weight: Tensor, bias: Tensor | None, choice: FormChoice, making: ProgramValues) -> LinearForm:
    rows, columns = weight.shape
    packing = choice.packing(Linear(("program",), columns, rows, bias is not None))
    return making.packed(packing, weight.to(choice.dtype), None if bias is None else bias.to(choice.dtype))


def _convert_to_bf16(checkpoint: ProgramCheckpoint, states: dict[str, Tensor]) -> None:
    """Convert weights that only convolutions read to BF16 once, as autocast would at every step."""
    others, own = set[str](), set[str]()
    for node in checkpoint.graph.nodes:
        names = {item.name for item in (*node.arguments, *node.keywords.values()) if isinstance(item, Ref)}
        (own if node.target in CONVOLUTIONS else others).update(names)
    for name in own - others:
        if name in states and states[name].dtype == torch.float32:
            states[name] = states[name].to(torch.bfloat16)
