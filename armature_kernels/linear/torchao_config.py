"""The setting `quantization`: a torchao config by name, such as `torchao:IntxWeightOnlyConfig(weight_dtype=int4)`.

The text is parsed to names and constants; nothing of it is evaluated. Torch and torchao are not needed:
`armature_kernels/linear/torchao_linear.py` builds torchao's objects from the result.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from armature_kernels.errors import KernelError

PREFIX = "torchao:"
MAX_LENGTH = 400  # characters of a config; the parser's cost and depth are bounded by it
EXAMPLE = f"{PREFIX}IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(32))"

_STABLE, _INT4 = "torchao.quantization", "torchao.prototype.quantization.int4"
_UINTX, _MX = "torchao.prototype.quantization", "torchao.prototype.mx_formats"
# The configs of torchao that quantize a weight alone, or also its activations at run time, and the modules that hold
# them. Which of them run depends on the device and on libraries; torchao says so when the first weight is quantized.
CONFIGS: Mapping[str, str] = {
    "Int8WeightOnlyConfig": _STABLE,
    "Int8DynamicActivationInt8WeightConfig": _STABLE,
    "Int8DynamicActivationIntxWeightConfig": _STABLE,
    "IntxWeightOnlyConfig": _STABLE,
    "Int4WeightOnlyConfig": _STABLE,
    "Float8WeightOnlyConfig": _STABLE,
    "Float8DynamicActivationFloat8WeightConfig": _STABLE,
    "Float8DynamicActivationInt4WeightConfig": _STABLE,
    "PrototypeInt4WeightOnlyConfig": _INT4,
    "Int8DynamicActivationInt4WeightConfig": _INT4,
    "UIntxWeightOnlyConfig": _UINTX,
    "Int8DynamicActivationUIntxWeightConfig": _UINTX,
    "MXDynamicActivationMXWeightConfig": _MX,
    "NVFP4DynamicActivationNVFP4WeightConfig": _MX,
    "NVFP4WeightOnlyConfig": _MX,
}
GRANULARITIES = ("PerGroup", "PerRow", "PerAxis", "PerTensor", "PerBlock")

# The configs of formats that the product itself chooses.
INT8_REFERENCE = f"{PREFIX}Int8WeightOnlyConfig"
INT4_REFERENCE = f"{PREFIX}PrototypeInt4WeightOnlyConfig(group_size=32)"
KLEIDI_INT4 = {
    group: f"{PREFIX}Int8DynamicActivationIntxWeightConfig(weight_dtype=int4, weight_granularity={granularity}, "
    "intx_packing_format=opaque_aten_kleidiai)"
    for group, granularity in ((32, "PerGroup(32)"), (None, "PerAxis(0)"))
}

# How the weights are stored, for an estimate of their bytes: those of four bits take half a byte only in these configs
# and in KleidiAI's packing, a byte in the others. A group is the number of inputs that share a scale by default.
_HALF_BYTE = (
    "Int4WeightOnlyConfig", "PrototypeInt4WeightOnlyConfig", "Float8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt4WeightConfig", "NVFP4DynamicActivationNVFP4WeightConfig", "NVFP4WeightOnlyConfig",
)  # fmt: skip
_GROUPS: Mapping[str, int] = {
    "Int8DynamicActivationIntxWeightConfig": 32,
    "Int4WeightOnlyConfig": 128,
    "PrototypeInt4WeightOnlyConfig": 128,
    "Int8DynamicActivationInt4WeightConfig": 32,
    "UIntxWeightOnlyConfig": 128,
    "Int8DynamicActivationUIntxWeightConfig": 128,
    "MXDynamicActivationMXWeightConfig": 32,
}
_NVFP4_BYTES = 0.5 + 1 / 16  # an FP8 scale for each 16 inputs
_SCALE_BYTES = 5  # an FP32 scale and a zero point of eight bits; less in BF16

Constant = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class ConfigCall:
    """A config or a granularity with its arguments.

    A string is a constant or a name, such as a dtype or the member of an enumeration.
    """

    name: str
    positional: tuple[ConfigValue, ...] = ()
    keywords: tuple[tuple[str, ConfigValue], ...] = ()


ConfigValue = Constant | ConfigCall | tuple["ConfigValue", ...]


def is_torchao(precision: str) -> bool:
    """Return True if a format of weights is a config of torchao."""
    return precision.startswith(PREFIX)


@cache
def parse_config(text: str) -> ConfigCall:
    """Return the config that a value of the setting `quantization` names.

    Raises:
        KernelError: The text is not `torchao:CONFIG` or `torchao:CONFIG(...)` of a known config.
    """
    if not is_torchao(text):
        raise KernelError(f"quantization is {text[:80]!r}, but must begin with {PREFIX}, for example {EXAMPLE}.")
    source = text.removeprefix(PREFIX).strip()
    try:
        tree = ast.parse(source, mode="eval").body if len(source) <= MAX_LENGTH else None
        call = _call(ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if call is None or call.positional:
        raise KernelError(
            f"quantization is {text[:80]!r}, which cannot be read: it must be a config of torchao by name, with keyword "
            f"arguments of constants, names and granularities ({', '.join(GRANULARITIES)}), for example {EXAMPLE}."
        )
    if call.name not in CONFIGS:
        raise KernelError(f"{call.name[:80]} is no config of torchao that can serve. Known are: {', '.join(CONFIGS)}.")
    return call


def stored_bytes_per_weight(text: str, inputs: int) -> float | None:
    """Return the most bytes per weight of a layer with this number of inputs, scales included.

    None: the inputs are no whole groups, so that the layer stays exact.

    Args:
        text: A value of the setting `quantization`.
        inputs: Inputs of the layer.
    """
    call = parse_config(text)
    if call.name.startswith("NVFP4"):
        return _NVFP4_BYTES
    group = _group_of(call)
    if group is not None and inputs % group:
        return None
    keywords = dict(call.keywords)
    is_half = call.name in _HALF_BYTE or str(keywords.get("intx_packing_format")).lower().endswith("kleidiai")
    return (0.5 if is_half else 1) + _SCALE_BYTES / (group or inputs)


def _group_of(call: ConfigCall) -> int | None:
    """Return the inputs that share a scale; None: all of an output."""
    for name, value in call.keywords:
        if name == "group_size":
            return value if isinstance(value, int) else None
        if name in ("granularity", "weight_granularity"):
            sizes = (*value.positional, *dict(value.keywords).values()) if isinstance(value, ConfigCall) else ()
            is_group = isinstance(value, ConfigCall) and value.name == "PerGroup"
            return next((size for size in sizes if is_group and isinstance(size, int)), None)
    return _GROUPS.get(call.name)


def _call(node: ast.expr | None) -> ConfigCall:
    """Return the name and the arguments of a call.

    Raises:
        ValueError: The tree is not the call of a name, or an argument is neither a value nor a granularity.
    """
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError("not the call of a name")
    if any(item.arg is None for item in node.keywords):
        raise ValueError("arguments cannot be unpacked")
    keywords = tuple((str(item.arg), _value(item.value)) for item in node.keywords)
    return ConfigCall(node.func.id, tuple(_value(item) for item in node.args), keywords)


def _value(node: ast.expr) -> ConfigValue:
    """Return the value of an argument.

    Raises:
        ValueError: The tree has something else than constants, names, granularities and lists of these.
    """
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as constant):
            return constant
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) | ast.Attribute(attr=name, value=ast.Name()):
            return ConfigCall(name) if name in GRANULARITIES else name
        case ast.Call(func=ast.Name(id=name)) if name in GRANULARITIES:
            return _call(node)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
    raise ValueError(f"{type(node).__name__} is not supported")
