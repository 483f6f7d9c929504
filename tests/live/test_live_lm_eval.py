"""lm-eval's loglikelihood tasks, unchanged, against a server: the figures are those of transformers on the same model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from external_tools import PLACES
from real_model import real_model
from reference_models import reference_logits
from tests.live.live_server import LiveServer, live
from tiny_checkpoints import write_checkpoint

QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " the sea", " a", ""], "answer": 0},
    {"question": "Two and two are", "choices": [" four", " a long way from here", " blue"], "answer": 0},
    {"question": "The", "choices": [" end.", " end of the story is near, and the rest is silence"], "answer": 1},
]
TASK = """
task: questions
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "0",
}


def evaluate(server: LiveServer, folder: Path, batch_size: int, **arguments: Any) -> list[dict[str, Any]]:
    """The samples that lm-eval logs: each question with the log-likelihoods of its choices."""
    program = shutil.which("lm_eval", path=PLACES)
    if program is None:
        pytest.skip("lm_eval is not here: pip install 'lm_eval[api]'")
    questions = [one | {"choices": [choice for choice in one["choices"] if choice]} for one in QUESTIONS]
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    (folder / "questions.yaml").write_text(TASK.replace("QUESTIONS", str(folder / "questions.jsonl")))
    model = {"model": server.client.get("/v1/models").json()["data"][0]["id"], **arguments}
    model["base_url"] = f"{server.url}/v1/completions"
    command = [program, "--model", "local-completions", "--tasks", "questions", "--include_path", str(folder)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
    command += ["--batch_size", str(batch_size), "--output_path", str(folder / "results"), "--log_samples"]
    environment = os.environ | OFFLINE | {"HF_HOME": str(folder / "cache"), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (found,) = (folder / "results").rglob("samples_questions_*.jsonl")
    return [json.loads(line) for line in found.read_text().splitlines()]


def check(samples: list[dict[str, Any]], checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)  # type: ignore[no-untyped-call]
    compared = 0
    for sample in samples:
        for choice, ((logprob, is_greedy),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            context = tokenizer.encode(sample["doc"]["question"], add_special_tokens=False)
            whole = tokenizer.encode(sample["doc"]["question"] + choice, add_special_tokens=False)
            rows = torch.log_softmax(reference_logits(checkpoint, whole).double(), -1)[len(context) - 1 : -1]
            own = rows.gather(1, torch.tensor(whole[len(context) :]).unsqueeze(1)).squeeze(1)
            assert abs(float(logprob) - float(own.sum())) < 1e-3
            assert (str(is_greedy) == "True") == bool((own == rows.amax(1)).all())
            compared += 1
    assert compared == 8


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihoods_are_those_of_transformers(tmp_path: Path, batch_size: int) -> None:
    """With the server's own tokenizer, which lm-eval finds."""
    checkpoint = write_checkpoint(tmp_path / "tiny", "LlamaForCausalLM", seed=5)
    with live(checkpoint) as server:
        check(evaluate(server, tmp_path, batch_size), checkpoint)


@pytest.mark.full
def test_loglikelihoods_of_a_real_model(tmp_path: Path) -> None:
    checkpoint = real_model()
    with live(checkpoint, max_model_len=512) as server:
        check(evaluate(server, tmp_path, 3, tokenizer_backend="huggingface", tokenizer=checkpoint), checkpoint)
