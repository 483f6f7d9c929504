"""A linear form that torchao quantizes and multiplies: `quantize_` with a config, on a processor or on a device.

It serves the formats that `--quantization` names, and it is the reference of the quantized formats where the native
library has no kernels. torchao is imported when it is first used, because that takes seconds.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from armature_kernels.errors import KernelError
from armature_kernels.linear.activations import Activations, unquantized
from armature_kernels.linear.torchao_config import CONFIGS, ConfigCall, ConfigValue, parse_config

# What torchao logs at import where its CUDA extensions cannot be loaded, and what torch logs about torchao's
# enumerations. Neither is about anything that is used here.
_IMPORT_MESSAGES = re.compile("Failed to load .*_C|Skipping import of cpp extensions|<enum '.*is an Enum subclass")
# What torchao raises if a config, a device or a library does not fit. It has no exception type of its own.
_REFUSALS = (
    AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
# Configs whose product is fast, or works, only in BF16, and the outputs that a product packs together.
_BF16_CONFIGS = ("PrototypeInt4WeightOnlyConfig", "MXDynamicActivationMXWeightConfig")
_PACKED_OUTPUTS = {"PrototypeInt4WeightOnlyConfig": 16}
_TRIAL_OUTPUTS, _TRIAL_INPUTS = 64, 256  # smallest sizes that suit every packing
# Up to this number of rows torch's product of int8 codes is used, which reads the codes directly. torchao converts the
# whole weight to BF16 for each product.
_FEW_ROWS = 16
_INT8_MULTIPLE = (
    32  # of inputs; torch's product reads 16 at a time without a check, beyond the weight if they are fewer
)


@dataclass(frozen=True, slots=True)
class TorchaoFactory:
    """Quantizes weights with the config that `quantization` names (`armature_kernels/linear/torchao_config.py`).

    `device` holds the weights; None: the processor. `dtype` is the dtype of the activations, in which a device
    multiplies. A processor without BF16 products multiplies in FP32.
    """

    quantization: str
    device: torch.device | None = None
    dtype: torch.dtype = torch.bfloat16
    keeps_weight: ClassVar[bool] = False

    def supports(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return True if torchao can multiply with this config here, and whole groups cover the inputs."""
        if self.refusal():
            return False
        return columns % _group_size(build_config(self.quantization)) == 0 and rows % self._outputs == 0

    def refusal(self) -> str:
        """Return why torchao cannot multiply with this config here, in its own words; empty if it can."""
        return _refusal(self)

    def empty_form(self, outputs: int, inputs: int, bias: Tensor | None) -> None:
        """Return None: weights can only be quantized whole."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> TorchaoLinear:
        """Quantize weight [out, in] of any float dtype.

        Raises:
            KernelError: torchao refuses the config for this weight.
        """
        dtype, device = self._product_dtype(), self.device or weight.device
        with torch.device("meta"):
            module = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=dtype)
        module.weight = nn.Parameter(weight.to(device, dtype), requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias.to(device, dtype, copy=True), requires_grad=False)
        config = build_config(self.quantization)
        try:
            torchao_module("torchao.quantization").quantize_(module, config)
        except _REFUSALS as error:
            raise KernelError(f"torchao cannot quantize a weight so: {_words(error)}") from error
        return TorchaoLinear(module)

    @property
    def _outputs(self) -> int:
        return _PACKED_OUTPUTS.get(parse_config(self.quantization).name, 1)

    def _product_dtype(self) -> torch.dtype:
        name = parse_config(self.quantization).name
        if self.device is not None:
            return self.dtype
        if name in _BF16_CONFIGS:
            return torch.bfloat16
        if "kleidiai" in self.quantization:  # its operator requires FP32 if a scale belongs to a group
            return torch.float32
        return torch.bfloat16 if self.dtype == torch.bfloat16 and _multiplies_bf16() else torch.float32


class TorchaoLinear:
    """A weight [out, in] as a tensor subclass of torchao, and a bias [out], in a linear module of torch."""

    __slots__ = ("_dtype", "_int8", "module")

    def __init__(self, module: nn.Linear) -> None:
        self.module, self._dtype = module, module.weight.dtype
        self._int8 = _plain_int8(module.weight)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the quantized weight consists of, and of the bias."""
        others = (self.module.bias, None if self._int8 is None else self._int8[1])
        return _tensor_bytes(self.module.weight) + sum(tensor.nbytes for tensor in others if tensor is not None)

    def activation_group(self, rows: int) -> None:
        """Return None: torchao quantizes activations inside the product, if its config says so."""

    def multiply(self, x: Activations) -> Tensor:
        """Multiply x [tokens, in] to [tokens, out] in its dtype."""
        rows = unquantized(x)
        return self._multiplied(rows).to(rows.dtype)

    def add_to(self, hidden: Tensor, x: Activations) -> None:
        """Add the product to hidden [tokens, out] fp32 in place."""
        hidden += self._multiplied(unquantized(x))

    def _multiplied(self, rows: Tensor) -> Tensor:
        if len(rows) == 0:  # some of torchao's products reduce over the rows, or return the input
            return rows.new_empty(0, self.module.out_features)
        if self._int8 is not None and len(rows) <= _FEW_ROWS and rows.dtype == torch.bfloat16:
            return self._few_multiplied(rows, *self._int8)
        product: Tensor = self.module(rows.to(self._dtype).contiguous())
        return product

    def _few_multiplied(self, rows: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """Multiply few BF16 rows by int8 codes; `self.module` is the reference."""
        product: Tensor = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), codes, scales)
        return product if self.module.bias is None else product + self.module.bias


def _plain_int8(weight: Any) -> tuple[Tensor, Tensor] | None:
    """Return codes [out, in] and BF16 scales [out] of a weight that torch's product of int8 codes can multiply.

    None: it cannot, since the weight has other codes, several scales for an output, zero points, quantized activations
    or a number of inputs that the product does not support, or is in device memory.
    """
    if weight.device.type != "cpu" or not isinstance(weight, torchao_module("torchao.quantization").Int8Tensor):
        return None
    outputs, inputs = weight.qdata.shape
    is_exact_activation = weight.act_quant_kwargs is None and weight.act_pre_scale is None
    is_symmetric = weight.zero_point is None or not weight.zero_point.any()
    if not (is_exact_activation and is_symmetric and weight.scale.numel() == outputs) or inputs % _INT8_MULTIPLE:
        return None
    return weight.qdata, weight.scale.flatten().to(torch.bfloat16)


def check_runs(quantization: str, device: torch.device | None, dtype: torch.dtype) -> None:
    """Check that torchao can multiply with a config that was asked for, for activations of this dtype.

    Raises:
        KernelError: It cannot; the message has torchao's words.
    """
    refusal = TorchaoFactory(quantization, device, dtype).refusal()
    if refusal:
        raise KernelError(f"{quantization} cannot serve on {device.type if device else 'cpu'} here. {refusal}.")


def torchao_module(name: str) -> ModuleType:
    """Import a module of torchao, or one that imports it, without the messages about extensions that are not used."""
    with _without_messages("torchao", "torch.utils._pytree"):
        return importlib.import_module(name)


def dequantize_rows(attributes: str, parts: Mapping[str, Tensor], rows: slice) -> Tensor:
    """Return rows of a stored weight [n, in] that torchao quantized.

    Args:
        attributes: torchao's JSON text of the tensor: its class, and what is no tensor.
        parts: The tensors that it consists of, by torchao's names.
        rows: The rows to dequantize.

    Raises:
        KernelError: The attributes and the parts do not fit together.
    """
    # torchao builds only classes of its own list, and a text that names another one is refused.
    classes = torchao_module("torchao.prototype.safetensors.safetensors_utils")
    try:
        values = json.loads(attributes)
        values["_data"].update(parts)
        tensor: Tensor = classes.object_from_dict(values)
        return tensor[rows].dequantize()
    except _REFUSALS as error:
        raise KernelError(f"torchao cannot read a quantized weight: {_words(error)}") from error


@contextmanager
def _without_messages(*loggers: str) -> Iterator[None]:
    """Drop the messages of an import from these loggers, and from the compiler."""

    def wanted(record: logging.LogRecord) -> bool:
        return not _IMPORT_MESSAGES.match(record.getMessage())

    filtered = [logging.getLogger(name) for name in loggers]
    for logger in filtered:
        logger.addFilter(wanted)
    try:
        with warnings.catch_warnings():
            # Python's compiler warns of torchao's sources when they are imported for the first time.
            for category in (SyntaxWarning, DeprecationWarning):
                warnings.filterwarnings("ignore", "(.* is an )?invalid escape sequence", category)
            yield
    finally:
        for logger in filtered:
            logger.removeFilter(wanted)


@cache
def build_config(quantization: str) -> Any:
    """Return torchao's config object for a value of the setting `quantization`.

    Raises:
        KernelError: The text or an argument is invalid, or torchao refuses the config.
    """
    call = parse_config(quantization)
    try:
        return _built(getattr(torchao_module(CONFIGS[call.name]), call.name), call)
    except _REFUSALS as error:
        raise KernelError(f"torchao refuses these arguments: {_words(error)}") from error


def _built(kind: type, call: ConfigCall) -> Any:
    fields = {item.name: item for item in dataclasses.fields(kind)}
    unknown = [name for name, _ in call.keywords if name not in fields]
    if unknown:
        raise ValueError(f"{call.name} has no argument {unknown[0]!r}; it has {', '.join(fields)}")
    values = {name: _argument(fields[name], value) for name, value in call.keywords}
    if "set_inductor_config" in fields:
        values.setdefault("set_inductor_config", False)  # it would change torch's settings for the whole process
    return kind(*(_converted(value) for value in call.positional), **values)


def _argument(field: dataclasses.Field[Any], value: ConfigValue) -> Any:
    """Return the value of an argument; a name is looked up among the dtypes of torch or the field's enumeration."""
    if not isinstance(value, str):
        return _converted(value)
    if isinstance(field.default, Enum):
        members = type(field.default)
        found = next((one for one in members if value.lower() in (one.name.lower(), str(one.value).lower())), None)
        if found is None:
            raise ValueError(f"{field.name} is {value!r}; it may be {', '.join(one.name.lower() for one in members)}")
        return found
    dtype = getattr(torch, value, None)
    return dtype if isinstance(dtype, torch.dtype) else value


def _converted(value: ConfigValue) -> Any:
    if isinstance(value, ConfigCall):
        return _built(getattr(torchao_module("torchao.quantization.granularity"), value.name), value)
    return [_converted(item) for item in value] if isinstance(value, tuple) else value


@cache
def _refusal(factory: TorchaoFactory) -> str:
    """Quantize and multiply a small weight, and return what torchao said if that fails."""
    try:
        group = _group_size(build_config(factory.quantization))
        inputs = -(-_TRIAL_INPUTS // group) * group
        weight = torch.linspace(-1, 1, _TRIAL_OUTPUTS * inputs).view(_TRIAL_OUTPUTS, inputs)
        form = factory.pack(weight, None)
        form.multiply(torch.ones(2, inputs, dtype=factory.dtype, device=factory.device))
    except KernelError as error:
        return error.message
    except _REFUSALS as error:
        return f"torchao cannot multiply so: {_words(error)}"
    return ""


def _group_size(config: Any) -> int:
    """Return the inputs that share a scale, 1 if all of an output do."""
    parts = [config, *(getattr(config, item.name) for item in dataclasses.fields(config))]
    return next((size for part in parts if (size := getattr(part, "group_size", None))), 1)


def _multiplies_bf16() -> bool:
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())


def _words(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def _tensor_bytes(tensor: Tensor) -> int:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    return sum(_tensor_bytes(getattr(tensor, name)) for name in flatten()[0])
