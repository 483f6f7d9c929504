"""Opens a Hugging Face checkpoint directory and validates it completely, without torch, before anything is loaded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from app.errors import CheckpointInvalid, NotNative
from app.hardware.facts import Needs
from app.models.config_reader import AskedValues, unknown_keys
from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import Shape, active_weights, is_expert, tables_of, tensors_of
from app.models.encoders.config import EncoderConfig, encoder_products_of, encoder_tables_of, encoder_tensors_of
from app.models.encoders.config_reader import SentenceConfig, is_encoder, names_encoder, read_encoder
from app.models.transformers_config import OWN_CODE, TransformersConfig, class_table
from app.models.transformers_tasks import TaskConfig, find_task_config
from app.weights.files import (
    check_directory,
    check_not_lfs_pointer,
    file_in,
    files_in,
    folder_in,
    incomplete_copy_note,
    join_names,
    read_object,
    read_optional,
)
from app.weights.forms import (
    INT4,
    codes_precision,
    decoder_bytes,
    decoder_device_bytes,
    encoder_bytes,
    encoder_device_bytes,
    fp8_blocks,
    int8_copy_bytes,
    layer_weights,
    stored_type,
)
from app.weights.gguf.config import config_values, family_of
from app.weights.gguf.mmproj import PicturePart, find_picture_part, whole_config
from app.weights.gguf.reader import find_gguf, read_gguf
from app.weights.gguf.tensors import checkpoint_tensors
from app.weights.gguf.tokenizer import check_tokenizer
from app.weights.lora.adapter import WEIGHTS as ADAPTER_WEIGHTS
from app.weights.lora.adapter import adapter_as_model_message, is_adapter
from app.weights.quantized.entries import is_zero_bias
from app.weights.quantized.methods import check_not_quantized, join_weights, quantization_method
from app.weights.safetensors import TensorEntry, read_header
from app.weights.sentence_transformers import MODULES, read_sentence_config
from app.weights.tensor_names import RenamedTensors, has_own_head, rename_decoder_tensors, rename_tensors
from armature_kernels.linear.layout import LAYOUTS

log = logging.getLogger(__name__)

AnyConfig = ModelConfig | EncoderConfig | TransformersConfig
EngineChoice = Literal["auto", "native", "transformers", "onnxruntime"]  # the setting `engine`

INDEX = "model.safetensors.index.json"
STORED_DTYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SINGLE_FILE = "model.safetensors"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")
# Parts of the names of tables, of which rows are looked up, in the models of transformers.
_TABLES = ("embed", "wte.", "wpe.", "shared.", "relative_attention")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory or a GGUF file that can be served: its configuration and the location of each tensor.

    An encoder's tensors have this package's names. `gguf` is the file, or the first of its parts, if there is one; then
    `config` and `generation_config` are made from its metadata.
    """

    directory: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    model_config: AnyConfig
    tensors: Mapping[str, TensorEntry]
    given_name: str = ""  # the name under which it was requested, if that was not its directory
    gguf: Path | None = None
    picture_part: PicturePart | None = None  # of a GGUF file

    @property
    def name(self) -> str:
        """Name of the model: the requested name, else that of the GGUF file or the directory."""
        return self.given_name or (self.directory.resolve().name if self.gguf is None else self.gguf.stem)

    @property
    def location(self) -> Path:
        """Where the model and its tokenizer are: the GGUF file, or the directory."""
        return self.gguf or self.directory

    @property
    def content_files(self) -> list[Path]:
        config = self.gguf or self.directory / "config.json"
        return sorted({config, *(entry.file for entry in self.tensors.values())})

    @property
    def kind(self) -> Literal["decoder", "encoder"]:
        return self.model_config.kind

    @property
    def decoder(self) -> ModelConfig:
        """Configuration of a decoder. Raises `CheckpointInvalid` for an encoder."""
        if isinstance(self.model_config, ModelConfig):
            return self.model_config
        if isinstance(self.model_config, TransformersConfig):
            raise CheckpointInvalid(f"{self.directory} ({self.model_config.architecture}) is computed by transformers.")
        raise CheckpointInvalid(
            f"{self.directory} is an encoder ({self.model_config.architecture}); a decoder is needed here."
        )

    @property
    def encoder(self) -> EncoderConfig:
        """Configuration of an encoder. Raises `CheckpointInvalid` for a decoder."""
        if isinstance(self.model_config, EncoderConfig):
            return self.model_config
        raise CheckpointInvalid(
            f"{self.directory} is a decoder ({self.model_config.architecture}); an encoder is needed here."
        )

    def needs(self) -> Needs:
        config, tensors = self.model_config, self.tensors
        if isinstance(config, TransformersConfig):
            return self._transformers_needs(config)
        if isinstance(config, ModelConfig):
            host_bytes, device_bytes = decoder_bytes(config, tensors), decoder_device_bytes(config, tensors)
            kv_heads = config.cache_heads
            kv_elements = 2 * config.cache_layers * kv_heads * config.cache_head_dim
            tables = tables_of(config)
            products, experts = active_weights(config), config.experts
        else:
            host_bytes, device_bytes = encoder_bytes(config, tensors), encoder_device_bytes(config, tensors)
            kv_heads, kv_elements, tables, experts = config.num_kv_heads, 0, list(encoder_tables_of(config)), None
            products = sum(rows * columns for (rows, columns), _ in encoder_products_of(config))
        return Needs(
            kind=config.kind,
            architecture=config.architecture,
            num_parameters=sum(entry.num_elements for entry in tensors.values()),
            weight_bytes=sum(entry.nbytes for entry in tensors.values()),
            bytes_by_precision=host_bytes,
            kv_elements_per_token=kv_elements,
            max_model_len=config.max_model_len,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            stored_dtype=self.stored_dtype,
            num_kv_heads=kv_heads,
            num_kv_layers=config.cache_layers if isinstance(config, ModelConfig) else 0,
            state_bytes=4 * sum(config.state_sizes) if isinstance(config, ModelConfig) else 0,
            int8_copy_bytes=int8_copy_bytes(config),
            device_bytes_by_precision=device_bytes,
            operations_per_token=2.0 * products,
            table_bytes=sum(tensors[name].value_bytes for name in tables),
            layer_weights=layer_weights(config),
            stored_quantization=stored_type(tensors),
            codes_precision=codes_precision(tensors),
            keeps_fp8=bool(fp8_blocks(tensors)),
            has_vectors=not isinstance(config, ModelConfig) and "embedding" in config.outputs,
            expert_weights=sum(entry.num_elements for name, entry in tensors.items() if is_expert(name)),
            expert_use=1.0 if experts is None else experts.routing.top_k / experts.routing.num_experts,
        )

    def _transformers_needs(self, config: TransformersConfig) -> Needs:
        elements = sum(entry.num_elements for entry in self.tensors.values())
        is_plain = {name: ".experts." not in name for name in self.tensors}
        experts = sum(entry.num_elements for name, entry in self.tensors.items() if not is_plain[name])
        matrices = [
            entry.shape
            for name, entry in self.tensors.items()
            if len(entry.shape) == 2 and is_plain[name] and not any(table in name for table in _TABLES)
        ]
        weights = Counter[int]()
        for outputs, inputs in matrices:
            weights[inputs] += outputs * inputs
        others = 4 * (elements - weights.total() - experts) + 2 * experts
        head = (config.vocab_size, config.hidden_size)
        if config.kind == "decoder" and head not in matrices:  # it is tied to the embedding, and packed beside it
            matrices.append(head)
        elif head in matrices:
            weights[config.hidden_size] -= config.vocab_size * config.hidden_size
        exact = {"fp32": 4 * elements, "bf16": 2 * elements, "fp16": 2 * elements}
        in_forms = {
            name: others + sum(LAYOUTS[form].nbytes(*shape) for shape in matrices)
            for name, form in (("int8", "int8/32"), ("int4", INT4))
        }
        return Needs(
            kind=config.kind,
            engine="transformers",
            architecture=config.architecture,
            num_parameters=elements,
            weight_bytes=sum(entry.nbytes for entry in self.tensors.values()),
            bytes_by_precision={**exact, **in_forms},
            device_bytes_by_precision=exact,
            expert_weights=experts,
            layer_weights=weights,
            kv_elements_per_token=(
                0 if config.kind == "encoder" else 2 * config.num_layers * config.num_kv_heads * config.head_dim
            ),
            max_model_len=config.max_model_len,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            stored_dtype=self.stored_dtype,
            num_kv_heads=config.num_kv_heads,
        )

    @property
    def stored_dtype(self) -> str:
        elements: Counter[str] = Counter()
        for entry in self.tensors.values():
            if entry.dtype in STORED_DTYPES:
                elements[entry.dtype] += entry.num_elements
        return STORED_DTYPES[elements.most_common(1)[0][0]]


def open_checkpoint(path: Path, engine: EngineChoice = "auto", mmproj: Path | None = None) -> Checkpoint:
    """Read and check all but the weights' values of a directory or GGUF file. Raises `CheckpointInvalid`, `OSError`.

    `mmproj` is the file with the picture part of a GGUF model; None: one that lies beside it.
    """
    gguf = find_gguf(path)
    if gguf is not None and engine == "transformers":
        raise CheckpointInvalid(f"engine is transformers, but {gguf.name} is a GGUF file: give a checkpoint directory.")
    if gguf is not None:
        return _open_gguf(gguf, mmproj)
    if mmproj is not None:
        raise CheckpointInvalid(
            f"mmproj is for GGUF models, and {path} is none: a directory has its picture part itself."
        )
    check_directory(path)
    return _open_directory(path, engine)


def _open_gguf(file: Path, mmproj: Path | None) -> Checkpoint:
    model = read_gguf(file)
    family, config = family_of(model), config_values(model)
    try:
        part = find_picture_part(model.file, family.architecture, config["hidden_size"], mmproj)
        values = whole_config(config, family.architecture if part is None else part.reader)
        model_config = ModelConfig.from_hf(values)
        tensors = decoder_tensors(model_config, checkpoint_tensors(model, family, config))
    except CheckpointInvalid as error:
        raise CheckpointInvalid(error.message.replace("config.json", f"the metadata of {model.file.name}")) from error
    check_tokenizer(model)
    return Checkpoint(model.file.parent, values, {}, model_config, tensors, gguf=model.file, picture_part=part)


def _open_directory(directory: Path, engine: EngineChoice) -> Checkpoint:
    if is_adapter(directory) and not (directory / "config.json").exists():
        raise CheckpointInvalid(adapter_as_model_message(directory))
    config, model_config = read_model_config(directory, engine)
    method = quantization_method(config)
    if method and isinstance(model_config, TransformersConfig):
        raise CheckpointInvalid(
            f"config.json: quantized weights of a {model_config.architecture} are not supported, which transformers computes here;"
            " use the original weights."
        )
    if method and model_config.kind == "encoder":
        raise CheckpointInvalid(
            "config.json: quantized weights are supported for decoders only; use the original weights."
        )
    found = stored_tensors(directory, config, _conversion(model_config, directory))
    if not method and (model_config.kind == "decoder" or isinstance(model_config, TaskConfig)):
        check_not_quantized(found)
    if isinstance(model_config, ModelConfig) and model_config.tie_embeddings and has_own_head(found, model_config):
        log.warning("lm_head.weight differs from the embedding and is used, although config.json ties them")
        model_config = replace(model_config, tie_embeddings=False)
    tensors: Mapping[str, TensorEntry] = found  # transformers checks their names and shapes itself
    if isinstance(model_config, EncoderConfig):
        tensors = _encoder_tensors(model_config, found, directory)
    elif isinstance(model_config, ModelConfig):
        tensors = decoder_tensors(model_config, found)
    reads_no_text = isinstance(model_config, ModelConfig) and model_config.is_draft_head
    if not isinstance(model_config, TaskConfig) and not reads_no_text:  # transformers reads its own
        _check_tokenizer(directory)
    return Checkpoint(
        directory, config, read_optional(file_in(directory, "generation_config.json")), model_config, tensors
    )


def read_model_config(directory: Path, engine: EngineChoice = "auto") -> tuple[Mapping[str, Any], AnyConfig]:
    """Return config.json and the model that the directory describes. Raises `CheckpointInvalid` or `OSError`."""
    sentence_config = read_sentence_config(directory)
    config = read_object(file_in(directory, "config.json"))
    quantization_method(config)
    if engine == "transformers":
        return config, find_task_config(config) or TransformersConfig.from_hf(config)
    is_one = is_encoder(config, sentence_config) or names_encoder(config)
    try:
        return config, _native_config(AskedValues(config), sentence_config if is_one else None)
    except NotNative as refusal:
        # What sentence-transformers does after such a model is not known to transformers.
        task_config = None if sentence_config.pooling is not None else find_task_config(config)
        is_refused = is_one and task_config is None and class_table() is not None
        if is_refused and config.get("auto_map"):
            raise CheckpointInvalid(f"{refusal.message} {OWN_CODE}") from None
        if engine == "native" or is_refused:
            raise
        if task_config is not None:
            return config, task_config
        try:
            return config, TransformersConfig.from_hf(config)
        except CheckpointInvalid as reason:
            raise CheckpointInvalid(f"{refusal.message} {reason.message}") from None


def _native_config(values: AskedValues, sentence_config: SentenceConfig | None) -> ModelConfig | EncoderConfig:
    """Return the configuration for a native engine. `sentence_config` None: a decoder's."""
    config = ModelConfig.from_hf(values) if sentence_config is None else read_encoder(values, sentence_config)
    unknown = unknown_keys(values)
    if unknown:
        log.info("config.json: not known here and without effect: %s", join_names([name[:80] for name in unknown]))
    return config


# ---- which files ----------------------------------------------------------------------------------------------------


def _conversion(config: AnyConfig, directory: Path) -> str:
    if (directory / MODULES).is_file():
        library = "CrossEncoder" if isinstance(config, EncoderConfig) and config.labels else "SentenceTransformer"
        return f"sentence_transformers.{library}(DIR).save_pretrained(NEW_DIR)"
    kind = "AutoModelForCausalLM"
    if isinstance(config, EncoderConfig):
        kind = "AutoModelForSequenceClassification" if config.labels else "AutoModel"
    tokenizer = "then copy the tokenizer's files (tokenizer.json, tokenizer_config.json)"
    return f"transformers.{kind}.from_pretrained(DIR).save_pretrained(NEW_DIR), {tokenizer}"


def stored_tensors(directory: Path, config: Mapping[str, Any], conversion: str = "") -> dict[str, TensorEntry]:
    """Return all tensors of a directory by their stored names; quantized ones are joined from their parts."""
    method, found = quantization_method(config), _find_tensors(directory, conversion)
    return join_weights(method, config, found) if method else found


def _find_tensors(directory: Path, conversion: str) -> dict[str, TensorEntry]:
    if file_in(directory, INDEX).is_file():
        return _read_shards(directory)
    files = [file for file in files_in(directory, "*.safetensors") if file.name != ADAPTER_WEIGHTS]
    single = directory / SINGLE_FILE
    if single in files or len(files) == 1:
        others = [file.name for file in files if file != single]
        if single in files and others:
            log.info("the weights are those of %s; not read: %s", SINGLE_FILE, join_names(others))
        return read_header(single if single in files else files[0])
    if files:
        raise CheckpointInvalid(
            f"{directory} has {len(files)} *.safetensors files and no {INDEX} to say which tensor is where."
        )
    pickles = sorted(file.name for pattern in PICKLE_PATTERNS for file in directory.glob(pattern))
    if pickles:
        raise CheckpointInvalid(
            f"{directory} has pickled weights only ({join_names(pickles)}), which can run code when read and are refused. Where you trust"
            f" them, convert the model with Python: {conversion}."
        )
    raise CheckpointInvalid(f"{directory} has no weights: no *.safetensors file.{incomplete_copy_note(directory)}")


def shard_names(directory: Path) -> list[str]:
    """Return the files that the index names. Raises `CheckpointInvalid` or `OSError`."""
    return sorted(set(_weight_map(directory).values()))


def _weight_map(directory: Path) -> Mapping[str, str]:
    places = read_object(file_in(directory, INDEX)).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in places.values()
    ):
        raise CheckpointInvalid(f"{INDEX}: weight_map must map tensor names to names of files in the same directory.")
    return places


def _read_shards(directory: Path) -> dict[str, TensorEntry]:
    places = _weight_map(directory)
    files = sorted(set(places.values()))
    missing = [file for file in files if not file_in(directory, file).is_file()]
    if missing:
        raise CheckpointInvalid(
            f"{directory} lacks {len(missing)} of {len(files)} shards: {join_names(missing)}. Copy "
            f"or download them too.{incomplete_copy_note(directory)}"
        )
    headers = {file: read_header(directory / file) for file in files}
    absent = [f"{name} (in {file})" for name, file in places.items() if name not in headers[file]]
    if absent:
        raise CheckpointInvalid(f"{INDEX} names tensors that their files do not hold: {join_names(absent)}.")
    return {name: headers[file][name] for name, file in places.items()}


def _check_tokenizer(directory: Path) -> None:
    tokenizer = file_in(directory, "tokenizer.json")
    if tokenizer.is_file():
        return check_not_lfs_pointer(tokenizer)
    old = next((name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (directory / name).is_file()), None)
    hint = (
        f"; {old} alone is not enough: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes it" if old else ""
    )
    raise CheckpointInvalid(f"{directory} has no tokenizer.json{hint}.{incomplete_copy_note(directory)}")


# ---- which tensors --------------------------------------------------------------------------------------------------


def decoder_tensors(config: ModelConfig, found: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    renamed = rename_decoder_tensors(found, config)
    renamed = replace(renamed, unused=[name for name in renamed.unused if not is_zero_bias(name, found)])
    missing = [name for name in tensors_of(config) if name not in renamed.tensors]
    if missing == ["lm_head.weight"]:
        raise CheckpointInvalid(
            "The weights have no lm_head.weight; if it shares the embedding's, config.json must say tie_word_embeddings: true."
        )
    return _check_tensors(config.architecture, tensors_of(config), renamed)


def _encoder_tensors(
    config: EncoderConfig, found: Mapping[str, TensorEntry], directory: Path
) -> dict[str, TensorEntry]:
    renamed_tensors = rename_tensors(found, config)
    for place, dense in enumerate(config.pooling.dense):
        own = _find_tensors(folder_in(directory, dense.folder), _conversion(config, directory))
        renamed_tensors.tensors.update(
            (f"dense.{place}.{name.removeprefix('linear.')}", entry) for name, entry in own.items()
        )
    expected = encoder_tensors_of(config)
    if config.decoder is not None:
        renamed_tensors.unused.extend(name for name in renamed_tensors.tensors if name not in expected)
    return _check_tensors(config.architecture, expected, renamed_tensors)


def _check_tensors(
    architecture: str, expected: Mapping[str, Shape], renamed_tensors: RenamedTensors
) -> dict[str, TensorEntry]:
    """Return the tensors that serving uses. Extra tensors are refused: ignoring one would give wrong results."""
    found, extra = renamed_tensors.tensors, renamed_tensors.unused
    missing = [renamed_tensors.stored_names.get(name, name) for name in expected if name not in found]
    if missing:
        raise CheckpointInvalid(
            f"The weights lack {len(missing)} of the {len(expected)} tensors of this {architecture}: {join_names(missing)}."
        )
    if extra:
        raise CheckpointInvalid(
            f"The weights hold {len(extra)} tensors that the {architecture} of config.json does not use: {join_names(extra)}."
            " Check num_hidden_layers and the architecture."
        )
    for name, shape in expected.items():
        _check_tensor(renamed_tensors.stored_names.get(name, name), found[name], shape)
    return {name: found[name] for name in expected}


def _check_tensor(name: str, entry: TensorEntry, shape: Shape) -> None:
    if entry.shape != shape:
        raise CheckpointInvalid(
            f"{entry.file.name}: {name} has shape {list(entry.shape)}, and config.json asks for {list(shape)}."
        )
    if entry.dtype not in STORED_DTYPES:
        raise CheckpointInvalid(
            f"{entry.file.name}: {name} is stored as {entry.dtype}; supported: {', '.join(STORED_DTYPES)}."
        )
