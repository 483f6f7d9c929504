"""The operators for which torch has a kernel on a kind of device, from the table in every build of torch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchgen
from torch.utils._python_dispatch import TorchDispatchMode
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey, NativeFunction

from fake_device import CUDA


@cache
def _parsed() -> tuple[dict[str, NativeFunction], Any]:
    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    return {str(function.func.name): function for function in parsed.native_functions}, parsed.backend_indices


def has_kernel(operator: str, kind: str) -> bool:
    """`operator` as aten names it (`add.Tensor`), `kind` CUDA or MPS. What is made of other operators runs wherever they do."""
    functions, indices = _parsed()
    function = functions[operator]
    composite = (
        function.has_composite_implicit_autograd_kernel
        or function.has_composite_explicit_autograd_kernel
        or function.has_composite_explicit_autograd_non_functional_kernel
    )
    own = function if function.structured_delegate is None else functions[str(function.structured_delegate)]
    return composite or indices[DispatchKey[kind]].has_kernel(own)


class Listening(TorchDispatchMode):
    """Keeps the names of operators that a fake GPU was asked for, and the dtypes that lay on it."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        there = [one for one in _tensors((args, kwargs, result)) if one.device == CUDA]
        if there and func.namespace == "aten":
            self.operators.add(
                func._schema.name.removeprefix("aten::")
                + (f".{func._overloadname}" if func._overloadname != "default" else "")
            )
            self.dtypes |= {one.dtype for one in there}
        return result

    def missing(self, kind: str) -> set[str]:
        return {name for name in self.operators if not has_kernel(name, kind)}


def _tensors(thing: Any) -> Iterable[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from _tensors(one)
    elif isinstance(thing, dict):
        yield from _tensors(list(thing.values()))
