"""Loads a checkpoint into the library's class, whose linear layers then multiply by the forms of native models.

A layer that is called is replaced. Weights that the library's code reads itself, such as those of experts in one tensor,
stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from app.backends.base import BaseBackend
from app.backends.selection import HOST_BACKENDS, select_device_backend, select_host_backend
from app.engine.build import BuildRequest, percent_reporter, prepare_device
from app.engine.transformers.fused import JoinedPart, JoinedProduct, fuse, siblings
from app.errors import CheckpointInvalid, StepFailed
from app.hardware.imports import compiler_absent
from app.hardware.plan.plan import ServingPlan
from app.hardware.plan.precision import QUANTIZED_PRECISIONS
from app.models.transformers_config import TransformersConfig
from app.weights.checkpoint import Checkpoint
from app.weights.files import join_names
from app.weights.form_choice import DTYPES, FormChoice, form_choice
from app.weights.forms import is_value
from armature_kernels.linear.int_panels import IntPanelLinear
from armature_kernels.linear.linear import FormFactory, Linear
from armature_kernels.linear.torchao_config import is_torchao

_LARGE_TABLE = 2**22  # values of an embedding that stays as it is stored
# Raised by classes that do not take a batch, or a prompt in parts.
LIBRARY_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
TriedT = TypeVar("TriedT")
_LOG = logging.getLogger(__name__)


def load_and_try(
    request: BuildRequest[Checkpoint], attempt: Callable[[PreTrainedModel], TriedT], purpose: str
) -> tuple[PreTrainedModel, BaseBackend, TriedT]:
    """Return the model, its backend, and what a first use of the model gives.

    A class whose own code reads the weights that this package would hold is loaded again as the library holds them,
    unless that is another precision. Raises `CheckpointInvalid`, whose sentence ends with the `purpose`.
    """
    plan, config = request.plan, request.checkpoint.model_config
    assert isinstance(config, TransformersConfig), "transformers computes the model"
    on_host = plan.placement.device in HOST_BACKENDS
    backend: BaseBackend = prepare_device(request, select_host_backend if on_host else select_device_backend)
    has_choice = plan.weights.precision in ("fp32", "bf16") and packs(plan, config)
    for is_packed in (True, False) if has_choice else (True,):
        model = load_for_plan(request, backend, is_packed=is_packed)
        try:
            return model, backend, attempt(model)
        except (*LIBRARY_ERRORS, StepFailed) as error:
            reason, kind = first_line(error), type(model).__name__
    how = "" if plan.weights.precision in ("fp32", "bf16") else f" in {plan.weights.precision}"
    raise CheckpointInvalid(
        f"transformers {transformers.__version__} loads this {kind}, but cannot {purpose}{how}: {reason}"
    )


def load_for_plan(
    request: BuildRequest[Checkpoint], backend: BaseBackend, *, is_packed: bool = True
) -> PreTrainedModel:
    """Return the model with its weights in the plan's precision; `is_packed` False: as the library holds them."""
    checkpoint, plan = request.checkpoint, request.plan
    assert isinstance(checkpoint.model_config, TransformersConfig), "transformers computes the model"
    request.report("loading weights by transformers")
    model = load_model(checkpoint, load_dtype(plan, checkpoint.stored_dtype), backend.device)
    if is_packed and packs(plan, checkpoint.model_config):
        pack_products(model, plan, checkpoint.model_config, percent_reporter(request.report, "packing weights"))
    convert_others(model, backend.dtype, keeps_tables=checkpoint.kind == "decoder")
    if is_packed and packs(plan, checkpoint.model_config) and plan.placement.device == "cpu":
        fuse(model)
    return model


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load the weights into the library's own class; no code of a checkpoint is looked at.

    Raises `CheckpointInvalid` if they cannot be loaded, or some are missing.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with compiler_absent():
            model, info = getattr(transformers, checkpoint.model_config.architecture).from_pretrained(
                checkpoint.directory,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise CheckpointInvalid(
            f"transformers {transformers.__version__} cannot load this checkpoint: {first_line(error)}"
        ) from error
    for what, names in (("are missing in", info["missing_keys"]), ("have another shape in", info["mismatched_keys"])):
        if names:
            listed = join_names(sorted(str(name) for name in names))
            raise CheckpointInvalid(
                f"{len(names)} weights of the {type(model).__name__} {what} the checkpoint: {listed}."
            )
    if info["unexpected_keys"]:
        _LOG.warning(
            "weights that %s does not use: %s", type(model).__name__, join_names(sorted(info["unexpected_keys"]))
        )
    model.eval().to(device)
    return model


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ---- weights in forms of this package ----------------------------------------------------------------------------


class PackedLinear(Linear):
    """Stands for a linear layer of the library, [..., in_features] to [..., out_features] in the dtype of its input.

    `weight` is empty: code that asks for its dtype finds that of the activations, and code that multiplies by it fails.
    """

    def __init__(self, name: str, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__((name,), weight.shape[1], weight.shape[0], bias is not None)
        self.weight, self.bias = torch.empty(0, dtype=dtype, device=weight.device), bias

    def forward(self, x: Any) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if isinstance(self.form, IntPanelLinear):
            product = self.form.multiply(rows.to(torch.bfloat16)).to(rows.dtype)
        else:
            product = self.multiply_wide(rows) if rows.dtype == torch.float32 else self.form.multiply(rows)
        return product.view(*x.shape[:-1], self.out_features)


def packs(plan: ServingPlan, config: TransformersConfig) -> bool:
    """Return True if weights are held in forms of this package; on a device, and in FP32 of tasks, the library multiplies.

    Few rows take half the time of the library's products or less, many about the same.
    """
    precision = plan.weights.precision
    is_own = precision in ("bf16", *QUANTIZED_PRECISIONS) or (precision == "fp32" and config.kind == "decoder")
    return is_torchao(precision) or (plan.placement.device == "cpu" and is_own)


def load_dtype(plan: ServingPlan, stored: str) -> torch.dtype:
    """Return the dtype in which weights are read: the one they are stored in, if they are quantized afterwards."""
    precision = plan.weights.precision
    if precision in QUANTIZED_PRECISIONS or is_torchao(precision):
        return DTYPES.get(stored, torch.float32)
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def pack_products(
    model: PreTrainedModel, plan: ServingPlan, config: TransformersConfig, progress: Callable[[int, int], None]
) -> None:
    """Pack the weights of linear layers in the plan's precision.

    Raises `PlanImpossible` if the precision is a config of torchao that cannot run here.
    """
    layers = [(name, one) for name, one in model.named_modules() if type(one) in (nn.Linear, Conv1D)]
    choice = replace(
        form_choice(plan, config, model.device), upgraded=frozenset(name for name, _ in layers if is_value(name))
    )
    if plan.weights.precision in ("bf16", *QUANTIZED_PRECISIONS):
        choice = replace(choice, dtype=torch.bfloat16)  # such a form takes activations in FP32 too
    dtype = DTYPES[plan.weights.dtype]
    joined = _join(model, dict(layers), choice, dtype) if plan.weights.precision in ("bf16", "fp32") else set()
    for done, (name, layer) in enumerate(layers):
        if name not in joined:
            _put(model, name, _packed(name, _weight(layer), layer.bias, choice, dtype))
        progress(done + 1, len(layers))


def convert_others(model: PreTrainedModel, dtype: torch.dtype, *, keeps_tables: bool) -> None:
    """Convert what is narrower to `dtype`; if large embeddings, which may be mapped, are kept, the rows looked up there."""
    for module in model.modules():
        values = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        values = [value for value in values if value.dtype in (torch.bfloat16, torch.float16) and value.dtype != dtype]
        if keeps_tables and values and isinstance(module, nn.Embedding) and module.weight.numel() >= _LARGE_TABLE:
            module.register_forward_hook(lambda module, ids, rows: rows.to(dtype))
        else:
            for value in values:
                value.data = value.data.to(dtype)


def packed_layer(name: str, layer: nn.Linear, form: FormFactory) -> PackedLinear:
    weight = layer.weight.detach()
    packed = PackedLinear(name, weight, layer.bias, weight.dtype)
    packed.form = form.pack(weight, None if layer.bias is None else layer.bias.detach())
    return packed


def _join(model: PreTrainedModel, layers: Mapping[str, Any], choice: FormChoice, dtype: torch.dtype) -> set[str]:
    """Pack the weights of layers that have one input as one, and return their names."""
    joined: set[str] = set()
    for names in siblings([name for name, layer in layers.items() if type(layer) is nn.Linear]):
        members = [layers[name] for name in names]
        if len({layer.in_features for layer in members}) > 1:
            continue
        biases = [one.weight.new_zeros(one.out_features) if one.bias is None else one.bias for one in members]
        bias = None if all(one.bias is None for one in members) else torch.cat(biases)
        packed = _packed(names[0], torch.cat([one.weight for one in members]), bias, choice, dtype)
        product = JoinedProduct(packed.forward, [layer.out_features for layer in members])
        for number, (name, layer) in enumerate(zip(names, members, strict=True)):
            _put(model, name, JoinedPart(product, number, layer, dtype))
        joined.update(names)
    return joined


def _put(model: PreTrainedModel, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)


def _weight(layer: Any) -> Tensor:
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight  # type: ignore[no-any-return]


def _packed(name: str, weight: Tensor, bias: Tensor | None, choice: FormChoice, dtype: torch.dtype) -> PackedLinear:
    weight = weight.detach().contiguous()
    packed = PackedLinear(name, weight, bias, dtype)
    packed.form = choice.packing(packed).pack(weight, None if bias is None else bias.detach())
    return packed
