"""What a directory of sentence-transformers says beside config.json: how a text becomes a vector, how long it may be, its prompts.

`modules.json` lists what a text passes through. A module that we do not have is refused by name: leaving it out gives other vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.models.encoder_config import DenseConfig, PoolingConfig, PoolingMode
from app.models.encoder_heads import TORCH_ACTIVATIONS, score_function
from app.models.encoder_reading import SentenceWords
from app.models.fields import Fields
from app.weights.json_file import read_json, read_object, read_optional

MODULES = "modules.json"
_POOLING: Mapping[str, PoolingMode] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# As flags, of which several may be set, in the order in which their vectors stand side by side.
_POOLING_FLAGS: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_LONGEST = 1_000_000  # a tokenizer that knows of no limit says 10^30


@dataclass(frozen=True, slots=True)
class _Module:
    """One of modules.json: the last word of its class, and the folder of what it knows."""

    kind: str
    folder: str


def sentence_words(directory: Path) -> SentenceWords:
    """Raises `CheckpointInvalid` where vectors would not be those that sentence-transformers makes."""
    longest = _max_tokens(directory)
    if not (directory / MODULES).exists():
        return SentenceWords(max_tokens=longest)
    modules = [one for one in _modules(directory) if one.kind != "Dropout"]
    said = Fields(read_optional(directory / "config_sentence_transformers.json"), "config_sentence_transformers.json")
    kind = said.text("model_type", "SentenceTransformer")
    lowercases = _of_transformer(directory).boolean("do_lower_case", False)
    if kind == "CrossEncoder":
        _expect([one.kind for one in modules], ("Transformer",))
        score = said.values.get("activation_fn")
        return SentenceWords(None, longest, lowercases, None if score is None else score_function(score))
    if kind != "SentenceTransformer":
        raise CheckpointInvalid(f"This is a {kind} of sentence-transformers; served are SentenceTransformer and CrossEncoder.")
    return SentenceWords(_pooling(directory, modules, said), longest, lowercases)


def _max_tokens(directory: Path) -> int | None:
    """Newer directories leave it to the tokenizer."""
    said = _of_transformer(directory)
    if said.has("max_seq_length"):
        return said.integer("max_seq_length")
    longest = read_optional(directory / "tokenizer_config.json").get("model_max_length")
    return int(longest) if isinstance(longest, int) and 0 < longest <= _LONGEST else None


def _of_transformer(directory: Path) -> Fields:
    """Beside BERT's own name for it there were sentence_roberta_config.json and others."""
    found = sorted(directory.glob("sentence_*_config.json"))
    return Fields(read_object(found[0]), found[0].name) if found else Fields({})


def _modules(directory: Path) -> list[_Module]:
    listed = read_json(directory / MODULES)
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise CheckpointInvalid(f"{MODULES} must hold a list of objects.")
    modules = [_Module(str(one.get("type", "")).rpartition(".")[2], str(one.get("path", ""))) for one in listed]
    for one in modules:
        if one.folder != Path(one.folder).name:
            raise CheckpointInvalid(f"{MODULES}: {one.folder!r} is not a folder of this directory.")
    if modules and modules[0].kind == "Transformer" and modules[0].folder:
        raise CheckpointInvalid(
            f'{MODULES}: config.json and weights lie in {modules[0].folder}; move them up and say "path": "" there.'
        )
    return modules


def _expect(kinds: Sequence[str], wanted: Sequence[str]) -> None:
    if list(kinds) != list(wanted):
        raise CheckpointInvalid(
            f"{MODULES} lists {', '.join(kinds) or 'nothing'}; served are Transformer, Pooling, any number of Dense, then Normalize,"
            " and a cross-encoder's Transformer alone."
        )


def _pooling(directory: Path, modules: Sequence[_Module], said: Fields) -> PoolingConfig:
    dense = [one for one in modules if one.kind == "Dense"]
    normalizes = modules[-1].kind == "Normalize" if modules else False
    _expect([one.kind for one in modules], ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalizes])
    file = directory / modules[1].folder / "config.json"
    pooling = Fields(read_object(file), f"{modules[1].folder}/config.json")
    prompts = said.section("prompts").values
    if not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointInvalid(f"{said.where}: prompts must map names to texts.")
    default = said.text("default_prompt_name", "") or None
    if default is not None and default not in prompts:
        raise CheckpointInvalid(
            f"{said.where}: default_prompt_name {default!r} is not one of {', '.join(prompts) or 'its prompts'}."
        )
    return PoolingConfig(
        modes=_modes(pooling),
        dense=tuple(_dense(directory, one.folder) for one in dense),
        normalizes=normalizes,
        prompts=prompts,
        default_prompt=default,
        skips_prompt=not pooling.boolean("include_prompt", True),
    )


def _modes(pooling: Fields) -> tuple[PoolingMode, ...]:
    named: Any = pooling.values.get("pooling_mode")
    if named is None:
        unknown = [name for name in pooling.values if name.startswith("pooling_mode_") and name not in _POOLING_FLAGS]
        if unknown:
            raise CheckpointInvalid(f"{pooling.where}: {', '.join(unknown)} is not known; known are {', '.join(_POOLING_FLAGS)}.")
        return tuple(mode for flag, mode in _POOLING_FLAGS.items() if pooling.boolean(flag, False)) or ("mean",)
    names = named if isinstance(named, list) else [named]
    if not names or not all(isinstance(name, str) and name in _POOLING for name in names):
        raise CheckpointInvalid(f"{pooling.where}: pooling_mode {named!r} is not known; known are {', '.join(_POOLING)}.")
    return tuple(_POOLING[name] for name in names)


def _dense(directory: Path, folder: str) -> DenseConfig:
    said = Fields(read_object(directory / folder / "config.json"), f"{folder}/config.json")
    path = said.text("activation_function", "torch.nn.modules.activation.Tanh")
    activation = TORCH_ACTIVATIONS.get(path.rpartition(".")[2])
    if activation is None or not path.startswith("torch."):
        raise CheckpointInvalid(
            f"{said.where}: activation_function {path} is not known; known are {', '.join(TORCH_ACTIVATIONS)}."
        )
    if said.boolean("use_residual", False) or said.text("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise CheckpointInvalid(
            f"{said.where}: use_residual and module_input_name are not served; Dense follows what was pooled."
        )
    sizes = said.integer("in_features"), said.integer("out_features")
    return DenseConfig(folder, *sizes, bias=said.boolean("bias", True), activation=activation)
