"""One token of each sequence through a recurrent state, by the Triton kernel against the torch reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from armature_kernels.attention import device_recurrence
from armature_kernels.attention.device_recurrence import StateRows, recur_on_device
from armature_kernels.attention.recurrence import Recurrence, RecurrentInputs
from armature_kernels.attention.recurrent_sizes import RecurrentSizes
from armature_kernels.triton import recurrence, support

SIZES = [
    RecurrentSizes(6, 2, 20, 36, 3, True),
    RecurrentSizes(6, 3, 13, 10, 4, False),
    RecurrentSizes(4, 2, 128, 128, 4, True),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_a_token_advances_states_as_the_reference_does(
    gpu: torch.device, sizes: RecurrentSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of states are of other layers too, and two rows of padding read and write the same one."""
    made = torch.Generator().manual_seed(sizes.heads)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made).to(gpu)

    skips = None if sizes.has_delta else some(sizes.heads)
    bias = None if sizes.has_delta else some(sizes.channels)
    layer = Recurrence(
        sizes, some(sizes.width, sizes.channels), bias, some(sizes.heads).exp(), some(sizes.heads), skips
    )
    inputs = RecurrentInputs(
        some(5, sizes.channels), some(5, sizes.heads), some(5, sizes.heads) if sizes.has_delta else None
    )
    wide = some(9, sizes.state_elements + 24)
    wide[8] = 0.0
    rows = torch.tensor([[3, 0, 6, 8, 8], [2, 1, 5, 7, 7]], device=gpu)
    step, results = StateRows(rows[0], rows[1]), []
    for is_used in (False, True):
        monkeypatch.setattr(device_recurrence, "triton_usable", lambda tensor, is_used=is_used: is_used)
        states = wide.clone()
        results.append((recur_on_device(inputs, layer, states[:, 16:-8], step), states))
    (expected, plain), (found, states) = results
    torch.testing.assert_close(found[:3], expected[:3], rtol=1e-5, atol=1e-5)
    columns = slice(16, 16 + sizes.tail_elements), slice(16 + sizes.tail_elements, -8)
    assert torch.equal(states[:, columns[0]], plain[:, columns[0]])
    matrices = [
        one[:7, columns[1]]
        .view(7, sizes.heads, -1, sizes.key_size, 32)
        .transpose(2, 3)
        .flatten(3)[..., : sizes.value_size]
        for one in (states, plain)
    ]
    torch.testing.assert_close(*matrices, rtol=1e-5, atol=1e-5)


def test_states_are_advanced_by_torch_where_the_kernel_is_wrong(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = RecurrentSizes(2, 1, 8, 16, 3, True)
    filters, ones = torch.ones(3, sizes.channels, device=gpu), torch.ones(2, device=gpu)
    layer = Recurrence(sizes, filters, None, ones, ones)
    inputs = RecurrentInputs(*(torch.randn(1, size, device=gpu) for size in (sizes.channels, 2, 2)))
    step = StateRows(torch.tensor([0], device=gpu), torch.tensor([1], device=gpu))
    states = torch.randn(2, sizes.state_elements, device=gpu)
    expected = recur_on_device(inputs, layer, states.clone(), step)
    monkeypatch.setattr(device_recurrence, "triton_usable", lambda tensor: True)
    assert device_recurrence.kernel_difference(gpu, sizes) < 1e-4
    right = recurrence.advance_by_token
    monkeypatch.setattr(recurrence, "advance_by_token", lambda *asked: right(*asked) * 1.1)
    monkeypatch.setattr(support, "_agreed", {})
    assert torch.equal(recur_on_device(inputs, layer, states.clone(), step), expected)
    assert "The kernel of recurrent states differs" in caplog.text
