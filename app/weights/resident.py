"""Memory that a checkpoint's weights take when they are served, in bytes by precision.

It is computed from the configuration and the headers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.kernels.layout import LAYOUTS, device_int4_bytes, device_int4_suits
from app.models.config import ModelConfig
from app.models.encoder_config import EncoderConfig
from app.models.encoder_shapes import encoder_norm_elements, encoder_products_of, encoder_tables_of
from app.models.shapes import Shape, norms_of, products_of
from app.weights.headers import TensorEntry
from app.weights.recipes import find_recipe, for_texts

PRECISION_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
DEVICE_PRECISION_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
ROUNDED = ("int8", "int4")


def decoder_bytes(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Return the bytes of a decoder in host memory; a tied embedding counts as the output layer."""
    embedding = tensors["model.embed_tokens.weight"]
    # The embedding table is never converted: rows are looked up as stored. It counts unless the output layer holds it.
    table = 0 if config.tie_embeddings else embedding.nbytes
    elements = sum(entry.num_elements for entry in tensors.values())
    products = elements - (0 if config.tie_embeddings else embedding.num_elements)
    exact = {name: products * size + table for name, size in PRECISION_BYTES.items()}
    return {**exact, **{name: rounded_bytes(config, name) + table for name in ROUNDED}}


def encoder_bytes(config: EncoderConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Return the bytes of an encoder in host memory.

    Tables are counted as stored, norms and heads in FP32, linear layers in the precision.
    """
    tables = sum(tensors[name].nbytes for name in encoder_tables_of(config))
    fixed = tables + 4 * encoder_norm_elements(config)
    products = sum(shape[0] * (shape[1] + bias) for shape, bias in encoder_products_of(config))
    exact = {name: products * size + fixed for name, size in PRECISION_BYTES.items()}
    return {**exact, **{name: _rounded_products(config, name) + fixed for name in ROUNDED}}


def rounded_bytes(config: ModelConfig, precision: str) -> int:
    """Return the bytes of quantized linear layers, biases and norms (FP32) in native forms.

    They are equal on x86 and Arm.
    """
    output = LAYOUTS[find_recipe("cpu", "x86_64", precision).forms(is_output=True)[0]]
    norms = 4 * _norm_elements(config)
    return _rounded_products(config, precision) + output.nbytes(config.vocab_size, config.hidden_size) + norms


def decoder_device_bytes(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Return the bytes of a decoder in device memory.

    Norms are in FP32, an embedding that is not tied is as stored, and the output layer is never quantized.
    """
    table = 0 if config.tie_embeddings else tensors["model.embed_tokens.weight"].nbytes
    return _device_bytes(list(products_of(config)), config.vocab_size * config.hidden_size, table + 4 * _norm_elements(config))


def encoder_device_bytes(config: EncoderConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Return the bytes of an encoder in device memory."""
    tables = sum(tensors[name].nbytes for name in encoder_tables_of(config))
    return _device_bytes(list(encoder_products_of(config)), 0, tables + 4 * encoder_norm_elements(config))


def _device_bytes(products: Sequence[tuple[Shape, bool]], output: int, fixed: int) -> dict[str, int]:
    """Return the bytes by precision of linear layers with this number of `output` elements and `fixed` bytes.

    With int4, scratch memory to dequantize the largest weight for many rows is included.
    """
    elements = output + sum(shape[0] * (shape[1] + bias) for shape, bias in products)
    exact = {name: elements * size + fixed for name, size in DEVICE_PRECISION_BYTES.items()}
    rounds = [shape for shape, _ in products if device_int4_suits(*shape)]
    scratch = max((rows * columns for rows, columns in rounds), default=0)
    saved = sum(2 * rows * columns - device_int4_bytes(rows, columns) for rows, columns in rounds)
    return {**exact, "int4": exact["bf16"] - saved + 2 * scratch}


def _norm_elements(config: ModelConfig) -> int:
    heads = 2 * config.head_dim if config.qk_norm else 0
    return config.num_layers * (len(norms_of(config)) * config.hidden_size + heads) + config.hidden_size


def int8_copy_bytes(config: ModelConfig | EncoderConfig) -> int:
    """Return the bytes of an int8 copy of all linear layers except the output layer."""
    return _held_bytes(config, "int8")


def _rounded_products(config: ModelConfig | EncoderConfig, precision: str) -> int:
    recipe = find_recipe("cpu", "x86_64", precision)
    recipe = recipe if isinstance(config, ModelConfig) else for_texts(recipe)
    return _held_bytes(config, recipe.forms(is_output=False)[0])


def _held_bytes(config: ModelConfig | EncoderConfig, form: str) -> int:
    products = products_of(config) if isinstance(config, ModelConfig) else encoder_products_of(config)
    return sum(LAYOUTS[form].nbytes(*shape) + 4 * shape[0] * bias for shape, bias in products)
