"""Configuration files of sentence-transformers: pooling, maximum length and prompts of an encoder.

An unsupported module of `modules.json` is refused, since ignoring it would give other vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.models.encoders.config import DenseConfig, PoolingConfig, PoolingMode
from app.models.encoders.config_reader import TORCH_ACTIVATIONS, SentenceConfig, score_function
from app.weights.files import file_in, files_in, read_json, read_object, read_optional

MODULES = "modules.json"
_POOLING: Mapping[str, PoolingMode] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# Modes as flags. Several may be set; their vectors are concatenated in this order.
_POOLING_FLAGS: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_MAX_MODEL_LENGTH = 1_000_000  # a tokenizer without a limit has 10^30


@dataclass(frozen=True, slots=True)
class SentenceModule:
    """An entry of modules.json: the last part of its class name, and the folder of its configuration."""

    kind: str
    folder: str


def read_sentence_config(directory: Path) -> SentenceConfig:
    """Read the configuration in a checkpoint directory. Raises `CheckpointInvalid` if vectors would differ."""
    longest = _max_tokens(directory)
    if not (directory / MODULES).exists():
        return SentenceConfig(max_tokens=longest)
    modules = [one for one in read_modules(directory) if one.kind != "Dropout"]
    config = ConfigReader(
        read_optional(file_in(directory, "config_sentence_transformers.json")), "config_sentence_transformers.json"
    )
    kind = config.text("model_type", "SentenceTransformer")
    lowercases = _transformer_config(directory).boolean("do_lower_case", False)
    if kind == "CrossEncoder":
        _check_module_kinds([one.kind for one in modules], ("Transformer",))
        score = config.values.get("activation_fn")
        scores = None if score is None else score_function(score)
        prompts, default = _read_prompts(config)
        return SentenceConfig(None, longest, lowercases, scores, prompts, default)
    if kind != "SentenceTransformer":
        raise CheckpointInvalid(
            f"This is a {kind} of sentence-transformers; supported: SentenceTransformer and CrossEncoder."
        )
    return SentenceConfig(_pooling(directory, modules, config), longest, lowercases)


def _max_tokens(directory: Path) -> int | None:
    """Return the maximum length, which newer directories leave to the tokenizer."""
    config = _transformer_config(directory)
    if config.has("max_seq_length"):
        return config.integer("max_seq_length")
    longest = read_optional(file_in(directory, "tokenizer_config.json")).get("model_max_length")
    return int(longest) if isinstance(longest, int) and 0 < longest <= _MAX_MODEL_LENGTH else None


def _transformer_config(directory: Path) -> ConfigReader:
    """Read sentence_bert_config.json or one of its older names, such as sentence_roberta_config.json."""
    found = files_in(directory, "sentence_*_config.json")
    return ConfigReader(read_object(found[0]), found[0].name) if found else ConfigReader({})


def read_modules(directory: Path) -> list[SentenceModule]:
    """Return the modules that modules.json lists, in order. Raises `CheckpointInvalid` or `OSError`."""
    listed = read_json(file_in(directory, MODULES))
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise CheckpointInvalid(f"{MODULES} must hold a list of objects.")
    modules = [SentenceModule(str(one.get("type", "")).rpartition(".")[2], str(one.get("path", ""))) for one in listed]
    for one in modules:
        if one.folder != Path(one.folder).name:
            raise CheckpointInvalid(f"{MODULES}: {one.folder!r} is not a folder of this directory.")
    if modules and modules[0].kind == "Transformer" and modules[0].folder:
        raise CheckpointInvalid(
            f'{MODULES}: config.json and weights are in {modules[0].folder}; move them up and set "path": "" there.'
        )
    return modules


def _check_module_kinds(kinds: Sequence[str], expected: Sequence[str]) -> None:
    if list(kinds) != list(expected):
        raise CheckpointInvalid(
            f"{MODULES} lists {', '.join(kinds) or 'nothing'}; supported: Transformer, Pooling, any number of Dense, then Normalize,"
            " or a cross-encoder's Transformer alone."
        )


def _pooling(directory: Path, modules: Sequence[SentenceModule], config: ConfigReader) -> PoolingConfig:
    dense = [one for one in modules if one.kind == "Dense"]
    normalizes = modules[-1].kind == "Normalize" if modules else False
    _check_module_kinds(
        [one.kind for one in modules], ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalizes]
    )
    file = file_in(directory, f"{modules[1].folder}/config.json")
    pooling = ConfigReader(read_object(file), f"{modules[1].folder}/config.json")
    prompts, default = _read_prompts(config)
    return PoolingConfig(
        modes=_pooling_modes(pooling),
        dense=tuple(_dense(directory, one.folder) for one in dense),
        normalizes=normalizes,
        prompts=prompts,
        default_prompt=default,
        skips_prompt=not pooling.boolean("include_prompt", True),
    )


def _read_prompts(config: ConfigReader) -> tuple[Mapping[str, str], str | None]:
    prompts = config.section("prompts").values
    if not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointInvalid(f"{config.where}: prompts must map names to texts.")
    default = config.text("default_prompt_name", "") or None
    if default is not None and default not in prompts:
        raise CheckpointInvalid(
            f"{config.where}: default_prompt_name {default!r} is not one of {', '.join(prompts) or 'its prompts'}."
        )
    return prompts, default


def _pooling_modes(pooling: ConfigReader) -> tuple[PoolingMode, ...]:
    pooling_mode: Any = pooling.values.get("pooling_mode")
    if pooling_mode is None:
        unknown = [name for name in pooling.values if name.startswith("pooling_mode_") and name not in _POOLING_FLAGS]
        if unknown:
            raise CheckpointInvalid(
                f"{pooling.where}: {', '.join(unknown)} is not known; known are {', '.join(_POOLING_FLAGS)}."
            )
        return tuple(mode for flag, mode in _POOLING_FLAGS.items() if pooling.boolean(flag, False)) or ("mean",)
    names = pooling_mode if isinstance(pooling_mode, list) else [pooling_mode]
    if not names or not all(isinstance(name, str) and name in _POOLING for name in names):
        raise CheckpointInvalid(
            f"{pooling.where}: pooling_mode {pooling_mode!r} is not known; known are {', '.join(_POOLING)}."
        )
    return tuple(_POOLING[name] for name in names)


def _dense(directory: Path, folder: str) -> DenseConfig:
    config = ConfigReader(read_object(file_in(directory, f"{folder}/config.json")), f"{folder}/config.json")
    path = config.text("activation_function", "torch.nn.modules.activation.Tanh")
    activation = TORCH_ACTIVATIONS.get(path.rpartition(".")[2])
    if activation is None or not path.startswith("torch."):
        raise CheckpointInvalid(
            f"{config.where}: activation_function {path} is not known; known are {', '.join(TORCH_ACTIVATIONS)}."
        )
    if (
        config.boolean("use_residual", False)
        or config.text("module_input_name", "sentence_embedding") != "sentence_embedding"
    ):
        raise CheckpointInvalid(
            f"{config.where}: use_residual and module_input_name are not supported; Dense must follow Pooling."
        )
    sizes = config.integer("in_features"), config.integer("out_features")
    return DenseConfig(folder, *sizes, bias=config.boolean("bias", True), activation=activation)
