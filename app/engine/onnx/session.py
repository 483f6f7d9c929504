"""Runs a graph in ONNX Runtime, with torch's tensors in and out.

A session is made for a number of threads, torch's own, at the first run with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from app.errors import CheckpointInvalid

_STATUS = re.compile(r".*Status Message: ", re.DOTALL)  # before what ONNX Runtime says of a node
_SPIN_MICROSECONDS = 200  # for which threads wait for more work by spinning, also after a run
_FEW = 64  # numbers of an input
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")


class RunsGraph(Protocol):
    """A program that can run: outputs of the graph, in its order, for inputs by name."""

    def run(self, given: Mapping[str, Any]) -> list[Any]: ...


class OnnxProgram:
    """A graph of ONNX. `model` is a file, or the bytes of a graph whose weights are `states`, by their names.

    `outputs` are the names of the graph's outputs; of an empty one nothing is returned. `names` has the graph's names of
    inputs that differ from the program's. ONNX counts negative indices from the end of a table, where torch refuses them:
    `exact`, the program in torch, computes a batch that ONNX Runtime refuses or that has a negative value in one of the
    inputs `indices`.
    """

    def __init__(
        self,
        model: Path | bytes,
        outputs: Sequence[str],
        states: Mapping[str, Tensor] | None = None,
        exact: RunsGraph | None = None,
        indices: Sequence[str] = (),
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._model, self._outputs, self._states = model, tuple(outputs), dict(states or {})
        self._asked = [name for name in self._outputs if name]
        self._exact, self._names = exact, dict(names or {})
        self._indices = [self._names.get(name, name) for name in indices]
        self._sessions: dict[int, Any] = {}
        self._errors = _library_errors()

    def run(self, given: Mapping[str, Any]) -> list[Any]:
        """Return the graph's outputs for inputs by name. Raises `RuntimeError` for inputs that cannot be computed."""
        names = self._names
        feed = {names.get(name, name): tensor.numpy() for name, tensor in given.items()}
        if self._exact is not None and any(_has_negative(feed[name]) for name in self._indices):
            return self._exact.run(given)
        try:
            found = self._session().run(self._asked, feed)
        except self._errors as error:
            if self._exact is not None:
                return self._exact.run(given)
            raise _as_torch_error(error) from error
        results = [torch.from_numpy(array) for array in found]
        if len(results) == len(self._outputs):
            return results
        rest = iter(results)
        return [next(rest) if name else None for name in self._outputs]

    def _session(self) -> Any:
        threads = torch.get_num_threads()
        if threads not in self._sessions:
            self._sessions[threads] = self._make(threads)
        return self._sessions[threads]

    def _make(self, threads: int) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3  # errors; they are raised too
        # Threads that have stopped spinning are woken too late for a run of less than a millisecond, and spinning on for
        # milliseconds, which is the default, takes a processor from the requests' thread.
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_MICROSECONDS))
        if self._states:
            values = [onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy()) for tensor in self._states.values()]
            options.add_external_initializers(list(self._states), values)
        model = self._model if isinstance(self._model, bytes) else str(self._model)
        try:
            return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except self._errors as error:
            raise CheckpointInvalid(f"ONNX Runtime cannot load the program: {_said(error)}") from error


def _has_negative(array: Any) -> bool:
    """The same twice: a call of numpy takes five times as long as a loop over a few numbers."""
    return min(array.ravel().tolist(), default=0) < 0 if array.size <= _FEW else bool(array.min() < 0)


def _library_errors() -> tuple[type[Exception], ...]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return tuple(one for one in vars(state).values() if isinstance(one, type) and issubclass(one, Exception))


def _said(error: Exception) -> str:
    return _PREFIX.sub("", _STATUS.sub("", str(error)))[:300]


def _as_torch_error(error: Exception) -> Exception:
    """Return the error that torch would raise: a lack of memory is not the client's."""
    said = _said(error)
    return MemoryError(said) if "allocate memory" in said.lower() else RuntimeError(said)
