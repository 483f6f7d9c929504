"""Tasks that transformers computes give what its pipelines give, for a text alone and among others."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.encoder.batching import BatchingDelay
from app.messages import RequestFailed, RunTask
from task_checkpoints import LABELS, NLI, TEXTS, ask, task_engine, write_speech_checkpoint, write_task_checkpoint

FAMILIES = ("Bert", "DistilBert", "DebertaV2", "Electra")
_CASES = {
    "token-classification": [{}, *({"aggregation_strategy": one} for one in ("simple", "first", "average", "max"))],
    "fill-mask": [{}, {"top_k": 2}, {"targets": ["paris", "york"]}],
    "text-classification": [{"top_k": 3}, {"function_to_apply": "sigmoid", "top_k": 2}],
    "zero-shot-classification": [
        {"candidate_labels": ["sport", "new york"]},
        {"candidate_labels": "sport,paris,text", "hypothesis_template": "it is {}", "multi_label": True},
    ],
}
_CLASSES = {
    "token-classification": ("ForTokenClassification", LABELS),
    "fill-mask": ("ForMaskedLM", ()),
    "text-classification": ("ForSequenceClassification", NLI),
    "zero-shot-classification": ("ForSequenceClassification", NLI),
}


def same(found: Any, wanted: Any) -> bool:
    """Equal, up to the rounding of numbers."""
    if isinstance(wanted, dict):
        return set(found) == set(wanted) and all(same(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found == wanted if isinstance(wanted, str | None) else found == pytest.approx(float(wanted), abs=1e-4)


def by_pipeline(task: str, model: Any, text: str, parameters: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer, pipeline

    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    found = pipeline(task, model=model, tokenizer=tokenizer, device="cpu")(text, **parameters)
    if task == "zero-shot-classification":
        return [{"label": one, "score": score} for one, score in zip(found["labels"], found["scores"], strict=True)]
    return found


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", list(_CASES))
def test_a_task_gives_what_the_pipeline_gives(task: str, family: str, tmp_path: Path) -> None:
    suffix, labels = _CLASSES[task]
    model = write_task_checkpoint(tmp_path, family + suffix, labels)
    model.name_or_path = str(tmp_path)
    engine = task_engine(tmp_path)
    texts = [text.replace("new", "[MASK]") + " [MASK]" for text in TEXTS] if task == "fill-mask" else list(TEXTS)
    assert engine.model.pad_id == 0
    for parameters in _CASES[task]:
        wanted = [by_pipeline(task, model, text, dict(parameters)) for text in texts]
        assert all(map(same, ask(engine, task, texts, **parameters), wanted))
        assert same(ask(engine, task, texts[:1], **parameters)[0], wanted[0])


class Doubled:
    """Stands for a model of one task, which doubles numbers and fails for the negative ones."""

    def __init__(self) -> None:
        task = SimpleNamespace(
            split=lambda text, parameters: [{"number": int(text)}],
            finish=lambda outputs, parameters: outputs[0]["doubled"],
            least_items=1,
        )
        self.tasks = {"double": task}

    def key(self, task: str, item: Any, parameters: Any) -> str:
        return task

    def compute(self, task: str, items: Sequence[Any], parameters: Any) -> list[Any]:
        if any(item["number"] < 0 for item in items):
            raise ValueError("a negative number")
        return [{"doubled": 2 * item["number"]} for item in items]


def test_a_request_that_fails_leaves_the_others_of_its_step_their_answers() -> None:
    from app.engine.transformers.tasks import TaskEngine

    model: Any = Doubled()
    engine = TaskEngine(model, BatchingDelay(8))
    for number in ("1", "-2", "3"):
        assert engine.add(RunTask(number, "double", json.dumps([number]).encode(), b"{}", arrived_at=0.0)) == []
    events: dict[str, Any] = {event.request_id: event for event in engine.step()}
    assert isinstance(events.pop("-2"), RequestFailed)
    assert {name: json.loads(event.arrays["result"].data) for name, event in events.items()} == {"1": 2, "3": 6}
    assert not engine.has_work and not engine.in_step


SOUNDS = (1.0, 1.1, 31.0)  # seconds; the last one is read in two windows
_SPEECH = {
    "whisper": [
        {},
        {"return_timestamps": True},
        {"return_timestamps": "word"},
        {"language": "de", "task": "translate", "prompt": "names", "max_new_tokens": 12},
    ],
    "ctc": [{}, {"return_timestamps": "word"}],
    "ctc with layers": [{}, {"return_timestamps": "char"}],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=[] if name == "ctc with layers" else pytest.mark.full) for name in _SPEECH]
)
def test_sounds_together_have_the_texts_of_the_pipeline(kind: str, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="the extra transformers has it")
    import numpy
    from transformers import AutoFeatureExtractor, AutoTokenizer, pipeline

    model = write_speech_checkpoint(tmp_path, kind)
    name = "automatic-speech-recognition"
    tokenizer, extractor = AutoTokenizer.from_pretrained(tmp_path), AutoFeatureExtractor.from_pretrained(tmp_path)
    pipe = pipeline(name, model=model, tokenizer=tokenizer, feature_extractor=extractor, device="cpu")
    files = []
    for seed, seconds in enumerate(SOUNDS):
        file = io.BytesIO()
        samples = numpy.random.default_rng(seed).standard_normal(int(seconds * 16_000)) * 0.1
        soundfile.write(file, samples, 16_000, format="WAV")
        files.append(file.getvalue())
    engine = task_engine(tmp_path)
    for parameters in _SPEECH[kind]:
        options: dict[str, Any] = {
            name: value for name, value in parameters.items() if name in ("language", "task", "max_new_tokens")
        }
        if "prompt" in parameters:
            options["prompt_ids"] = tokenizer.get_prompt_ids(parameters["prompt"], return_tensors="pt")
        wanted = [
            pipe(
                soundfile.read(io.BytesIO(file), dtype="float32")[0],
                chunk_length_s=30 if seconds > 30 else 0,
                return_timestamps=parameters.get("return_timestamps"),
                **({"generate_kwargs": options} if options else {}),
            )
            for file, seconds in zip(files, SOUNDS, strict=True)
        ]
        found = ask(engine, name, list(range(len(files))), tuple(files), parameters=parameters)
        assert same(found, json.loads(json.dumps(wanted))), parameters
        assert engine.stats is not None
