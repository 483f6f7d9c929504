"""The table of recipes (which forms hold the linear layers, by device, architecture and precision), and memory sizes.

A combination without a row is refused. The names of forms are those of `armature_kernels/linear/linear.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from app.errors import NoRecipe, SettingsInvalid
from app.hardware.decision import RecipeKey
from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import (
    Shape,
    dense_products_of,
    is_router,
    mixer_products,
    mlp_name,
    narrow_products,
    norm_elements,
    products_of,
    router_weights,
    tables_of,
    tensors_of,
    up_sources,
)
from app.models.encoders.config import EncoderConfig, encoder_norm_elements, encoder_products_of, encoder_tables_of
from app.weights.gguf.tensors import BlockEntry
from app.weights.quantized.entries import PackedEntry
from app.weights.safetensors import ColumnsEntry, RearrangedEntry, TensorEntry
from armature_kernels.linear.layout import (
    LAYOUTS,
    PANEL_OUTPUTS,
    device_fp8_bytes,
    device_int4_bytes,
    device_int8_bytes,
    supports_device_int4,
)
from armature_kernels.linear.torchao_config import INT4_REFERENCE, INT8_REFERENCE, KLEIDI_INT4, is_torchao

OUTPUT_SOURCES = (("lm_head",), ("model.embed_tokens",))
INT4 = "int4/32 double quantized"
# Small models lose more by rounding, and their weights are few: layers of less than this number of weights get more bits, and
# if there are not as many with the output layer, it has eight bits too. llama.cpp's Q4_K_M takes 4.8 bits for 8B weights, 5.5 for
# Qwen3.5-0.8B, of which a third is the output layer, and 6.2 for 135M, its Q4_0 4.5 and 5.3 for 135M; ours must not be larger.
SMALL_MODEL = 500_000_000
INT4_BITS, INT4_SMALL_BITS = (5.5, 4.6), (4.4, 4.25)
# ---- layers that the operator keeps in a precision -------------------------------------------------------------------

KeptLayers = tuple[tuple[str, str], ...]  # patterns of tensor names, each with a precision
# ---- codes of the checkpoint that are kept ---------------------------------------------------------------------------

# The native form that holds the codes of a GGUF type. Q5_1, Q5_K and Q6_K have no equal form; int8/32 rounds their values
# to 1/254 of a group's largest, 4 to 16 times finer than they do.
STORED_FORMS: Mapping[str, str] = {
    "Q4_0": "int4/32", "Q4_1": "int4/32 with zero points", "Q4_K": "int4/32 with zero points",
    **dict.fromkeys(("Q8_0", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "MXFP4"), "int8/32"),
}  # fmt: skip
PRECISION_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
DEVICE_PRECISION_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
QUANTIZED = ("int8", "int4", "int4-small")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Forms in order of preference: the first that suits the weight and the machine holds it.

    `output` is for the output layer and an embedding tied to it (None: as `linear`); with `upgrade`, only if it is
    upgraded. The forms "plain" and "device" suit any weight. `equalise`: channels are equalized before quantization
    (armature_kernels/linear/smoothing.py). An int8 copy beside int4 weights multiplies from `int8_copy_from` rows on.
    `upgrade`: form of the layers that lose most, see `choose_upgrades`. `layer_bits`: mean bits of the layers' weights,
    upgraded ones included, of small models and of others.
    """

    linear: tuple[str, ...]
    output: tuple[str, ...] | None = None
    equalise: bool = False
    int8_copy_from: int | None = None
    upgrade: str | None = None
    layer_bits: tuple[float, float] = (0, 0)

    def forms(self, is_output: bool) -> tuple[str, ...]:
        return self.linear if self.output is None or not is_output else self.output

    def source_forms(self, source: str, is_upgraded: bool) -> tuple[str, ...]:
        if self.upgrade is None or (is_upgraded and is_output(source)):
            return self.forms(is_output(source))
        return (self.upgrade, *self.linear) if is_upgraded else self.linear


EXACT = Recipe(linear=("panels", "panels/widened", "panels/fp32", "onednn", "plain"))
INT8 = Recipe(linear=("int8/32", INT8_REFERENCE, "plain"), equalise=True)
# Of encoders: one scale for a row and one for an output, so that a product's sums stay integers to their end: 3.7 times as
# fast as with groups on Zen 4. In a model that loses more by it than `MOST_ROW_SCALE_COST`, the last products of blocks have
# groups, or all have, as in decoders.
INT8_ROWS = replace(INT8, linear=("int8", *INT8.linear), upgrade="int8/32")
MOST_ROW_SCALE_COST = 0.002  # of 1 minus the lowest cosine of the model's vectors: what groups cost a small model


def _int4(*others: str, int8_copy_from: int | None = None, layer_bits: tuple[float, float] = INT4_BITS) -> Recipe:
    """Return a recipe with groups of 32: 0.53 bytes per weight, and 1.06 in upgraded layers.

    torchao's formats `others` serve where the native library has no kernels.
    """
    return Recipe(
        linear=(INT4, *others, INT4_REFERENCE, "plain"),
        output=("int8/32", INT8_REFERENCE, "plain"),
        equalise=True,
        int8_copy_from=int8_copy_from,
        upgrade="int8/32",
        layer_bits=layer_bits,
    )


# Recipes for devices with separate memory. The output layer is not quantized: each of its rows is one
# token's score, and a tied embedding needs its exact rows.
DEVICE_EXACT = Recipe(linear=("device",))
DEVICE_INT4 = Recipe(linear=("device int4/64", "device"), output=("device",), equalise=True)
DEVICE_INT8 = Recipe(linear=("device int8", "device"), output=("device",))
DEVICE_FP8 = Recipe(linear=("device fp8", "device"), output=("device",))


def _device(kind: str, architecture: str, *exact: str) -> dict[RecipeKey, Recipe]:
    return {**{(kind, architecture, name): DEVICE_EXACT for name in exact}, (kind, architecture, "int4"): DEVICE_INT4}


# Device kind, CPU architecture, precision. armature_kernels/linear/linear.py lists the gains of packing on x86; torch has the
# same operators on Arm.
RECIPES: Mapping[RecipeKey, Recipe] = {
    ("cpu", "x86_64", "fp32"): EXACT,
    ("cpu", "x86_64", "bf16"): EXACT,
    ("cpu", "x86_64", "int8"): INT8,
    ("cpu", "x86_64", "int4"): _int4(int8_copy_from=64),
    ("cpu", "x86_64", "int4-small"): _int4(int8_copy_from=64, layer_bits=INT4_SMALL_BITS),
    ("cpu", "arm64", "fp32"): EXACT,
    ("cpu", "arm64", "bf16"): EXACT,
    ("cpu", "arm64", "int8"): INT8,
    ("cpu", "arm64", "int4"): _int4(KLEIDI_INT4[32], int8_copy_from=32),
    ("cpu", "arm64", "int4-small"): _int4(KLEIDI_INT4[32], int8_copy_from=32, layer_bits=INT4_SMALL_BITS),
    **_device("cuda", "x86_64", "fp32", "bf16"),
    **_device("cuda", "arm64", "fp32", "bf16"),
    ("cuda", "x86_64", "int8"): DEVICE_INT8,
    ("cuda", "arm64", "int8"): DEVICE_INT8,
    ("cuda", "x86_64", "fp8"): DEVICE_FP8,
    ("cuda", "arm64", "fp8"): DEVICE_FP8,
    **_device("mps", "arm64", "fp32", "bf16", "fp16"),
}


# Recipes of deterministic=on, under which other rows must not affect a result: forms that sum each row in a fixed
# order on any processor.
DETERMINISTIC_RECIPES: Mapping[str, Recipe] = {
    "fp32": Recipe(linear=("panels/fp32",)),
    "bf16": Recipe(linear=("panels/fixed", "panels/widened")),
    "int8": replace(INT8, linear=("int8/32",)),
    "int4": replace(_int4(), linear=(INT4,), output=("int8/32",)),
    "int4-small": replace(_int4(layer_bits=INT4_SMALL_BITS), linear=(INT4,), output=("int8/32",)),
}


def find_recipe(device: str, architecture: str, precision: str) -> Recipe:
    """Return the recipe for this machine; a config of torchao is its own. Raises `NoRecipe`, which lists all."""
    if is_torchao(precision):
        exact = EXACT if device == "cpu" else DEVICE_EXACT
        return Recipe(linear=(precision, exact.linear[-1]), output=exact.linear)
    recipe = RECIPES.get((device, architecture, precision))
    if recipe is None:
        rows = "; ".join(" ".join(key) for key in RECIPES)
        raise NoRecipe(f"No recipe serves {precision} on {device} with {architecture}. Recipes exist for: {rows}.")
    return recipe


# ---- mixed precision -------------------------------------------------------------------------------------------------


def _is_small(config: ModelConfig, with_output: bool = False) -> bool:
    output = config.vocab_size * config.hidden_size if with_output else 0
    return output + sum(rows * columns for (rows, columns), _ in products_of(config)) < SMALL_MODEL


def upgrade_budget(config: ModelConfig, recipe: Recipe) -> int:
    """Return the bytes that upgraded layers may take beyond those of four bits, without the output layer."""
    weights = sum(rows * columns for (rows, columns), _ in dense_products_of(config))
    bits = recipe.layer_bits[0 if _is_small(config) else 1]
    return max(0, int(weights * (bits - 8 * LAYOUTS[INT4].nbytes(32, 2**16) / 2**21) / 8))


def is_output(source: str) -> bool:
    """Return whether a source is the output layer, or an embedding tied to it."""
    return (source,) in OUTPUT_SOURCES


def is_value(source: str) -> bool:
    """Return whether a source is a value projection, which is upgraded apart from its product."""
    return source.endswith(".v_proj")


def choose_upgrades(
    config: ModelConfig, recipe: Recipe, losses: Mapping[tuple[str, ...], float] | None = None
) -> frozenset[str]:
    """Return the sources of the layers that four-bit models hold in eight bits, within `upgrade_budget`.

    The output layer of a small model is one of them, and so are the narrow products, outside the budget. Values come
    first: they are few, and an error in them reaches every later token. Then follow the products with the largest loss
    per byte; if `losses` were not measured, the down projections of evenly spread layers.
    """
    costs, output = _upgrade_costs(config), "model.embed_tokens" if config.tie_embeddings else "lm_head"
    always = frozenset(({output} if _is_small(config, with_output=True) else set()).union(narrow_products(config)))
    values = [sources for sources in costs if is_value(sources[0])]
    others = [sources for sources in costs if sources not in values]
    left = upgrade_budget(config, recipe) - sum(costs[sources] for sources in values)
    if left < 0:
        return always
    if losses is None:
        downs = [sources for sources in others if sources[0].endswith(".down_proj")] or others
        fit = min(len(downs), left // costs[downs[0]])
        ranked = [one for at, one in enumerate(downs) if (at + 1) * fit // len(downs) > at * fit // len(downs)]
    else:
        ranked = sorted(others, key=lambda sources: -losses.get(sources, 0.0) / costs[sources])
    chosen = list(values)
    for sources in ranked:
        if costs[sources] <= left:
            left -= costs[sources]
            chosen.append(sources)
    return always.union(source for sources in chosen for source in sources)


def _upgrade_costs(config: ModelConfig) -> dict[tuple[str, ...], int]:
    shapes = tensors_of(config)
    costs = {}
    for layer in range(config.num_layers):
        products = [product.sources for product in mixer_products(config, layer)]
        parts = (tuple(one for one in names if is_value(one) is value) for names in products for value in (False, True))
        groups = list(filter(None, parts))
        mlp = mlp_name(config, layer)
        for names in groups if mlp is None else [*groups, up_sources(config, mlp), (f"{mlp}.down_proj",)]:
            sources = tuple(f"model.layers.{layer}.{name}" for name in names)
            sizes = [shapes[f"{source}.weight"] for source in sources]
            rows, columns = sum(size[0] for size in sizes), sizes[0][1]
            # Rows that share a panel with other rows are counted as if they saved nothing.
            saved = LAYOUTS[INT4].nbytes(rows // PANEL_OUTPUTS * PANEL_OUTPUTS, columns)
            costs[sources] = LAYOUTS["int8/32"].nbytes(rows, columns) - saved
    return costs


KEPT_FORMS: Mapping[str, tuple[str, ...]] = {"int4": _int4().linear, "int8": INT8.linear, "bf16": EXACT.linear}


def kept_precision(kept: KeptLayers, source: str) -> str | None:
    """Return the precision of the first pattern that matches a tensor's name without `.weight`; None: no pattern.

    `lm_head` also matches an embedding, which is tied to the output layer.
    """
    names = (source, "lm_head") if source == "model.embed_tokens" else (source,)
    return next((wanted for pattern, wanted in kept if any(fnmatchcase(name, pattern) for name in names)), None)


def kept_layer_bytes(config: ModelConfig, precision: str, kept: KeptLayers) -> int:
    """Return by how many bytes kept layers change a quantized decoder. Raises `SettingsInvalid`: no match."""
    shapes = {name.removesuffix(".weight"): shape for name, shape in tensors_of(config).items() if len(shape) == 2}
    for table in tables_of(config):
        shapes.pop(table.removesuffix(".weight"))
    shapes = {source: shape for source, shape in shapes.items() if not is_router(source)}
    for pattern, wanted in kept:
        if not any(kept_precision(((pattern, wanted),), source) for source in shapes):
            known = ", ".join(sorted({f"*.{source.rpartition('.')[2]}" for source in shapes}))
            raise SettingsInvalid(f"keep_layers: no layer of this model matches {pattern}. Its layers are {known}.")
    recipe, added, narrow = find_recipe("cpu", "x86_64", precision), 0, narrow_products(config)
    for source, (rows, columns) in shapes.items():
        held_in = kept_precision(kept, source)
        if held_in is not None:
            form = (
                _output_form(config, recipe) if is_output(source) else recipe.source_forms(source, source in narrow)[0]
            )
            held = LAYOUTS[form].nbytes(rows, columns)
            exact = 2 * rows * columns
            added += (exact if held_in == "bf16" else LAYOUTS[KEPT_FORMS[held_in][0]].nbytes(rows, columns)) - held
    return added


def stored_type(tensors: Mapping[str, TensorEntry]) -> str:
    """Return the format of most weights, such as Q4_1 or AWQ in 4 bits; empty if they are not quantized.

    The output layer and the embedding count only in a GGUF file: other libraries leave them as they are.
    """
    most = _most_weights(tensors)
    return most.kind if most is not None and (isinstance(most, PackedEntry) or _stored_form(most)) else ""


def _most_weights(tensors: Mapping[str, TensorEntry]) -> BlockEntry | PackedEntry | None:
    elements: Counter[str] = Counter()
    examples: dict[str, TensorEntry] = {}
    packed = any(isinstance(_with_codes(entry), PackedEntry) for entry in tensors.values())
    for name, entry in tensors.items():
        if packed and (is_output(name.removesuffix(".weight")) or name == "model.embed_tokens.weight"):
            continue
        own = _with_codes(entry)
        kind = own.kind if isinstance(own, BlockEntry | PackedEntry) else own.dtype
        elements[kind] += own.num_elements
        examples.setdefault(kind, own)
    most = next((examples[kind] for kind, _ in elements.most_common(1)), None)
    return most if isinstance(most, BlockEntry | PackedEntry) else None


def _with_codes(entry: TensorEntry) -> TensorEntry:
    """Return the entry with the codes of one whose rows are in another order."""
    return entry.source if isinstance(entry, RearrangedEntry) and not entry.factors else entry


def _stored_form(entry: TensorEntry | None) -> str:
    entry = entry and _with_codes(entry)
    if isinstance(entry, PackedEntry):
        return entry.form
    return STORED_FORMS.get(entry.kind, "") if isinstance(entry, BlockEntry) else ""


def codes_precision(tensors: Mapping[str, TensorEntry]) -> str:
    """Return the precision that keeps the codes of most weights; empty if they have none."""
    form = _stored_form(_most_weights(tensors))
    return f"int{LAYOUTS[form].bits}" if form else ""


def stored_forms(precision: str, tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return the form of each source whose codes are kept in a precision; empty if it is not that of the codes.

    An output layer in four bits is held in eight, since a tied embedding reads its rows, and so are layers that a
    library left as they were.
    """
    if not precision or precision != codes_precision(tensors):
        return {}
    packed = any(isinstance(_with_codes(entry), PackedEntry) for entry in tensors.values())
    forms = {
        name.removesuffix(".weight"): _stored_form(entry) or "int8/32"
        for name, entry in tensors.items()
        if name.endswith(".weight") and (_stored_form(entry) or (packed and len(entry.shape) == 2))
    }
    return {source: "int8/32" if is_output(source) else form for source, form in forms.items()}


def fp8_block(entry: TensorEntry) -> tuple[int, int] | None:
    """Return the numbers of outputs and inputs that share a scale of a weight in E4M3; None if a GPU cannot keep its codes.

    The outputs of one that is read in another order may have any scale of their columns. A kernel reads 16 inputs at least.
    """
    if isinstance(entry, PackedEntry):
        height, width = entry.block
        is_kept = entry.kind == "FP8" and (width >= entry.shape[1] or width % 16 == 0)
        return (height, min(width, entry.shape[1])) if is_kept else None
    if isinstance(entry, RearrangedEntry) and not entry.factors and not entry.transposed:
        found = fp8_block(entry.source)
        return found if found is None or entry.rows is None else (1, found[1])
    if isinstance(entry, ColumnsEntry):
        found = fp8_block(entry.source)
        if found is None or found[1] == entry.source.shape[1]:
            return found and (found[0], entry.shape[1])
        return found if entry.first % found[1] == entry.shape[1] % found[1] == 0 else None
    return None


def fp8_blocks(tensors: Mapping[str, TensorEntry]) -> dict[str, tuple[int, int]]:
    """Return the block of each source whose codes a GPU keeps (`fp8_block`)."""
    found = {name.removesuffix(".weight"): fp8_block(entry) for name, entry in tensors.items()}
    return {source: block for source, block in found.items() if block is not None and not is_output(source)}


def _stored_bytes(config: ModelConfig, tensors: Mapping[str, TensorEntry], precision: str) -> int:
    forms, recipe = stored_forms(precision, tensors), find_recipe("cpu", "x86_64", precision)
    held, narrow = 0, narrow_products(config)
    for name, shape in tensors_of(config).items():
        source = name.removesuffix(".weight")
        if len(shape) != 2:  # vectors, and filters of convolutions
            held += 4 * math.prod(shape)
        elif is_router(source):
            held += 2 * shape[0] * shape[1]
        elif name not in tables_of(config):
            is_upgraded = is_output(source) or source in narrow
            form = forms.get(source) or recipe.source_forms(source, is_upgraded)[0]
            held += LAYOUTS[form].nbytes(*shape)
    return held


def decoder_bytes(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Return the bytes of a decoder in host memory; a tied embedding counts as the output layer."""
    # Tables are never converted: rows are looked up as stored. An embedding counts unless the output layer holds it.
    tables = [tensors[name] for name in tables_of(config)]
    table = sum(entry.value_bytes for entry in tables)
    elements = sum(entry.num_elements for entry in tensors.values())
    products = elements - sum(entry.num_elements for entry in tables)
    exact = {name: products * size + table for name, size in PRECISION_BYTES.items()}
    quantized = {name: quantized_bytes(config, name) for name in QUANTIZED}
    stored = codes_precision(tensors)
    if stored:
        quantized[stored] = _stored_bytes(config, tensors, stored)
    return exact | {name: nbytes + table for name, nbytes in quantized.items()}


def encoder_bytes(config: EncoderConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Return the bytes of an encoder in host memory: tables as stored, norms and heads in FP32."""
    tables = sum(tensors[name].nbytes for name in encoder_tables_of(config))
    fixed = tables + 4 * encoder_norm_elements(config)
    products = sum(shape[0] * (shape[1] + bias) for shape, bias in encoder_products_of(config))
    exact = {name: products * size + fixed for name, size in PRECISION_BYTES.items()}
    return {**exact, **{name: _quantized_linear_bytes(config, name) + fixed for name in QUANTIZED}}


def quantized_bytes(config: ModelConfig, precision: str) -> int:
    """Return the bytes of quantized linear layers, biases and norms (FP32) in native forms."""
    recipe, norms = find_recipe("cpu", "x86_64", precision), 4 * norm_elements(config)
    output = LAYOUTS[_output_form(config, recipe)].nbytes(config.vocab_size, config.hidden_size)
    narrow = narrow_products(config)
    chosen = choose_upgrades(config, recipe) if recipe.upgrade is not None else frozenset[str]()
    has_upgrades = any(not is_output(source) and source not in narrow for source in chosen)
    if recipe.upgrade is not None:
        norms += sum(
            LAYOUTS[recipe.upgrade].nbytes(*shape) - LAYOUTS[recipe.linear[0]].nbytes(*shape)
            for shape in narrow.values()
        )
    return (
        _quantized_linear_bytes(config, precision)
        + (upgrade_budget(config, recipe) if has_upgrades else 0)
        + output
        + norms
        + 2 * router_weights(config)
    )


def _output_form(config: ModelConfig, recipe: Recipe) -> str:
    return recipe.source_forms("lm_head", is_upgraded=_is_small(config, with_output=True))[0]


def decoder_device_bytes(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Return the bytes of a decoder in device memory, whose output layer is never quantized."""
    table = sum(tensors[name].value_bytes for name in tables_of(config))
    found = _device_bytes(
        list(products_of(config)), config.vocab_size * config.hidden_size, table + 4 * norm_elements(config)
    )
    blocks = fp8_blocks(tensors)
    if blocks:  # layers that the library left as they were stay so
        entries = {source: tensors[f"{source}.weight"] for source in blocks}
        held = (device_fp8_bytes(entry.shape[0], entry.shape[1], blocks[source]) for source, entry in entries.items())
        saved = 2 * sum(entry.num_elements for entry in entries.values()) - sum(held)
        found["fp8"] = found["bf16"] - saved + 2 * max(math.prod(shape) for shape, _ in products_of(config))
    return found


def encoder_device_bytes(config: EncoderConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    tables = sum(tensors[name].nbytes for name in encoder_tables_of(config))
    return _device_bytes(list(encoder_products_of(config)), 0, tables + 4 * encoder_norm_elements(config))


def _device_bytes(products: Sequence[tuple[Shape, bool]], output: int, fixed: int) -> dict[str, int]:
    """Return the bytes by precision, with the scratch memory to dequantize the largest weight for many rows."""
    elements = output + sum(shape[0] * (shape[1] + bias) for shape, bias in products)
    exact = {name: elements * size + fixed for name, size in DEVICE_PRECISION_BYTES.items()}
    rounds = [shape for shape, _ in products if supports_device_int4(*shape)]
    scratch = max((rows * columns for rows, columns in rounds), default=0)
    saved = sum(2 * rows * columns - device_int4_bytes(rows, columns) for rows, columns in rounds)
    largest = max((rows * columns for (rows, columns), _ in products), default=0)
    in_eight_bits = {
        name: exact["bf16"] + 2 * largest + sum(nbytes(*shape) - 2 * shape[0] * shape[1] for shape, _ in products)
        for name, nbytes in (("int8", device_int8_bytes), ("fp8", device_fp8_bytes))
    }
    return {**exact, **in_eight_bits, "int4": exact["bf16"] - saved + 2 * scratch}


def layer_weights(config: ModelConfig | EncoderConfig) -> dict[int, int]:
    """Return the weights of all linear layers except the output layer by their number of inputs."""
    products = products_of(config) if isinstance(config, ModelConfig) else encoder_products_of(config)
    weights: dict[int, int] = {}
    for (outputs, inputs), _ in products:
        weights[inputs] = weights.get(inputs, 0) + outputs * inputs
    return weights


def int8_copy_bytes(config: ModelConfig | EncoderConfig) -> int:
    """Return the bytes of an int8 copy of all linear layers except the output layer and experts."""
    products = dense_products_of(config) if isinstance(config, ModelConfig) else encoder_products_of(config)
    return sum(LAYOUTS["int8/32"].nbytes(*shape) + 4 * shape[0] * bias for shape, bias in products)


def _quantized_linear_bytes(config: ModelConfig | EncoderConfig, precision: str) -> int:
    return _form_bytes(config, find_recipe("cpu", "x86_64", precision).forms(is_output=False)[0])


def _form_bytes(config: ModelConfig | EncoderConfig, form: str) -> int:
    products = products_of(config) if isinstance(config, ModelConfig) else encoder_products_of(config)
    return sum(LAYOUTS[form].nbytes(*shape) + 4 * shape[0] * bias for shape, bias in products)
