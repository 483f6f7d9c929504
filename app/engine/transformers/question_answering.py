"""Questions that a text answers: the context in windows, and the best spans of all windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray
from transformers import PreTrainedModel

from app.engine.transformers.tasks import Item, Parameters, Task
from app.errors import InvalidRequest

if TYPE_CHECKING:
    from app.engine.transformers.texts import TextReader

# What transformers' pipeline had, before it was removed from the library.
_WINDOW_TOKENS, _OVERLAP_TOKENS, _QUESTION_TOKENS, _ANSWER_TOKENS = 384, 128, 64, 15
_CHECK = {"question": "What is it?", "context": "It is a text of a few words."}
Floats = NDArray[numpy.float32]


def answer_task(model: PreTrainedModel, reader: TextReader) -> Task:
    tokenizer = reader.tokenizer

    def split(given: Mapping[str, str], parameters: Parameters) -> Sequence[Item]:
        question, context = given["question"], given["context"]
        reader.prepare(question, "inputs.question", windows=True)
        reader.prepare(context, "inputs.context", windows=True)
        window = min(parameters.get("max_seq_len", _WINDOW_TOKENS), reader.max_model_len)
        overlap = min(parameters.get("doc_stride", _OVERLAP_TOKENS), window // 2)
        most = parameters.get("max_question_len", _QUESTION_TOKENS)
        asked = tokenizer(question, add_special_tokens=False)["input_ids"]
        if len(asked) > most:
            raise InvalidRequest(
                f"inputs.question has {len(asked)} tokens, and max_question_len is {most}.", "inputs.question"
            )
        room = window - len(asked) - tokenizer.num_special_tokens_to_add(pair=True)
        if room <= overlap:
            field = "parameters.max_seq_len" if "max_seq_len" in parameters else "inputs.question"
            raise InvalidRequest(f"A window of {window} tokens has no room beside this question.", field)
        windows = tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=window,
            stride=overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_tensors=None,
        )
        return [_window(tokenizer, windows, place, context) for place in range(len(windows["input_ids"]))]

    def finish(outputs: list[Item], parameters: Parameters) -> Any:
        top_k = parameters.get("top_k", 1)
        answers = [answer for output in outputs for answer in _answers(output, parameters)]
        if parameters.get("handle_impossible_answer"):
            null = min(_null_score(output) for output in outputs)
            answers.append({"score": null, "start": 0, "end": 0, "answer": ""})
        answers.sort(key=lambda answer: -answer["score"])
        best = list({(answer["start"], answer["end"]): answer for answer in reversed(answers)}.values())[::-1][:top_k]
        if not best:
            best = [{"score": 0.0, "start": 0, "end": 0, "answer": ""}]
        return best[0] if top_k == 1 else best

    return Task(split, finish, _CHECK, ("start_logits", "end_logits"), by_token=("start_logits", "end_logits"))


def _window(tokenizer: Any, windows: Any, place: int, context: str) -> Item:
    import torch

    names = [name for name in tokenizer.model_input_names if name in windows]
    parts = windows.sequence_ids(place)
    words = windows.word_ids(place)
    return {
        **{name: torch.tensor([windows[name][place]]) for name in names},
        "in_context": numpy.array([part == 1 for part in parts]),
        "is_first": numpy.array([token == tokenizer.cls_token_id for token in windows["input_ids"][place]]),
        "offsets": windows["offset_mapping"][place],
        "words": words,
        "word_to_chars": lambda word: windows.word_to_chars(place, word, sequence_index=1),
        "context": context,
    }


def _probabilities(output: Item) -> tuple[Floats, Floats]:
    """Return those of the start and the end, of tokens of the context and the first one."""
    allowed = output["in_context"] | output["is_first"]
    found = []
    for name in ("start_logits", "end_logits"):
        logits = numpy.where(allowed, output[name][0].numpy(), -10_000.0)
        exponentials = numpy.exp(logits - logits.max())
        found.append((exponentials / exponentials.sum()).astype(numpy.float32))
    return found[0], found[1]


def _null_score(output: Item) -> float:
    start, end = _probabilities(output)
    return float((start[output["is_first"]] * end[output["is_first"]]).min(initial=1.0))


def _answers(output: Item, parameters: Parameters) -> Sequence[dict[str, Any]]:
    """Return the best spans of a window."""
    start, end = _probabilities(output)
    start, end = start * output["in_context"], end * output["in_context"]
    scores = numpy.tril(numpy.triu(numpy.outer(start, end)), parameters.get("max_answer_len", _ANSWER_TOKENS) - 1)
    flat, top_k = scores.ravel(), parameters.get("top_k", 1)
    best = numpy.argsort(-flat, kind="stable")[:top_k]
    width = len(start)
    return [
        _answer(output, int(at) // width, int(at) % width, float(flat[at]), parameters) for at in best if flat[at] > 0.0
    ]


def _answer(output: Item, first: int, last: int, score: float, parameters: Parameters) -> dict[str, Any]:
    begin, end = output["offsets"][first][0], output["offsets"][last][1]
    words = output["words"]
    if parameters.get("align_to_words", True) and words[first] is not None and words[last] is not None:
        begin, end = output["word_to_chars"](words[first])[0], output["word_to_chars"](words[last])[1]
    return {"score": score, "start": begin, "end": end, "answer": output["context"][begin:end]}
