"""Opens a Hugging Face checkpoint directory and judges it whole, in milliseconds and without torch, before anything is loaded.

Whatever is missing, damaged or not supported is refused with a sentence that names it and says what would be right.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.hardware.facts import Needs
from app.kernels.layout import LAYOUTS
from app.models.config import ModelConfig
from app.models.shapes import Shape, norms_of, products_of, tensors_of
from app.weights.headers import TensorEntry, read_header
from app.weights.recipes import find_recipe

INDEX = "model.safetensors.index.json"
STORED_DTYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PRECISION_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
ROUNDED = ("int8", "int4")
_LISTED = 4  # names in one message


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory that can be served: its words and where each of its tensors lies."""

    directory: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    model_config: ModelConfig
    tensors: Mapping[str, TensorEntry]

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    def needs(self) -> Needs:
        """What serving it asks of a machine. With tied embeddings the output layer's copy is the one that counts."""
        config = self.model_config
        sizes = {name: entry.num_elements for name, entry in self.tensors.items()}
        embedding = self.tensors["model.embed_tokens.weight"]
        # The embedding's table is never converted: rows are looked up as they are stored, and counted where no output layer holds them.
        table = 0 if config.tie_embeddings else embedding.nbytes
        products = sum(sizes.values()) - (0 if config.tie_embeddings else embedding.num_elements)
        return Needs(
            kind=config.kind,
            architecture=config.architecture,
            num_parameters=sum(sizes.values()),
            weight_bytes=sum(entry.nbytes for entry in self.tensors.values()),
            bytes_by_precision={
                **{name: products * size + table for name, size in PRECISION_BYTES.items()},
                **{name: rounded_bytes(config, name) + table for name in ROUNDED},
            },
            kv_elements_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim,
            max_model_len=config.max_model_len,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            stored_dtype=self.stored_dtype,
            num_kv_heads=config.num_kv_heads,
            int8_copy_bytes=sum(LAYOUTS["int8"].nbytes(*shape) + 4 * shape[0] * bias for shape, bias in products_of(config)),
        )

    @property
    def stored_dtype(self) -> str:
        """The dtype that most elements are stored in, as torch names it."""
        elements: Counter[str] = Counter()
        for entry in self.tensors.values():
            elements[entry.dtype] += entry.num_elements
        return STORED_DTYPES[elements.most_common(1)[0][0]]


def rounded_bytes(config: ModelConfig, precision: str) -> int:
    """Bytes of the products' weights, of biases and of norms (in FP32) where our own forms hold them: the same on x86 and on Arm."""
    recipe = find_recipe("cpu", "x86_64", precision)
    inner, output = (LAYOUTS[recipe.forms(is_output)[0]] for is_output in (False, True))
    layers = sum(inner.nbytes(*shape) + 4 * shape[0] * bias for shape, bias in products_of(config))
    heads = 2 * config.head_dim if config.qk_norm else 0
    norms = config.num_layers * (len(norms_of(config)) * config.hidden_size + heads) + config.hidden_size
    return layers + output.nbytes(config.vocab_size, config.hidden_size) + 4 * norms


def open_checkpoint(directory: Path) -> Checkpoint:
    """Reads and checks everything but the weights' values. Raises `CheckpointInvalid`."""
    if not directory.is_dir():
        what = "is a file; give the directory it lies in" if directory.exists() else "does not exist"
        raise CheckpointInvalid(
            f"Checkpoint {directory} {what}. A checkpoint is a directory with config.json, *.safetensors and tokenizer.json."
        )
    config = _read_json(directory / "config.json")
    if config.get("quantization_config"):
        raise CheckpointInvalid("config.json: the weights are quantised already (quantization_config); give the original ones.")
    model_config = ModelConfig.from_hf(config)
    tensors = _check_tensors(model_config, _find_tensors(directory))
    _check_tokenizer(directory)
    generation = directory / "generation_config.json"
    generation_config = _read_json(generation) if generation.exists() else {}
    return Checkpoint(directory, config, generation_config, model_config, tensors)


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise CheckpointInvalid(
            f"{file.parent} has no {file.name}; a checkpoint is the whole directory as transformers saves it."
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{file.name} in {file.parent} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise CheckpointInvalid(f"{file.name} in {file.parent} is not a JSON object.")
    return values


# ---- which files ------------------------------------------------------------------------------------------------------


def _find_tensors(directory: Path) -> dict[str, TensorEntry]:
    if (directory / INDEX).is_file():
        return _read_shards(directory)
    files = sorted(directory.glob("*.safetensors"))
    single = directory / "model.safetensors"
    if single in files or len(files) == 1:
        return read_header(single if single in files else files[0])
    if files:
        raise CheckpointInvalid(f"{directory} has {len(files)} *.safetensors files and no {INDEX} to say which tensor is where.")
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickles:
        raise CheckpointInvalid(
            f"{directory} has pickled weights only ({_names(pickles)}), which can run code when read and are refused. Where you trust"
            " them, convert: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR), then copy the tokenizer's files."
        )
    raise CheckpointInvalid(f"{directory} has no weights: no *.safetensors file.")


def _read_shards(directory: Path) -> dict[str, TensorEntry]:
    places = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) and Path(file).name == file for file in places.values()):
        raise CheckpointInvalid(f"{INDEX}: weight_map must map tensor names to names of files beside it.")
    files = sorted(set(places.values()))
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise CheckpointInvalid(
            f"{directory} lacks {len(missing)} of {len(files)} shards: {_names(missing)}. Copy or download them too."
        )
    headers = {file: read_header(directory / file) for file in files}
    absent = [f"{name} (in {file})" for name, file in places.items() if name not in headers[file]]
    if absent:
        raise CheckpointInvalid(f"{INDEX} names tensors that their files do not hold: {_names(absent)}.")
    return {name: headers[file][name] for name, file in places.items()}


def _check_tokenizer(directory: Path) -> None:
    if (directory / "tokenizer.json").is_file():
        return
    old = next((name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (directory / name).is_file()), None)
    hint = f"; {old} alone is not enough: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes it" if old else ""
    raise CheckpointInvalid(f"{directory} has no tokenizer.json{hint}.")


# ---- which tensors ----------------------------------------------------------------------------------------------------


def _check_tensors(config: ModelConfig, found: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors that serving uses. Others are refused too: a weight left out silently is a wrong answer."""
    wanted = tensors_of(config)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointInvalid(_missing_sentence(config, missing, len(wanted)))
    extra = [name for name in found if name not in wanted and not _is_harmless(name, config)]
    if extra:
        raise CheckpointInvalid(
            f"The weights hold {len(extra)} tensors that config.json's {config.architecture} has no use for: {_names(extra)}."
            " Check num_hidden_layers and the architecture."
        )
    for name, shape in wanted.items():
        _check_tensor(name, found[name], shape)
    return {name: found[name] for name in wanted}


def _missing_sentence(config: ModelConfig, missing: list[str], num_wanted: int) -> str:
    if missing == ["lm_head.weight"]:
        return "The weights have no lm_head.weight; if it shares the embedding's, config.json must say tie_word_embeddings: true."
    return f"The weights lack {len(missing)} of the {num_wanted} tensors of this {config.architecture}: {_names(missing)}."


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Old checkpoints carry computed rotary frequencies; some tied ones carry the embedding twice."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings)


def _check_tensor(name: str, entry: TensorEntry, shape: Shape) -> None:
    if entry.shape != shape:
        raise CheckpointInvalid(
            f"{entry.file.name}: {name} has shape {list(entry.shape)}, and config.json asks for {list(shape)}."
        )
    if entry.dtype not in STORED_DTYPES:
        raise CheckpointInvalid(f"{entry.file.name}: {name} is stored as {entry.dtype}; served are {', '.join(STORED_DTYPES)}.")


def _names(names: list[str]) -> str:
    shown = ", ".join(name[:120] for name in names[:_LISTED])
    return f"{shown} and {len(names) - _LISTED} more" if len(names) > _LISTED else shown
