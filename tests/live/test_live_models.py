"""Several models behind one address: routing in each dialect, lists, failures, metrics, loading and unloading."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from app.cli.clients.chat import Chat, Conversation
from app.cli.clients.connection import ServerConnection
from app.cli.main import main
from app.errors import SettingsInvalid
from app.settings import DEMO_DIRECTORY
from task_checkpoints import LABELS, TEXTS, write_task_checkpoint
from tests.live.several_models import LiveModels, several
from tests.live.web_browser import WITHOUT_BROWSER, Visits, send, wait_for_answers
from tiny_checkpoints import write_checkpoint
from tiny_encoders import write_encoder

# Four processes are started; `test_live_model_loads.py` serves two models in `make test`.
pytestmark = pytest.mark.full

CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("several")
    return {
        "chat": DEMO_DIRECTORY,
        "tiny": write_checkpoint(folder / "tiny"),
        "embed": write_encoder(folder / "embed"),
        "rerank": write_encoder(folder / "rerank", "BertForSequenceClassification"),
    }


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> Iterator[LiveModels]:
    tables: dict[str, Any] = dict(folders)
    tables["chat"] = {"model": folders["chat"], "served_model_name": ["gpt"]}
    with several(tables) as server:
        yield server
    assert not server.fatal


def test_a_request_is_served_by_the_model_that_it_names(models: LiveModels) -> None:
    for name, answers in (("chat", "chat"), ("gpt", "chat"), ("tiny", "tiny")):
        body = models.post("/v1/completions", model=name, prompt="Once", max_tokens=2)
        assert (body.status_code, body.json()["model"]) == (200, answers)
    for name in ("embed", "rerank"):
        body = models.post("/v1/rerank", model=name, query="a", documents=["a", "b"])
        assert (body.status_code, body.json()["model"]) == (200, name)


NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("chat", {"messages": CHAT, "max_tokens": 2}),
    "/v1/completions": ("tiny", {"prompt": "Once", "max_tokens": 2}),
    "/v1/responses": ("chat", {"input": "Hello", "max_output_tokens": 2}),
    "/v1/messages": ("chat", {"messages": CHAT, "max_tokens": 2}),
    "/generate": ("tiny", {"prompt": "Once", "max_tokens": 2}),
    "/completion": ("tiny", {"prompt": "Once", "n_predict": 2}),
    "/api/generate": ("tiny", {"prompt": "Once", "stream": False, "options": {"num_predict": 2}}),
    "/api/chat": ("chat", {"messages": CHAT, "stream": False, "options": {"num_predict": 2}}),
    "/api/embed": ("embed", {"input": "a"}),
    "/api/show": ("rerank", {}),
    "/v1/embeddings": ("embed", {"input": "a"}),
    "/v1/rerank": ("rerank", {"query": "a", "documents": ["b"]}),
    "/v2/rerank": ("rerank", {"query": "a", "documents": ["b"]}),
    "/v1/score": ("rerank", {"text_1": "a", "text_2": "b"}),
    "/v1/classify": ("rerank", {"input": "a"}),
    "/tokenize": ("embed", {"prompt": "a"}),
    "/invocations": ("rerank", {"query": "a", "documents": ["b"]}),
}


@pytest.mark.parametrize("path", NAMED)
def test_each_dialect_routes_by_the_name_in_the_body(models: LiveModels, path: str) -> None:
    name, body = NAMED[path]
    answer = models.post(path, model=name, **body)
    assert answer.status_code == 200, answer.text
    if "model" in answer.json():
        assert answer.json()["model"] == name
    wrong = models.post(path, model="absent", **body)
    assert (wrong.status_code, wrong.headers["content-type"]) == (404, "application/json"), wrong.text
    for known in ("chat", "tiny", "embed", "rerank"):
        assert f"'{known}'" in wrong.text


# Without a name, the first model that can do it.
UNNAMED: dict[str, tuple[str, dict[str, Any]]] = {
    path: (name, body)
    for path, (name, body) in {
        **{path: ("chat", body) for path, (name, body) in NAMED.items() if name in ("chat", "tiny")},
        **{path: (name, body) for path, (name, body) in NAMED.items() if name in ("embed", "rerank")},
    }.items()
    if path not in ("/v2/rerank", "/api/generate", "/api/chat", "/api/embed", "/api/show", "/tokenize")  # need a name
}


@pytest.mark.parametrize("path", UNNAMED)
def test_without_a_name_the_first_model_that_can_do_it_answers(models: LiveModels, path: str) -> None:
    name, body = UNNAMED[path]
    before = models.run(lambda: {entry.name: entry.metrics.num_steps for entry in models.registry.entries})
    answer = models.post(path, **body)
    after = models.run(lambda: {entry.name: entry.metrics.num_steps for entry in models.registry.entries})
    assert answer.status_code == 200, answer.text
    assert [each for each in after if after[each] > before[each]] == [name]


def test_open_inference_routes_by_the_name_in_the_path(models: LiveModels) -> None:
    generated = models.post("/v2/models/tiny/generate", text_input="Once", parameters={"max_tokens": 2})
    assert (generated.status_code, generated.json()["model_name"]) == (200, "tiny")
    inputs = [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}]
    inferred = models.post("/v2/models/embed/versions/1/infer", inputs=inputs)
    assert (inferred.status_code, inferred.json()["model_name"]) == (200, "embed"), inferred.text
    assert models.client.get("/v2/models/rerank").json()["name"] == "rerank"
    assert models.client.get("/v2/models/rerank/ready").json() == {"name": "rerank", "ready": True}
    for path in ("/v2/models/absent", "/v2/models/absent/ready", "/v2/models/absent/config"):
        wrong = models.client.get(path)
        assert wrong.status_code == 404
        assert "'rerank'" in wrong.json()["error"]


def test_the_lists_have_all_models(models: LiveModels) -> None:
    get = models.client.get
    names = ["chat", "gpt", "tiny", "embed", "rerank"]
    listed = get("/v1/models").json()["data"]
    assert [(one["id"], one["root"], one["status"]) for one in listed] == [
        (name, "chat" if name == "gpt" else name, {"value": "loaded"}) for name in names
    ]
    assert get("/v1/models/gpt").json() == listed[1]
    assert get("/v1/models/absent").status_code == 404
    assert [one["name"] for one in get("/api/tags").json()["models"]] == names
    assert [one["name"] for one in get("/api/ps").json()["models"]] == ["chat", "tiny", "embed", "rerank"]
    index = models.post("/v2/repository/index", ready=True).json()
    assert [(one["name"], one["state"]) for one in index] == [
        (name, "READY") for name in ("chat", "tiny", "embed", "rerank")
    ]
    assert [one["name"] for one in get("/v2/models/stats").json()["model_stats"]] == ["chat", "tiny", "embed", "rerank"]
    assert get("/props?model=tiny").json()["model_path"] == "tiny"
    info = get("/info?model=embed").json()
    assert info["model"]["kind"] == "encoder"
    assert [(one["name"], one["kind"], one["state"]) for one in info["models"]] == [
        ("chat", "decoder", "ready"), ("tiny", "decoder", "ready"), ("embed", "encoder", "ready"), ("rerank", "encoder", "ready"),
    ]  # fmt: skip
    assert get("/readyz").json() == {
        "status": "ready",
        "models": {name: {"state": "ready"} for name in ("chat", "tiny", "embed", "rerank")},
    }
    assert [one["model"] for one in get("/v1/loads").json()["loads"]] == ["chat", "tiny", "embed", "rerank"]
    for path in ("/healthz", "/health", "/v2/health/live", "/v2/health/ready"):
        assert get(path).status_code == 200


def test_samples_of_a_model_have_its_name_and_those_of_the_process_are_there_once(models: LiveModels) -> None:
    models.post("/v1/completions", model="tiny", prompt="Once", max_tokens=3)
    for accept in ("text/plain", "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"):
        text = models.client.get("/metrics", headers={"accept": accept}).text
        parse = openmetrics_families if "openmetrics" in accept else text_string_to_metric_families
        families = {family.name: family.samples for family in parse(text)}
        running = families["armature_requests_running"]
        assert [sample.labels["model"] for sample in running] == ["chat", "tiny", "embed", "rerank"]
        assert [sample.labels for sample in families["process_open_fds"]] == [{}]
        responses = families["armature_http_requests"]
        assert responses
        assert all("model" not in sample.labels for sample in responses)
        tokens = {sample.labels["model"] for sample in families["armature_tokens"] if sample.value}
        assert {"tiny"} <= tokens
    alone = models.client.get("/metrics?model=tiny").text
    assert 'model="embed"' not in alone
    assert "armature_requests_running 0.0" in alone


@pytest.fixture(scope="module")
def keyed(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveModels]:
    """Models with keys of their own; the first cannot be loaded, so that its requests pass the keys and end there."""
    file = tmp_path_factory.mktemp("keys") / "embed"
    file.write_text("of-embed\nof-both\n")
    common = {"api_keys": ("of-chat", "of-both"), "load": "on-demand", "model_control": "on"}
    embed = {"model": folders["embed"], "api_keys": (), "api_key_file": file}
    with several({"chat": folders["chat"], "embed": embed}, **common) as server:
        entry = server.registry.entries[0]
        entry.state, entry.reason, entry.retry_at = "failed", "no memory", time.monotonic() + 3_600
        yield server


def keyed_as(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@pytest.mark.parametrize("path", [path for path in NAMED if NAMED[path][0] == "chat"])
def test_a_key_that_may_not_use_the_model_is_refused_in_the_form_of_the_dialect(keyed: LiveModels, path: str) -> None:
    body = {**NAMED[path][1], "model": "chat"}
    answers = {key: keyed.client.post(path, json=body, headers=keyed_as(key)) for key in ("", "of-embed", "of-both")}
    assert [one.status_code for one in answers.values()] == [401, 403, 503]
    assert "'chat'" in answers["of-embed"].text
    assert "'embed'" not in answers["of-embed"].text
    error, other = (answers[key].json().get("error") for key in ("of-embed", "of-both"))
    assert type(error) is type(other) and (isinstance(error, str) or error.keys() == other.keys())
    absent = keyed.client.post(path, json={**body, "model": "absent"}, headers=keyed_as("of-embed"))
    assert (absent.status_code, "'embed'" in absent.text, "'chat'" in absent.text) == (404, True, False)


def test_a_key_sees_loads_and_is_served_by_its_models_alone(keyed: LiveModels) -> None:
    for key, names in (("of-embed", ["embed"]), ("of-chat", ["chat"]), ("of-both", ["chat", "embed"])):
        headers = keyed_as(key)
        get = partial(keyed.client.get, headers=headers)
        assert [one["id"] for one in get("/v1/models").json()["data"]] == names
        assert [one["name"] for one in get("/api/tags").json()["models"]] == names
        assert [one["name"] for one in get("/v2/models/stats").json()["model_stats"]] == names
        assert [one["model"] for one in get("/v1/loads").json()["loads"]] == names
        index = keyed.client.post("/v2/repository/index", json={}, headers=headers).json()
        assert [one["name"] for one in index] == [one["name"] for one in get("/info").json()["models"]] == names
    for path in ("/v1/models/chat", "/v2/models/chat", "/info?model=chat"):
        assert keyed.client.get(path, headers=keyed_as("of-embed")).status_code == 403
    for path, body in (("/models/unload", {"model": "chat"}), ("/v2/repository/models/chat/load", {})):
        assert keyed.client.post(path, json=body, headers=keyed_as("of-embed")).status_code == 403
    unnamed = keyed.client.post("/v1/completions", json={"prompt": "a"}, headers=keyed_as("of-embed"))
    assert (unnamed.status_code, unnamed.json()["error"]["code"]) == (400, "wrong_model_kind")
    assert keyed.client.get("/info").status_code == 200  # its short form


def test_a_model_of_tasks_is_served_beside_others(folders: dict[str, Path], tmp_path: Path) -> None:
    write_task_checkpoint(tmp_path, "BertForTokenClassification", LABELS)
    with several({"tiny": folders["tiny"], "tags": tmp_path}) as server:
        assert server.client.get("/info?model=tags").json()["plan"]["engine"]["value"] == "transformers"
        body = {"inputs": [TEXTS[0], TEXTS[1]]}
        for path in ("/models/tags/pipeline/token-classification", "/models/tags", "/pipeline/token-classification"):
            found = server.post(path, **body)
            assert found.status_code == 200 and len(found.json()) == 2, found.text
            assert set(found.json()[0][0]) >= {"entity", "score", "word"}
        assert server.post("/v1/completions", model="tiny", prompt="Once", max_tokens=2).json()["model"] == "tiny"
        refused = server.post("/v1/completions", model="tags", prompt="Once", max_tokens=2)
        assert refused.status_code == 400
        assert server.post("/models/tiny/pipeline/token-classification", **body).status_code == 400
        nobody = server.post("/pipeline/fill-mask", **body)
        assert nobody.status_code == 400
        assert "'tiny' does generate; 'tags' does" in nobody.text


def test_a_model_without_keys_beside_models_with_keys_is_refused(folders: dict[str, Path]) -> None:
    tables: dict[str, Any] = {"chat": folders["chat"], "embed": {"model": folders["embed"], "api_keys": ("a",)}}
    with pytest.raises(SettingsInvalid, match="The model chat has no API keys, and others have"), several(tables):
        raise AssertionError


def test_models_are_not_loaded_or_unloaded_by_clients_unless_the_operator_lets_them(models: LiveModels) -> None:
    for path, body in (
        ("/v2/repository/models/tiny/unload", {}),
        ("/v2/repository/models/tiny/load", {}),
        ("/models/unload", {"model": "tiny"}),
        ("/models/load", {"model": "tiny"}),
    ):
        refused = models.post(path, **body)
        assert refused.status_code == 400
        assert "--model-control" in refused.text
    kept = models.post("/api/generate", model="tiny", prompt="a", keep_alive=0, stream=False)
    assert kept.status_code == 200
    assert models.states()["tiny"] == "ready"


def test_top_and_chat_choose_among_the_models(models: LiveModels, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", models.url, "--once"]) == 0
    assert "chat, a decoder on cpu" in capsys.readouterr().out
    assert main(["top", "--url", models.url, "--once", "--model", "embed"]) == 0
    assert "embed, a encoder on cpu" in capsys.readouterr().out
    assert main(["top", "--url", models.url, "--once", "--model", "absent"]) == 1
    assert "has no model 'absent'; it has chat, tiny, embed, rerank" in capsys.readouterr().err
    server = ServerConnection(models.url)
    chat = Chat(server, Conversation("chat"))
    for text, model, said in (
        ("tiny", "tiny", "model: tiny"),
        ("absent", "tiny", "no model 'absent'"),
        ("", "tiny", "gpt"),
    ):
        chat.set_model(text)
        assert chat.conversation.model == model
        assert said in capsys.readouterr().err


@WITHOUT_BROWSER
def test_the_page_has_a_list_of_the_models(models: LiveModels, browser: Any, visit: Visits) -> None:
    page = visit(models)  # type: ignore[arg-type]  # it has an address
    send(page, "Tell me a story about a fox.")
    wait_for_answers(page)
    page.get_by_label("Model").select_option("embed")
    page.get_by_role("heading", name="Compare").wait_for()
    assert page.title() == "embed – Armature"
    assert page.get_by_label("Model").input_value() == "embed"
    page.goto(f"{models.url}/?model=tiny#now")
    page.get_by_text("Tokens a second").first.wait_for()


@WITHOUT_BROWSER
def test_the_page_loads_the_model_that_is_chosen(folders: dict[str, Path], browser: Any, visit: Visits) -> None:
    with several({"tiny": folders["tiny"], "embed": {"model": folders["embed"], "load": "on-demand"}}) as server:
        page = visit(server)  # type: ignore[arg-type]  # it has an address
        page.get_by_label("Model").select_option("embed")
        page.get_by_role("heading", name="Compare").wait_for()
        assert server.states() == {"tiny": "ready", "embed": "ready"}


def test_the_example_of_retrieval_runs_with_an_unchanged_client(
    models: LiveModels, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    pytest.importorskip("openai")
    program = (root / "examples/clients/several_models.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(program.replace("http://127.0.0.1:8000", models.url), "several_models.py", "exec"), names)
    names["client"].close()
    best, answer = capsys.readouterr().out.split("\n", 1)
    assert best in ("Foxes live in dens.", "The tenant pays on the first of each month.", "Whales breathe air.")
    assert answer.strip()
