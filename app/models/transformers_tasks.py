"""Tasks besides generation that models of the library transformers do, by the class that config.json names.

Nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from app.models.config_reader import ConfigReader
from app.models.encoders.config_reader import read_labels
from app.models.transformers_config import CAUSAL, SEQ_TO_SEQ, TransformersConfig, class_table, first_integer

TaskName = Literal[
    "token-classification",
    "fill-mask",
    "question-answering",
    "text-classification",
    "zero-shot-classification",
    "feature-extraction",
    "image-classification",
    "zero-shot-image-classification",
    "automatic-speech-recognition",
]
SPEECH: TaskName = "automatic-speech-recognition"
# transformers' tables of classes, with what a class of each does.
_TASKS: Mapping[str, tuple[TaskName, ...]] = {
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": ("token-classification",),
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": ("question-answering",),
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": ("text-classification", "zero-shot-classification"),
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": ("fill-mask",),
    "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES": ("feature-extraction",),
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": ("image-classification",),
    "MODEL_FOR_CTC_MAPPING_NAMES": (SPEECH,),
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": (SPEECH,),
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES": ("zero-shot-image-classification", "feature-extraction"),
}
_BASES = "MODEL_MAPPING_NAMES"  # classes without a head, of which those with a masked model read texts
_MASKED = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
# Names of the same value in different classes.
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers")
_HIDDEN = ("hidden_size", "dim", "d_model", "n_embd", "emb_dim", "embedding_size")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_source_positions")
_UNLIMITED_LEN = 4_096  # of a model whose config.json has no longest text
_LEAST_HIDDEN = 64
# Models whose positions begin after the padding token's.
_PADDED_POSITIONS = frozenset(
    "roberta xlm-roberta xlm-roberta-xl camembert roberta-prelayernorm data2vec-text xmod longformer mpnet ibert esm".split()
)


@dataclass(frozen=True, slots=True)
class TaskConfig(TransformersConfig):
    """What a plan reads of a model that does tasks."""

    kind: ClassVar[Literal["decoder", "encoder"]] = "encoder"

    tasks: tuple[TaskName, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def reads_pictures(self) -> bool:
        return any("image" in task for task in self.tasks)

    @property
    def reads_texts(self) -> bool:
        return self.tasks not in (("image-classification",), (SPEECH,))


def find_task_config(values: Mapping[str, Any]) -> TaskConfig | None:
    """Return the configuration of a class that does tasks; None for other classes, and without transformers."""
    listed = values.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    # The library's pipeline has no prompt for a decoder that reads sounds within one.
    is_prompted = "text_config" in values and values.get("is_encoder_decoder") is not True
    for name in names:
        tasks = _tasks_of(name, generates=values.get("causal") is True)
        if tasks and not (is_prompted and tasks == (SPEECH,)):
            return _read(name, tasks, values)
    return None


def _tasks_of(name: str, *, generates: bool) -> tuple[TaskName, ...]:
    """`generates`: a class that may also fill masks was trained to go on with a text, as some XLM models were."""
    # BART fills masks too; a model that can generate does that.
    generates = _is_in(SEQ_TO_SEQ, name) or (generates and _is_in(CAUSAL, name))
    for table, tasks in _TASKS.items():
        if _is_in(table, name) and not (generates and table == _MASKED):
            return tasks
    masked = class_table(_MASKED) or {}
    bases = class_table(_BASES) or {}
    return ("feature-extraction",) if any(name in bases.get(model_type, ()) for model_type in masked) else ()


def _is_in(table: str, name: str) -> bool:
    return any(name in classes for classes in (class_table(table) or {}).values())


def _read(name: str, tasks: tuple[TaskName, ...], values: Mapping[str, Any]) -> TaskConfig:
    text = ConfigReader(values).section("text_config")
    config = text if text.values else ConfigReader(values)
    hidden = first_integer(config, _HIDDEN, _LEAST_HIDDEN)
    length = first_integer(config, _LENGTHS, _UNLIMITED_LEN)
    if values.get("model_type") in _PADDED_POSITIONS:
        length -= first_integer(config, ("pad_token_id",), 1) + 1
    labels = read_labels(config) if tasks[0].endswith("classification") and not text.values else ()
    if "zero-shot-classification" in tasks and not any(label.lower().startswith("entail") for label in labels):
        tasks = ("text-classification",)
    return TaskConfig(
        architecture=name,
        vocab_size=first_integer(config, ("vocab_size",), 1),
        max_model_len=max(1, length),
        num_layers=first_integer(config, _LAYERS, 1),
        hidden_size=hidden,
        num_kv_heads=1,
        head_dim=hidden,
        tasks=tasks,
        labels=labels,
    )
