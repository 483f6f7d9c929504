"""Reads the rotary position embeddings of a decoder's config.json, in both formats of transformers. Torch is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]

# Phi-3's first releases called longrope "su". "dynamic" differs only beyond max_position_embeddings, which is never
# served. "mrope" has three axes (`rope_axes`).
ROPE_KINDS: Mapping[str, RopeKind] = {
    "default": "default",
    "dynamic": "default",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
    "mrope": "default",
    "proportional": "proportional",
}
# Names in the section on rotary embeddings. Those of one kind are allowed beside another, as in transformers, which does
# not read them then; `finetuned` says how the model was trained.
_KEYS = frozenset(
    "rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings low_freq_factor high_freq_factor"
    " beta_fast beta_slow mscale mscale_all_dim truncate attention_factor short_factor long_factor short_mscale long_mscale"
    " alpha llama_4_scaling_beta max_position_embeddings finetuned mrope_section mrope_interleaved".split()
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embeddings of one layer: they rotate the first `dim` elements of a head, with base `theta`.

    `factor` scales the context beyond `original_max_position_embeddings`. Each other field belongs to one kind.
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    attention_factor: float | None = None  # yarn, longrope
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()
    short_mscale: float | None = None  # longrope of Phi-3.5-MoE
    long_mscale: float | None = None
    num_rotated: int = 0  # proportional: pairs that are rotated, by frequencies over the whole head
    axes: tuple[int, ...] = ()  # the axis whose position each frequency takes, of three; empty: there is one axis
    backwards: bool = False  # pairs are rotated in the other direction


def parse_rope(
    config: ConfigReader, head_dim: int, default_theta: float, layer_type: str | None = None, partial: float = 1.0
) -> RopeConfig:
    """Read the rotary embeddings of one kind of layer.

    `default_theta` and `partial`, the share of a head that is rotated, hold unless config.json has them. `layer_type`
    is the key among nested `rope_parameters`, as in Gemma 3.
    """
    section = _section(config, layer_type)
    unknown = sorted(name for name, value in section.values.items() if name not in _KEYS and value is not None)
    if unknown:
        raise CheckpointInvalid(
            f"{section.where}: {unknown[0][:80]} is not known, and may change the rotary embeddings."
        )
    theta = section.number("rope_theta", config.number("rope_theta", default_theta))
    share = section.number("partial_rotary_factor", config.number("partial_rotary_factor", partial))
    name = section.text("rope_type", section.text("type", "default"))
    kind = ROPE_KINDS.get(name)
    if kind is None:
        raise CheckpointInvalid(
            f"{section.where}: rope_type {name!r} is not known; known are {', '.join(sorted(ROPE_KINDS))}."
        )
    if kind == "proportional":
        factor = section.number("factor", 1.0)
        return RopeConfig(theta, head_dim, kind, factor, num_rotated=int(share * head_dim // 2))
    dim = int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise CheckpointInvalid(
            f"{section.where}: rotary embeddings rotate pairs, and {dim} of {head_dim} elements cannot be paired."
        )
    if kind == "yarn" and section.has("short_factor"):
        kind = "longrope"  # Phi-3's second releases called it yarn
    if kind == "default" and section.values.get("mscale_all_dim"):
        raise CheckpointInvalid(f"{section.where}: mscale_all_dim with rope_type {name!r} is not offered.")
    return RopeConfig(theta, dim) if kind == "default" else _scaled(config, section, RopeConfig(theta, dim, kind))


def rope_axes(config: ConfigReader, rope: RopeConfig, sections: tuple[int, ...], interleaved: bool) -> tuple[int, ...]:
    """Return the axis of each frequency, of time, height and width, whose positions differ where pictures are.

    mrope_section, by default `sections`, has the number of frequencies of each. They are one after the other (M-RoPE,
    arXiv 2409.12191), or every third one, and the rest is time's.
    """
    found, half = _section(config, None), rope.dim // 2
    if found.has("mrope_section"):
        sections = found.integers("mrope_section")
    elif sum(sections) != half:
        return ()  # of a text model alone
    if len(sections) != 3 or (not interleaved and sum(sections) != half):
        raise CheckpointInvalid(
            f"{found.where}: mrope_section {list(sections)} does not divide {half} frequencies in 3."
        )
    if not interleaved:
        return tuple(axis for axis, number in enumerate(sections) for _ in range(number))
    axes = [0] * half
    for axis in (1, 2):
        for place in range(axis, min(3 * sections[axis], half), 3):
            axes[place] = axis
    return tuple(axes)


def _section(config: ConfigReader, layer_type: str | None) -> ConfigReader:
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    if new.has("full_attention") or new.has("sliding_attention"):
        full, sliding = new.section("full_attention"), new.section("sliding_attention")
        if layer_type is None and full.values and sliding.values and full.values != sliding.values:
            raise CheckpointInvalid(
                f"{new.where} differs between kinds of layers, which is supported for Gemma 3 and OLMo 3 only."
            )
        return new.section(layer_type or "full_attention")
    return old if old.values and not new.values else new


def _scaled(config: ConfigReader, section: ConfigReader, plain: RopeConfig) -> RopeConfig:
    longest = config.integer("max_position_embeddings")
    original = config.optional_integer("original_max_position_embeddings")
    original = original or section.integer("original_max_position_embeddings", longest)
    half = plain.dim // 2
    is_longrope, is_llama3 = plain.kind == "longrope", plain.kind == "llama3"
    factor = (
        section.number("factor", longest / original) if plain.kind in ("longrope", "yarn") else section.number("factor")
    )
    return RopeConfig(
        theta=plain.theta,
        dim=plain.dim,
        kind=plain.kind,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=section.number("low_freq_factor") if is_llama3 else 1.0,
        high_freq_factor=section.number("high_freq_factor") if is_llama3 else 4.0,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        mscale=_number_or_none(section, "mscale"),
        mscale_all_dim=_number_or_none(section, "mscale_all_dim"),
        truncate=section.boolean("truncate", True),
        attention_factor=section.optional_number("attention_factor"),
        short_factor=section.numbers("short_factor", half) if is_longrope else (),
        long_factor=section.numbers("long_factor", half) if is_longrope else (),
        short_mscale=section.optional_number("short_mscale") if is_longrope else None,
        long_mscale=section.optional_number("long_mscale") if is_longrope else None,
    )


def _number_or_none(section: ConfigReader, name: str) -> float | None:
    return section.number(name) if section.values.get(name) else None
