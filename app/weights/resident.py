"""Bytes that a checkpoint's weights take in memory when they are served, by precision: from the config and the headers alone."""

from __future__ import annotations

from collections.abc import Mapping

from app.kernels.layout import LAYOUTS
from app.models.config import ModelConfig
from app.models.encoder_config import EncoderConfig
from app.models.encoder_shapes import encoder_norm_elements, encoder_products_of, encoder_tables_of
from app.models.shapes import norms_of, products_of
from app.weights.headers import TensorEntry
from app.weights.recipes import find_recipe, for_texts

PRECISION_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
ROUNDED = ("int8", "int4")


def decoder_bytes(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """With tied embeddings the output layer's copy is the one that counts."""
    embedding = tensors["model.embed_tokens.weight"]
    # The embedding's table is never converted: rows are looked up as they are stored, and counted where no output layer holds them.
    table = 0 if config.tie_embeddings else embedding.nbytes
    elements = sum(entry.num_elements for entry in tensors.values())
    products = elements - (0 if config.tie_embeddings else embedding.num_elements)
    exact = {name: products * size + table for name, size in PRECISION_BYTES.items()}
    return {**exact, **{name: rounded_bytes(config, name) + table for name in ROUNDED}}


def encoder_bytes(config: EncoderConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Tables as they are stored, norms and heads in FP32, products in the precision."""
    tables = sum(tensors[name].nbytes for name in encoder_tables_of(config))
    fixed = tables + 4 * encoder_norm_elements(config)
    products = sum(shape[0] * (shape[1] + bias) for shape, bias in encoder_products_of(config))
    exact = {name: products * size + fixed for name, size in PRECISION_BYTES.items()}
    return {**exact, **{name: _rounded_products(config, name) + fixed for name in ROUNDED}}


def rounded_bytes(config: ModelConfig, precision: str) -> int:
    """Bytes of the products' weights, of biases and of norms (in FP32) where our own forms hold them: the same on x86 and on Arm."""
    output = LAYOUTS[find_recipe("cpu", "x86_64", precision).forms(is_output=True)[0]]
    heads = 2 * config.head_dim if config.qk_norm else 0
    norms = config.num_layers * (len(norms_of(config)) * config.hidden_size + heads) + config.hidden_size
    return _rounded_products(config, precision) + output.nbytes(config.vocab_size, config.hidden_size) + 4 * norms


def int8_copy_bytes(config: ModelConfig | EncoderConfig) -> int:
    return _held_bytes(config, "int8")


def _rounded_products(config: ModelConfig | EncoderConfig, precision: str) -> int:
    recipe = find_recipe("cpu", "x86_64", precision)
    recipe = recipe if isinstance(config, ModelConfig) else for_texts(recipe)
    return _held_bytes(config, recipe.forms(is_output=False)[0])


def _held_bytes(config: ModelConfig | EncoderConfig, form: str) -> int:
    products = products_of(config) if isinstance(config, ModelConfig) else encoder_products_of(config)
    return sum(LAYOUTS[form].nbytes(*shape) + 4 * shape[0] * bias for shape, bias in products)
