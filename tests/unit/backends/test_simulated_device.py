"""The simulated device fulfils the contract of `DeviceBackend`: captures read their inputs again, events are passed."""

from __future__ import annotations

import torch

from app.backends.base import DeviceBackend
from simulated_device import SimulatedDeviceBackend


def test_recorded_work_reads_and_writes_where_it_did() -> None:
    backend: DeviceBackend = SimulatedDeviceBackend(torch.float32)
    given, result = torch.tensor([1.0, 2.0]), torch.empty(2)

    def work() -> None:
        torch.add(given, 1.0, out=result)

    captured = backend.capture(work)
    assert captured is not None
    given.copy_(torch.tensor([5.0, 7.0]))
    captured.replay()
    assert result.tolist() == [6.0, 8.0]


def test_a_mark_is_passed_at_once_and_words_are_as_wide_as_ids() -> None:
    backend = SimulatedDeviceBackend(torch.float32)
    backend.record_event().wait()
    assert (backend.staging_buffer(3).dtype, backend.staging_buffer(3).tolist()) == (torch.int64, [0, 0, 0])
    assert backend.free_bytes() > 0


def test_only_want_of_memory_is_survived() -> None:
    backend = SimulatedDeviceBackend(torch.float32)
    assert backend.recover_from_oom(torch.OutOfMemoryError("planted"))
    assert not backend.recover_from_oom(RuntimeError("of another kind"))
