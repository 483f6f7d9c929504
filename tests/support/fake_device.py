"""Fake tensors of a GPU: shapes, dtypes and a device, but no values.

Mixing in a CPU tensor or reading a value raises an error, as on hardware. References replace the Triton kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)


@contextmanager
def fake_cuda() -> Iterator[Mover]:
    """All tensors that are made meanwhile are fakes. Those made before must be moved to be of any use."""
    with FakeTensorMode() as mode, _Indexing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("armature_kernels.triton.support.unavailable_reason", lambda: "there is no GPU")
        yield Mover(mode)


class _Indexing(TorchFunctionMode):
    """Brackets, by the operators that they stand for: a torch that was built without CUDA asks its missing guard of the device first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _at(args[0], args[1])
        return _PLAIN.get(func, func)(*args, **(kwargs or {}))


_PLAIN = {Tensor.__invert__: torch.bitwise_not, Tensor.copy_: torch.ops.aten.copy_}


def _at(tensor: Tensor, index: Any) -> Tensor:
    places = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [place for place in places if not isinstance(place, Tensor)]:
        missing = tensor.dim() - sum(place is not None and place is not Ellipsis for place in places)
        at = next(number for number, place in enumerate(places) if place is Ellipsis)
        places[at : at + 1] = [slice(None)] * missing
    dim, tensors = 0, dict[int, Tensor]()
    for place in places:
        if place is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(place, int):
            tensor, dim = tensor.select(dim, place), dim - 1
        elif isinstance(place, slice):
            tensor = torch.ops.aten.slice(tensor, dim, place.start, place.stop, place.step or 1)
        else:
            tensors[dim] = place
        dim += 1
    return torch.ops.aten.index(tensor, [tensors.get(dim) for dim in range(max(tensors) + 1)]) if tensors else tensor


class Mover:
    """Brings models and other things to the device."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._moved: dict[int, Any] = {}  # by id: what is shared stays shared
        self._kept: list[object] = []  # so that no id is given twice

    def tensor(self, thing: Tensor) -> Tensor:
        return self._mode.from_tensor(thing).to(CUDA)

    def move(self, thing: Any) -> Any:
        """A tensor's fake; or the thing itself, all of whose tensors are fakes now, however deep."""
        if id(thing) in self._moved:
            return self._moved[id(thing)]
        self._kept.append(thing)
        if isinstance(thing, nn.Parameter):
            return self._remember(thing, nn.Parameter(self.tensor(thing), requires_grad=False))
        if isinstance(thing, Tensor):
            return self._remember(thing, self.tensor(thing))
        self._moved[id(thing)] = thing
        if isinstance(thing, dict):
            thing.update({key: self.move(value) for key, value in thing.items()})
        elif isinstance(thing, list):
            thing[:] = [self.move(value) for value in thing]
        elif type(thing).__module__.startswith(("app.", "armature_kernels.", "torch.nn.")):
            self._move_attributes(thing)
        return thing

    def _move_attributes(self, thing: Any) -> None:
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in {*slots, *getattr(thing, "__dict__", {})}:
            value = getattr(thing, name, None)
            if isinstance(value, tuple) and not hasattr(value, "_fields"):
                moved: Any = tuple(self.move(one) for one in value)
            else:
                moved = self.move(value)
            if moved is not value and not (isinstance(value, tuple) and moved == value):
                object.__setattr__(thing, name, moved)

    def _remember(self, thing: Any, moved: Any) -> Any:
        self._moved[id(thing)] = moved
        return moved
