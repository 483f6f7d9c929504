"""The tasks that transformers' classes do: what each makes of a text, and of the model's outputs for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, pipeline
from transformers.pipelines.base import ChunkPipeline, Pipeline

from app.engine.build import BuildRequest, BuiltEngine
from app.engine.encoder.batching import BatchingDelay
from app.engine.transformers.loading import LIBRARY_ERRORS, load_and_try
from app.engine.transformers.pictures import TextPictureModel, image_classification
from app.engine.transformers.question_answering import answer_task
from app.engine.transformers.speech import SpeechModel
from app.engine.transformers.tasks import Item, Parameters, Task, TaskEngine, TaskModel
from app.engine.transformers.texts import TextReader
from app.errors import InvalidRequest
from app.hardware.step_times import ThrottleCorrection
from app.models.transformers_tasks import SPEECH, TaskConfig
from app.weights.checkpoint import Checkpoint

_CHECK_TEXT = "A text of a few words."


def tasks_of(
    model: PreTrainedModel, directory: Path, config: TaskConfig, max_model_len: int
) -> tuple[dict[str, Task], int | None]:
    """Return the tasks of a model by name, and its padding token, None if texts cannot be padded."""
    if SPEECH in config.tasks:
        return {SPEECH: SpeechModel(model, directory).task()}, None
    if config.reads_pictures and not config.reads_texts:
        return {name: image_classification(model, directory) for name in config.tasks}, None
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    reader = TextReader(tokenizer, max_model_len)
    if config.reads_pictures:
        return TextPictureModel(model, directory, reader).tasks(), None
    tasks: dict[str, Task] = {name: _TASKS[name](model, reader) for name in config.tasks}
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

    return Task(split, partial(_finished_by, pipe), _CHECK_TEXT, by_token=("logits",))


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

    return Task(split, partial(_finished_by, pipe), f"A {tokenizer.mask_token} text.", by_token=("logits",))


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


# ---- the engine ----------------------------------------------------------------------------------------------------

_LOG = logging.getLogger(__name__)
_TOLERANCE = 0.02  # of a text's outputs beside a longer one, as part of the largest; bf16 differs by less


def build_task_engine(request: BuildRequest[Checkpoint]) -> BuiltEngine[TaskEngine, TaskModel, PreTrainedModel]:
    """Load the model with transformers and try its tasks. Raises a `StartupError`."""
    plan, config = request.plan, request.checkpoint.model_config
    assert isinstance(config, TaskConfig), "a model that does tasks"

    def try_model(model: PreTrainedModel) -> TaskEngine:
        request.report("warming up")
        tasks, pad_id = tasks_of(model, request.checkpoint.directory, config, plan.memory.max_model_len)
        runner = TaskModel(model, tasks, pad_id)
        delay = BatchingDelay(plan.memory.batch_target_tokens, request.step_time_model, oldest_first=True)
        engine = TaskEngine(runner, delay, throttle_correction=ThrottleCorrection(plan.cpu.throttling_quota))
        engine.check()
        if runner.pad_id is not None and not pads_well(runner):
            runner.pad_id = None
        return engine

    model, backend, engine = load_and_try(request, try_model, f"do {', '.join(config.tasks)} with it")
    _LOG.info("transformers computes %s: %s", type(model).__name__, ", ".join(engine.model.tasks))
    return BuiltEngine(engine, engine.model, model, backend)


def pads_well(runner: TaskModel) -> bool:
    """Return True if a text has the same outputs beside a longer one as alone, up to rounding."""
    name, task = next(iter(runner.tasks.items()))
    (item, *_) = task.split(task.check, task.check_parameters)
    inputs = {key: value for key, value in item.items() if isinstance(value, Tensor) and value.dim() == 2}
    longer = {**item, **{key: torch.cat((value, value[:, -2:]), 1) for key, value in inputs.items()}}
    try:
        together, alone = runner.compute(name, [item, longer], {})[0], runner.compute(name, [item], {})[0]
    except LIBRARY_ERRORS as error:
        _LOG.debug("texts cannot be padded: %s", error)
        return False
    pairs = [(together[key], alone[key]) for key in task.outputs]
    return all(float((one - other).abs().max()) <= _TOLERANCE * float(other.abs().max()) for one, other in pairs)
