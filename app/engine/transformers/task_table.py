"""The tasks that transformers' classes do: what each makes of a text, and of the model's outputs for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, pipeline
from transformers.pipelines.base import ChunkPipeline, Pipeline
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from app.engine.transformers.question_answering import answer_task
from app.engine.transformers.tasks import Item, Parameters, Task
from app.errors import ContextLengthExceeded, InvalidRequest
from app.models.transformers_tasks import TaskConfig

_CHARACTERS_PER_TOKEN = 64  # a text with more is refused before it is tokenized
_MAX_CHARACTERS = 2**20  # of a text that is read in windows
_CHECK_TEXT = "A text of a few words."


class TextReader:
    """The tokenizer, which cuts texts only where a request asks for it, and the model's longest text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len

    def prepare(self, text: str, field: str = "inputs", *, cuts: bool = False, windows: bool = False) -> None:
        """Set how texts are cut, and refuse one that is certainly too long."""
        self.tokenizer.model_max_length = self.max_model_len if cuts or windows else VERY_LARGE_INTEGER
        most = _MAX_CHARACTERS if cuts or windows else _CHARACTERS_PER_TOKEN * (self.max_model_len + 16)
        if len(text) > most:
            raise ContextLengthExceeded(f"{field} has {len(text)} characters, and may have at most {most}.", field)

    def check_length(self, item: Item, field: str = "inputs") -> None:
        number = item["input_ids"].shape[1]
        if number > self.max_model_len:
            raise ContextLengthExceeded(
                f"{field} has {number} tokens, but this model reads at most {self.max_model_len}.", field
            )


def tasks_of(
    model: PreTrainedModel, directory: Path, config: TaskConfig, max_model_len: int
) -> tuple[dict[str, Task], int | None]:
    """Return the tasks of a model by name, and its padding token, None if texts cannot be padded."""
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    reader = TextReader(tokenizer, max_model_len)
    tasks = {name: _TASKS[name](model, reader) for name in config.tasks}
    pads = tokenizer.padding_side == "right" and "attention_mask" in tokenizer.model_input_names
    return tasks, tokenizer.pad_token_id if pads else None


def _pipeline(name: str, model: PreTrainedModel, reader: TextReader) -> Pipeline:
    made: Pipeline = pipeline(name, model=model, tokenizer=reader.tokenizer, device=model.device)
    return made


def _made_by(pipe: Pipeline, given: Any, parameters: Parameters) -> list[Item]:
    """Return the items that a pipeline makes of an input."""
    options = {**pipe._preprocess_params, **pipe._sanitize_parameters(**parameters)[0]}
    made = pipe.preprocess(given, **options)
    return [dict(item) for item in made] if isinstance(pipe, ChunkPipeline) else [dict(made)]


def _finished_by(pipe: Pipeline, outputs: list[Item], parameters: Parameters) -> Any:
    options = {**pipe._postprocess_params, **pipe._sanitize_parameters(**parameters)[2]}
    return pipe.postprocess(outputs if isinstance(pipe, ChunkPipeline) else outputs[0], **options)


def _token_classification(model: PreTrainedModel, reader: TextReader) -> Task:
    pipe = _pipeline("token-classification", model, reader)

    def split(text: str, parameters: Parameters) -> Sequence[Item]:
        stride, room = parameters.get("stride"), reader.max_model_len - reader.tokenizer.num_special_tokens_to_add()
        if stride is not None and parameters.get("aggregation_strategy", "none") == "none":
            raise InvalidRequest("stride needs an aggregation_strategy other than none.", "parameters.stride")
        if stride is not None and stride >= room:
            raise InvalidRequest(f"stride must be less than {room} for this model.", "parameters.stride")
        reader.prepare(text, windows=stride is not None)
        items = [{"offset_mapping": None, **item} for item in _made_by(pipe, text, parameters)]
        for item in items:
            reader.check_length(item)
        return items

    def finish(outputs: list[Item], parameters: Parameters) -> Any:
        return _finished_by(pipe, outputs, parameters)

    return Task(split, finish, _CHECK_TEXT, by_token=("logits",))


def _fill_mask(model: PreTrainedModel, reader: TextReader) -> Task:
    pipe, tokenizer = _pipeline("fill-mask", model, reader), reader.tokenizer

    def split(text: str, parameters: Parameters) -> Sequence[Item]:
        if parameters.get("top_k", 1) > model.config.vocab_size:
            raise InvalidRequest(f"top_k is at most {model.config.vocab_size} here.", "parameters.top_k")
        reader.prepare(text)
        item = dict(tokenizer(text, return_tensors="pt"))
        reader.check_length(item)
        if not bool((item["input_ids"] == tokenizer.mask_token_id).any()):
            raise InvalidRequest(f"inputs has no {tokenizer.mask_token}, which is to be filled.", "inputs")
        return [item]

    def finish(outputs: list[Item], parameters: Parameters) -> Any:
        return _finished_by(pipe, outputs, parameters)

    return Task(split, finish, f"A {tokenizer.mask_token} text.", by_token=("logits",))


def _text_classification(model: PreTrainedModel, reader: TextReader) -> Task:
    pipe = _pipeline("text-classification", model, reader)

    def split(given: str | Mapping[str, str], parameters: Parameters) -> Sequence[Item]:
        text = given if isinstance(given, str) else "".join(given.values())
        reader.prepare(text, cuts=bool(parameters.get("truncation")))
        preprocess = {name: parameters[name] for name in ("truncation",) if name in parameters}
        items = _made_by(pipe, given, preprocess)
        reader.check_length(items[0])
        return items

    def finish(outputs: list[Item], parameters: Parameters) -> Any:
        post = {"top_k": None, **{name: value for name, value in parameters.items() if name != "truncation"}}
        return _finished_by(pipe, outputs, post)

    return Task(split, finish, _CHECK_TEXT)


def _zero_shot(model: PreTrainedModel, reader: TextReader) -> Task:
    pipe = _pipeline("zero-shot-classification", model, reader)

    def split(text: str, parameters: Parameters) -> Sequence[Item]:
        reader.prepare(text)
        items = _made_by(pipe, text, parameters)
        for item in items:
            reader.check_length(item)
        return items

    def finish(outputs: list[Item], parameters: Parameters) -> Any:
        found = _finished_by(pipe, outputs, parameters)
        pairs = zip(found["labels"], found["scores"], strict=True)
        return [{"label": label, "score": score} for label, score in pairs]

    return Task(split, finish, _CHECK_TEXT, check_parameters={"candidate_labels": ["one", "two"]})


def _feature_extraction(model: PreTrainedModel, reader: TextReader) -> Task:
    def split(text: str, parameters: Parameters) -> Sequence[Item]:
        cuts = bool(parameters.get("truncate"))
        reader.prepare(text, cuts=cuts)
        item = dict(reader.tokenizer(text, return_tensors="pt", truncation=cuts))
        reader.check_length(item)
        return [item]

    def finish(outputs: list[Item], parameters: Parameters) -> Any:
        return outputs[0]["last_hidden_state"].tolist()

    return Task(split, finish, _CHECK_TEXT, outputs=("last_hidden_state",), by_token=("last_hidden_state",))


_TASKS: Mapping[str, Callable[[PreTrainedModel, TextReader], Task]] = {
    "token-classification": _token_classification,
    "fill-mask": _fill_mask,
    "text-classification": _text_classification,
    "zero-shot-classification": _zero_shot,
    "question-answering": answer_task,
    "feature-extraction": _feature_extraction,
}
