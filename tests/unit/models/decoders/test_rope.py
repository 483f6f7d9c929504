"""Turning: lengths stay, angles add up, and the elements past the rotary part are left alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from app.models.decoders.decoder import LayerRopeAngles, RotaryEmbedding
from app.models.decoders.rope import RopeConfig
from armature_kernels.elementwise.rope import apply_rope_torch as turn

CPU = torch.device("cpu")


def test_rope_keeps_lengths_and_only_distance_matters() -> None:
    rotary = RotaryEmbedding(RopeConfig(theta=100.0, dim=8), 512, CPU)
    x, y = torch.randn(2, 1, 1, 8)
    products = []
    for start in (0, 3, 200):
        query, key = (turn(v, rotary(torch.tensor([position]))) for v, position in ((x, start + 5), (y, start)))
        products.append((query * key).sum())
        torch.testing.assert_close(query.norm(), x.norm())
    torch.testing.assert_close(torch.stack(products), products[0].expand(3), atol=1e-4, rtol=0.0)


def test_a_part_of_the_head_may_stay() -> None:
    rotary = RotaryEmbedding(RopeConfig(theta=100.0, dim=4), 512, CPU)
    x = torch.randn(3, 2, 10)
    turned = turn(x, rotary(torch.tensor([0, 1, 2])))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[0], x[0])  # position 0 turns by nothing
    assert not torch.equal(turned[1:, :, :4], x[1:, :, :4])


def test_frequencies_of_three_axes_take_the_position_of_theirs() -> None:
    positions = torch.tensor([[3, 4], [5, 7], [9, 2]])
    plain = RotaryEmbedding(RopeConfig(theta=100.0, dim=8), 512, CPU)
    rotary = RotaryEmbedding(RopeConfig(theta=100.0, dim=8, axes=(0, 1, 2, 0)), 512, CPU)
    found = rotary(positions[0], positions)
    for place, axis in enumerate((0, 1, 2, 0) * 2):
        for own, expected in zip(found, plain(positions[axis]), strict=True):
            torch.testing.assert_close(own[..., place], expected[..., place])
    text = torch.arange(5)
    for own, expected in zip(rotary(text, text.expand(3, -1)), rotary(text), strict=True):
        torch.testing.assert_close(own, expected)


def test_layers_share_the_angles_of_equal_ropes() -> None:
    near, far = RopeConfig(10.0, 8), RopeConfig(1000.0, 8)
    layers = LayerRopeAngles((near, None, far, RopeConfig(10.0, 8)), 512, CPU)
    computed = layers(torch.arange(4))
    first, second, third, fourth = layers.by_layer(computed)
    assert len(computed) == 4 and second is None and first is not None and third is not None and fourth is not None
    assert first[0] is fourth[0] and first[1] is fourth[1] and first[0] is not third[0]


def test_longrope_takes_its_factors_from_the_context_that_is_served() -> None:
    rope = RopeConfig(
        10.0, 4, "longrope", 2.0, original_max_position_embeddings=64, short_factor=(1.0, 1.0), long_factor=(2.0, 4.0)
    )
    short, long = RotaryEmbedding(rope, 64, CPU), RotaryEmbedding(rope, 65, CPU)
    torch.testing.assert_close(short.frequencies / long.frequencies, torch.tensor([2.0, 4.0]))
    own = replace(rope, short_mscale=1.25, long_mscale=1.5)  # Phi-3.5-MoE
    assert [RotaryEmbedding(own, length, CPU).scale for length in (64, 65)] == [1.25, 1.5]
