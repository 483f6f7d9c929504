"""Opens a LoRA adapter's directory as peft saves it, and checks it against the model before anything is read.

An adapter is untrusted. What cannot be served exactly is refused by its name in peft's configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import Shape, is_expert, is_router, tensors_of
from app.models.decoders.stored import head_rows, our_name, row_factors
from app.weights.files import file_in, join_names, read_object
from app.weights.lora.rules import AdapterRules
from app.weights.safetensors import TensorEntry, read_header
from armature_kernels.linear.layout import MAX_LORA_RANK, lora_elements

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FLOATS = ("F32", "F16", "BF16")
# Saved with the adapter's name if a PeftModel's state is saved instead of the adapter.
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(\.(?P<adapter>[^.]+))?\.weight")
# What peft, torch.compile, DDP and FSDP put before or into names of modules.
_WRAPPERS = re.compile(
    r"^(base_model\.model\.|module\.|_fsdp_wrapped_module\.|_orig_mod\.)+"
    r"|(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_MAX_SHOWN = 80  # characters of a name or value from the adapter in a message

# The names in peft's configuration (0.21). `REFUSED` change the model in another way than y += scale * B A x, with what they
# are; values that are empty, false or "none" are peft's defaults.
REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "bias": "trained biases",
    "lora_bias": "biases of the adapter",
    "modules_to_save": "whole trained layers",
    "trainable_token_indices": "trained embeddings of tokens",
    "layer_replication": "repeated layers",
    "target_parameters": "adapters on parameters, such as a mixture's experts",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "routing between adapters",
    "megatron_config": "Megatron's layers",
    "monteclora_config": "MonteCLoRA",
    "lora_ga_config": "LoRA-GA",
    "kasa_config": "KaSA",
}
FOLLOWED = frozenset(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules layers_to_transform layers_pattern"
    " init_lora_weights".split()
)
# They are about training, or say where the adapter comes from. `fan_in_fan_out`: how the model's own weight is stored, which
# matters where the adapter is added to it.
WITHOUT_EFFECT = frozenset(
    "task_type auto_mapping base_model_name_or_path revision inference_mode peft_version lora_dropout fan_in_fan_out"
    " loftq_config eva_config corda_config velora_config megatron_core qalora_group_size runtime_config ensure_weight_tying".split()
)
_CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that change the base's weights


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """The matrices for one layer, A [rank, inputs] and B [outputs, rank], and the scale of their product.

    `rows`: the row of B for each output of our layer, if the family stores its weights in another order.
    """

    a: TensorEntry
    b: TensorEntry
    scale: float
    rows: tuple[int, ...] | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that was checked: its matrices by the name of the layer, such as `model.layers.0.self_attn.q_proj`."""

    directory: Path
    matrices: Mapping[str, LoraMatrices]

    @property
    def rank(self) -> int:
        return max(each.rank for each in self.matrices.values())


def adapted_layers(config: ModelConfig) -> dict[str, Shape]:
    """Return the linear layers that an adapter may change, with the shapes [outputs, inputs] of their weights."""
    found: dict[str, Shape] = {}
    for name, shape in tensors_of(config).items():
        if re.fullmatch(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj(_with_mqa)?\.weight", name) and len(shape) == 2:
            found[name.removesuffix(".weight")] = shape
    return found


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).exists() or (directory / WEIGHTS).exists()


def adapter_as_model_message(directory: Path) -> str:
    """Return the refusal of an adapter that was given as the model."""
    try:
        base = read_object(file_in(directory, CONFIG)).get("base_model_name_or_path")
    except (CheckpointInvalid, OSError):
        base = None
    known = isinstance(base, str) and base != ""
    return (
        f"{directory} is a LoRA adapter{f' for {str(base)[:_MAX_SHOWN]}' if known else ''}, not a model: give"
        f" --model {str(base)[:_MAX_SHOWN] if known else 'BASE'} --lora NAME={directory}."
    )


def open_adapter(directory: Path, config: ModelConfig, max_rank: int = MAX_LORA_RANK) -> LoraAdapter:
    """Read and check everything except the weights' values. Raises `CheckpointInvalid` or `OSError`."""
    if not directory.is_dir():
        raise CheckpointInvalid(f"The LoRA adapter {directory} is no directory here.")
    if not file_in(directory, CONFIG).is_file():
        raise CheckpointInvalid(
            f"{directory} is no LoRA adapter: it has no {CONFIG}. An adapter is the directory that peft's save_pretrained writes."
        )
    values = read_object(file_in(directory, CONFIG))
    _check_config(directory, values)
    file = file_in(directory, WEIGHTS)
    if not file.is_file():
        pickled = " It has adapter_model.bin, which can run code when read; convert it with peft's save_pretrained."
        has_pickle = (directory / "adapter_model.bin").exists()
        raise CheckpointInvalid(f"The LoRA adapter {directory} has no {WEIGHTS}.{pickled if has_pickle else ''}")
    layers, rules = adapted_layers(config), AdapterRules(f"{directory}/{CONFIG}", values)
    matrices = {}
    for stored, pair in _pair_matrices(directory, read_header(file)).items():
        module = _our_module(config, stored)
        order = head_rows(config, f"{module}.weight")
        if row_factors(config, f"{module}.weight"):
            raise CheckpointInvalid(
                f"{directory}: {module[:_MAX_SHOWN]} is multiplied by factors of config.json, and adapters of such products"
                " are not served: merge it into the model with peft's merge_and_unload."
            )
        if module in matrices:
            raise CheckpointInvalid(f"{directory}/{WEIGHTS}: {module[:_MAX_SHOWN]} has two matrices A.")
        checked = _check_layer(directory, (stored, module), pair, layers, rules)
        matrices[module] = checked if order is None else replace(checked, rows=order.stored_rows())
    highest = max(each.rank for each in matrices.values())
    if highest > max_rank:
        raise CheckpointInvalid(
            f"The LoRA adapter {directory} has rank {highest}, and at most {max_rank} is served"
            f"{f': max_lora_rank may be up to {MAX_LORA_RANK}' if max_rank < MAX_LORA_RANK else ''}."
        )
    return LoraAdapter(directory, matrices)


def _check_config(directory: Path, values: Mapping[str, Any]) -> None:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise CheckpointInvalid(
            f"{directory}/{CONFIG}: peft_type is {str(kind)[:_MAX_SHOWN]}, and only adapters of type LORA are served."
        )
    for name, what in REFUSED.items():
        if values.get(name) not in (None, False, "none", [], {}, ""):
            shown = str(values[name])[:_MAX_SHOWN]
            raise CheckpointInvalid(
                f"{directory}/{CONFIG}: {name} is {shown}, and {what} cannot be served: merge the adapter into the model with"
                " peft's merge_and_unload."
            )
    unknown = [
        name for name, value in values.items() if value and name not in FOLLOWED | WITHOUT_EFFECT | REFUSED.keys()
    ]
    if unknown:
        raise CheckpointInvalid(
            f"{directory}/{CONFIG}: {join_names([name[:_MAX_SHOWN] for name in unknown])} is not known and may change what the"
            " adapter does: merge the adapter into the model with peft's merge_and_unload."
        )
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGING_STARTS):
        raise CheckpointInvalid(
            f"{directory}/{CONFIG}: init_lora_weights is {start[:_MAX_SHOWN]}, which changes the model's own weights: convert the"
            " adapter with path_initial_model_for_weight_conversion of peft's save_pretrained."
        )


def _pair_matrices(directory: Path, found: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    names = {name: _MATRIX.fullmatch(name) for name in found}
    adapters = {match["adapter"] for match in names.values() if match is not None}
    if len(adapters) > 1:
        several = join_names(sorted(str(name or "no name")[:_MAX_SHOWN] for name in adapters))
        raise CheckpointInvalid(f"{directory}/{WEIGHTS} holds several adapters ({several}), and a file must have one.")
    pairs: dict[str, dict[str, TensorEntry]] = {}
    for name, match in names.items():
        if match is None:
            raise CheckpointInvalid(f"{directory}/{WEIGHTS}: {name[:_MAX_SHOWN]} {_what(name)}")
        module = _WRAPPERS.sub("", match["module"])
        if match["matrix"] in pairs.setdefault(module, {}):
            raise CheckpointInvalid(f"{directory}/{WEIGHTS}: {module[:_MAX_SHOWN]} has two matrices {match['matrix']}.")
        pairs[module][match["matrix"]] = found[name]
    if not pairs:
        raise CheckpointInvalid(f"{directory}/{WEIGHTS} has no matrices of an adapter.")
    single = [name for name, pair in pairs.items() if len(pair) < 2]
    if single:
        raise CheckpointInvalid(
            f"{directory}/{WEIGHTS}: only one of lora_A and lora_B is there for {join_names(single)}."
        )
    return pairs


def _our_module(config: ModelConfig, stored: str) -> str:
    """Return our name of a module; some families store others, and a model without its output layer has no prefix."""
    name = our_name(config, f"{stored}.weight")
    module = stored if name is None else name.removesuffix(".weight")
    return f"model.{module}" if module.startswith("layers.") else module


def _what(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "belongs to DoRA, which cannot be served: merge the adapter into the model with peft's merge_and_unload."
    if "lora_embedding" in name or "embed_tokens" in name or "lm_head" in name:
        return "changes the embedding or the output layer, and only adapters of the layers' linear products are served."
    return "is no matrix of a LoRA adapter (lora_A.weight or lora_B.weight of a layer)."


def _why_not(module: str) -> str:
    if "embed_tokens" in module or "lm_head" in module:
        return _what(module).removeprefix("changes ")
    if is_expert(module) or ".mlp.shared_expert" in module or is_router(module):
        return (
            "which is part of a mixture of experts, and only the linear layers outside of it take adapters: merge the"
            " adapter into the model with peft's merge_and_unload."
        )
    return "which is no linear layer of this model."


def _check_layer(
    directory: Path,
    names: tuple[str, str],
    pair: Mapping[str, TensorEntry],
    layers: Mapping[str, Shape],
    rules: AdapterRules,
) -> LoraMatrices:
    where, a, b = f"{directory}/{WEIGHTS}", pair["A"], pair["B"]
    stored, module = names
    if module not in layers:
        raise CheckpointInvalid(f"{where}: it changes {module[:_MAX_SHOWN]}, {_why_not(module)}")
    outputs, inputs = layers[module]
    for matrix, entry in pair.items():
        if entry.dtype not in _FLOATS:
            raise CheckpointInvalid(
                f"{where}: lora_{matrix} of {module} is stored as {entry.dtype}; supported: {', '.join(_FLOATS)}."
            )
    rank = a.shape[0] if len(a.shape) == 2 else 0
    if rank < 1 or a.shape != (rank, inputs) or b.shape != (outputs, rank):
        raise CheckpointInvalid(
            f"{where}: the matrices of {module} have the shapes {list(a.shape)[:4]} and {list(b.shape)[:4]}; this model needs"
            f" [rank, {inputs}] and [{outputs}, rank]. Was the adapter made for another model?"
        )
    rules.check_adapted(stored, rank)
    return LoraMatrices(a, b, rules.scale(stored, rank))


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """The adapters that a server may serve: those that it loads at its start, by name, and places for as many as `slots`.

    `layers` are the layers that adapters may change, with the shapes of their weights.
    """

    layers: Mapping[str, Shape]
    named: Mapping[str, LoraAdapter]
    slots: int
    max_rank: int

    @property
    def num_elements(self) -> int:
        """Elements of the packed weights of all slots, if each adapter changes every layer with the highest rank."""
        return self.slots * sum(lora_elements(self.max_rank, *shape) for shape in self.layers.values())
