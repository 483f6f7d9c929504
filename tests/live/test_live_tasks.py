"""Hugging Face's client for tasks, unchanged, against a server of each kind of model."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy
import pytest

from task_checkpoints import LABELS, NLI, TEXTS, write_picture_checkpoint, write_task_checkpoint
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


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server, its model and what reads its inputs, by name."""
    from contextlib import ExitStack

    with ExitStack() as servers:
        started: dict[str, Any] = {}

        def find(name: str) -> Any:
            if name not in started:
                directory = tmp_path_factory.mktemp(name)
                model, readers = write_picture_checkpoint(directory, name)
                started[name] = servers.enter_context(live(directory)), model, readers
            return started[name]

        yield find


@pytest.fixture(autouse=True)
def _reaches_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def client_of(server: LiveServer) -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(model=server.url)


def test_entities_and_who_asks_for_what_there_is_not(served: Any) -> None:
    server = served("entities")
    client = client_of(server)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: client.token_classification(text, aggregation_strategy="simple"), TEXTS * 3))
    spans = [[(one.entity_group, one.start, one.end) for one in entities] for entities in found]
    assert spans[:3] == spans[3:6] == spans[6:]
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
    reply = client.post(f"/v2/models/{model}/infer", json={"inputs": tensors})
    assert reply.status_code == 200, reply.text
    (output,) = reply.json()["outputs"]
    wanted = {"inputs": list(TEXTS[:2]), "parameters": {"aggregation_strategy": "max"}}
    assert [json.loads(one) for one in output["data"]] == client.post("/", json=wanted).json()
    bad = client.post(f"/v2/models/{model}/infer", json={"inputs": tensors[1:]})
    assert bad.status_code == 400 and "inputs" in bad.text


# ---- pictures --------------------------------------------------------------------------------------------------------


def picture(mode: str = "RGB", kind: str = "PNG", size: tuple[int, int] = (48, 40), **options: Any) -> bytes:
    """The file of a picture whose two halves differ."""
    from PIL import Image

    made = Image.new(mode, size)
    white: Any = {"RGB": (250, 120, 30), "RGBA": (250, 120, 30, 255), "CMYK": (10, 200, 90, 20)}.get(mode, 200)
    made.paste(white, (0, 0, size[0] // 2, size[1]))
    file = io.BytesIO()
    made.save(file, kind, **options)
    return file.getvalue()


def test_labels_of_pictures_are_those_of_the_pipeline(pictures: Any) -> None:
    from PIL import Image
    from transformers import pipeline

    server, model, processor = pictures("labels")
    client = client_of(server)
    classify = pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    for file in (picture(), picture(kind="JPEG"), picture("CMYK", "JPEG"), picture("L"), picture(kind="WEBP")):
        wanted = {one["label"]: one["score"] for one in classify(Image.open(io.BytesIO(file)), top_k=3)}
        for found in (client.image_classification(file), client.image_classification(file, top_k=3)):
            assert {one.label: one.score for one in found} == pytest.approx(wanted, abs=1e-4)


def test_pictures_that_are_not_as_they_seem(pictures: Any) -> None:
    from PIL import Image

    client: httpx.Client = pictures("labels")[0].client

    def scores(file: bytes) -> dict[str, float]:
        reply = client.post("/", content=file, headers={"content-type": "image/png"})
        assert reply.status_code == 200, reply.text
        return {one["label"]: one["score"] for one in reply.json()}

    exif = Image.Exif()
    exif[0x0112] = 3  # upside down, so that the halves change places
    upright = scores(picture(kind="JPEG", quality=100))
    assert scores(picture(kind="JPEG", quality=100, exif=exif)) != pytest.approx(upright, abs=1e-3)
    deep = Image.fromarray(numpy.asarray(Image.open(io.BytesIO(picture("L")))).astype(numpy.uint16) << 8)
    file = io.BytesIO()
    deep.save(file, "PNG")
    assert scores(file.getvalue()) == pytest.approx(scores(picture("L")), abs=1e-4)
    assert scores(picture("RGBA")) != pytest.approx(scores(picture()), abs=1e-3)  # on white, not on black
    frames = {"save_all": True, "append_images": [Image.new("RGB", (48, 40))]}
    good = picture()
    refused = [
        (b"not a picture", "inputs is not a picture"),
        (good[: len(good) // 2], "inputs is a damaged picture"),
        (picture(kind="GIF", **frames), "inputs has several frames"),
        (picture("1", size=(12_000, 12_000)), "inputs has 12000 x 12000 pixels"),
        (picture("I", "TIFF"), "inputs has 32 bits"),
    ]
    for file, said in refused:
        reply = client.post("/", content=file, headers={"content-type": "image/png"})
        assert reply.status_code == 400 and said in reply.json()["error"], (said, reply.text)
    for given, said in (
        ("http://host/a.png", "fetches nothing"),
        ("data:image/png,x", "without ;base64"),
        ("?", "not a file in base64"),
    ):
        reply = client.post("/", json={"inputs": given})
        assert reply.status_code == 400 and said in reply.json()["error"]


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_texts_and_pictures_in_one_space(pictures: Any, name: str) -> None:
    import torch
    from PIL import Image

    server, model, (tokenizer, processor) = pictures(name)
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    reply = server.client.post("/v1/embeddings", json={"input": ["new york", url, "paris"]})
    assert reply.status_code == 200, reply.text
    padding = {"padding": "max_length", "max_length": 64} if name == "siglip" else {"padding": True}
    with torch.inference_mode():
        texts = [
            model.get_text_features(**tokenizer([one], return_tensors="pt", **padding)) for one in ("new york", "paris")
        ]
        seen = model.get_image_features(**processor(Image.open(io.BytesIO(picture())), return_tensors="pt"))
    for data, wanted in zip(reply.json()["data"], (texts[0], seen, texts[1]), strict=True):
        vector = wanted.pooler_output[0]
        assert data["embedding"] == pytest.approx((vector / vector.norm()).tolist(), abs=1e-4)
    found = client_of(server).zero_shot_image_classification(picture(), ["sport", "new york"])
    assert {one.label for one in found} == {"sport", "new york"}
    for given, field in ((["new york", url[:-40]], "input[1]"), ("text " * 80, "input")):
        bad = server.client.post("/v1/embeddings", json={"input": given})
        assert bad.status_code == 400 and bad.json()["error"]["param"] == field, bad.text
