"""Hugging Face's client for tasks, unchanged, against a server of each kind of model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from task_checkpoints import LABELS, NLI, TEXTS, write_task_checkpoint
from tests.live.live_server import LiveServer, live


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Servers by what their model does, each started when a test first needs it."""
    from contextlib import ExitStack

    given: dict[str, tuple[str, tuple[str, ...]]] = {
        "entities": ("BertForTokenClassification", LABELS),
        "masks": ("DebertaV2ForMaskedLM", ()),
        "answers": ("DistilBertForQuestionAnswering", ()),
        "labels": ("DebertaV2ForSequenceClassification", NLI),
        "states": ("DebertaV2Model", ()),
    }
    with ExitStack() as servers:
        started: dict[str, LiveServer] = {}

        def find(name: str) -> LiveServer:
            if name not in started:
                directory = tmp_path_factory.mktemp(name)
                write_task_checkpoint(directory, *given[name])
                started[name] = servers.enter_context(live(directory))
            return started[name]

        yield find


def client_of(server: LiveServer) -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(model=server.url)


def test_entities_and_who_asks_for_what_there_is_not(served: Any) -> None:
    server = served("entities")
    client = client_of(server)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: client.token_classification(text, aggregation_strategy="simple"), TEXTS * 3))
    assert found[:3] == found[3:6] == found[6:]
    assert all(one.word and TEXTS[0][one.start : one.end] for one in found[0]) and found[0]
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    for path in ("/", "/pipeline/token-classification", f"/models/{model}"):
        reply = server.client.post(path, json={"inputs": list(TEXTS[:2])})
        assert reply.status_code == 200 and len(reply.json()) == 2
    assert server.metric("armature_requests_total", api="tasks", outcome="stop") >= 12
    wrong = [
        ("/pipeline/fill-mask", {"inputs": "x"}, 400, "does not do 'fill-mask'; it does token-classification"),
        ("/models/other", {"inputs": "x"}, 404, "'other'"),
        ("/", {"inputs": ""}, 400, "inputs"),
        ("/", {"inputs": "text " * 65}, 400, "inputs has 67 tokens, but this model reads at most 66"),
        ("/", {"inputs": ["text", "text " * 65]}, 400, r"inputs[1] has 67 tokens"),
        ("/", {"inputs": "text " * 10_000}, 400, "inputs has 50000 characters"),
        ("/", {"inputs": "x", "parameters": {"aggregation_strategy": "best"}}, 400, "parameters.aggregation_strategy"),
        ("/", {"inputs": "x", "parameters": {"stride": 4}}, 400, "stride needs an aggregation_strategy"),
        ("/v1/embeddings", {"input": "x"}, 400, "/pipeline/{task}"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 400, "/pipeline/{task}"),
    ]
    for path, body, status, said in wrong:
        reply = server.client.post(path, json=body)
        assert reply.status_code == status and said in reply.text, (path, body, reply.text)
    windows = {"aggregation_strategy": "simple", "stride": 8}
    assert server.client.post("/", json={"inputs": "new york " * 100, "parameters": windows}).json()[-1]["end"] > 800


def test_masks_that_are_filled(served: Any) -> None:
    client = client_of(served("masks"))
    found = client.fill_mask("this is [MASK] york", top_k=2, targets=["new", "paris"])
    assert sorted(one.token_str for one in found) == ["new", "paris"]
    reply = served("masks").client.post("/", json={"inputs": "no mask"})
    assert reply.status_code == 400 and "inputs has no [MASK]" in reply.json()["error"]


def test_answers_of_a_short_and_a_long_context(served: Any) -> None:
    client = client_of(served("answers"))
    context = "this is a text of new york. who lives in paris? " * 20
    answer = client.question_answering("who lives", context)
    assert context[answer.start : answer.end] == answer.answer and answer.answer
    several = client.question_answering("who lives", context, top_k=3, max_answer_len=2, doc_stride=4)
    assert len(several) == 3 and several[0].score >= several[1].score >= several[2].score


def test_labels_of_the_model_and_of_the_request(served: Any) -> None:
    client = client_of(served("labels"))
    assert sorted(one.label for one in client.text_classification(TEXTS[0])) == sorted(NLI)
    found = client.zero_shot_classification(TEXTS[0], ["sport", "new york"], hypothesis_template="it is about {}")
    assert {one.label for one in found} == {"sport", "new york"} and sum(one.score for one in found) == pytest.approx(1)
    for template in ("no place", "{0.__class__}", "{:>99999999}"):
        body = {"inputs": "x", "parameters": {"candidate_labels": ["one"], "hypothesis_template": template}}
        reply = served("labels").client.post("/", json=body)
        assert reply.status_code == 400 and "parameters.hypothesis_template" in reply.text


def test_states_of_all_tokens(served: Any) -> None:
    assert client_of(served("states")).feature_extraction("new york").shape == (1, 4, 32)
    reply = served("states").client.post("/", json={"inputs": "new york", "normalize": True})
    assert reply.status_code == 400 and "normalize" in reply.text


def test_the_same_model_over_the_open_inference_protocol(served: Any) -> None:
    client: httpx.Client = served("entities").client
    model = client.get("/v1/models").json()["data"][0]["id"]
    described = client.get(f"/v2/models/{model}").json()
    assert [one["name"] for one in described["inputs"]] == ["inputs", "parameters", "task"]
    tensors = [
        {"name": "inputs", "datatype": "BYTES", "shape": [2], "data": list(TEXTS[:2])},
        {"name": "parameters", "datatype": "BYTES", "shape": [1], "data": ['{"aggregation_strategy": "max"}']},
    ]
    (output,) = client.post(f"/v2/models/{model}/infer", json={"inputs": tensors}).json()["outputs"]
    wanted = {"inputs": list(TEXTS[:2]), "parameters": {"aggregation_strategy": "max"}}
    import json

    assert [json.loads(one) for one in output["data"]] == client.post("/", json=wanted).json()
    bad = client.post(f"/v2/models/{model}/infer", json={"inputs": tensors[1:]})
    assert bad.status_code == 400 and "inputs" in bad.text
