"""Tasks that transformers computes give what its pipelines give, for a text alone and among others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from task_checkpoints import LABELS, NLI, TEXTS, ask, task_engine, write_task_checkpoint

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
