"""Reads the values of config.json that Gemma 3n has: several hidden states for each token, and what its layers share."""

from __future__ import annotations

from statistics import NormalDist

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.models.decoders.family import Fields
from app.models.decoders.family_values import gemma, refuse
from app.models.decoders.layer_config import AltUpConfig

_MAX_STREAMS = 8  # csrc/ops.h
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # transformers' default, in models of more layers


def gemma3n(config: ConfigReader, fields: Fields) -> Fields:
    """Read the streams, the sparse gates, the inner sizes, and which layers share keys and values."""
    refuse(config, "altup_active_idx", 0, "computing with another hidden state than the first")
    refuse(config, "altup_correct_scale", True, "leaving out the factors of the corrected hidden state")
    config.integer("sliding_window", 512)
    layers = fields["num_layers"]
    altup = AltUpConfig(
        num_streams=config.integer("altup_num_inputs", 4, at_least=2, at_most=_MAX_STREAMS),
        laurel_rank=config.integer("laurel_rank", 64),
        input_size=config.integer("hidden_size_per_layer_input", 256),
        input_vocab_size=config.integer("vocab_size_per_layer_input", 262_144),
    )
    cap = 30.0 if "final_logit_softcapping" not in config.values else config.optional_number("final_logit_softcapping")
    return {
        **gemma(config, fields),
        "attention_scale": 1.0,
        "logit_softcap": cap,
        "altup": altup,
        "gate_deviations": tuple(_deviations(config, sparsity) for sparsity in _sparsities(config, layers)),
        "inner_sizes": _inner_sizes(config, layers),
        "shared_kv_layers": _shared_kv_layers(config, fields["windows"]),
    }


def _inner_sizes(config: ConfigReader, layers: int) -> tuple[int, ...]:
    """Return the inner size of each layer; none if all have the same."""
    if not isinstance(config.values["intermediate_size"], list):
        return ()
    sizes = config.integers("intermediate_size")
    if len(sizes) != layers:
        raise CheckpointInvalid(
            f"{config.where}: intermediate_size must have one size for each of the {layers} layers."
        )
    return sizes if len(set(sizes)) > 1 else ()


def _sparsities(config: ConfigReader, layers: int) -> tuple[float, ...]:
    """Return for each layer the share of its gates that become 0."""
    if config.has("activation_sparsity_pattern"):
        return config.numbers("activation_sparsity_pattern", layers)
    sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
    return (_SPARSITY,) * sparse + (0.0,) * (layers - sparse)


def _deviations(config: ConfigReader, sparsity: float) -> float | None:
    """Return above how many standard deviations of a normal distribution the other gates are."""
    if sparsity >= 1:
        raise CheckpointInvalid(
            f"{config.where}: activation_sparsity_pattern must have shares below 1, not {sparsity}."
        )
    return NormalDist().inv_cdf(sparsity) if sparsity > 0 else None


def _shared_kv_layers(config: ConfigReader, windows: tuple[int | None, ...]) -> int:
    shared = config.integer("num_kv_shared_layers", 15, at_least=0, at_most=len(windows) - 1)
    own = len(windows) - shared
    if not set(windows[own:]).issubset(windows[:own]):
        raise CheckpointInvalid(
            f"{config.where}: the last {shared} layers share keys and values (num_kv_shared_layers), but no layer before"
            " them has the kind of attention that some of them have (layer_types)."
        )
    return shared
