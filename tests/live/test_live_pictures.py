"""A live server with a tiny model that reads pictures: every dialect, addresses, and the web page."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest
from PIL import Image

from picture_checkpoints import write_reader
from tests.live.live_server import LiveServer, live
from tests.live.web_browser import WITHOUT_BROWSER, Visits, findings, wait, wait_for_answers


class Files(BaseHTTPRequestHandler):
    """A host of pictures."""

    def do_GET(self) -> None:
        is_page = self.path != "/a.png"
        self.send_response(404 if self.path == "/404" else 200)
        self.send_header("content-type", "text/html" if is_page else "image/png")
        self.end_headers()
        self.wfile.write(base64.b64decode(data_url().partition(",")[2]))

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, files: str) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("reader") / "model"
    write_reader(directory, "SmolVLMForConditionalGeneration/llama")
    with live(directory, served_model_name="tiny", max_images=2, allow_image_urls=(files,)) as server:
        yield server


def data_url(mode: str = "RGB", kind: str = "PNG", size: tuple[int, int] = (60, 40), **options: Any) -> str:
    file = io.BytesIO()
    Image.new(mode, size, 1 if mode in ("I", "F") else "red").save(file, kind, **options)
    return url_of(file.getvalue())


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def asked(*urls: str) -> list[Any]:
    pictures = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": "What is it?"}]}]


def test_a_client_sends_a_picture_and_streams_the_answer(running: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0.0, "messages": asked(data_url())}
    with client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    ) as stream:
        chunks = list(stream)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    usage = chunks[-1].usage
    assert usage is not None and usage.prompt_tokens > 34 and usage.completion_tokens == 6
    whole = client.chat.completions.create(**options, extra_body={"ignore_eos": True})
    assert whole.choices[0].message.content == streamed
    assert whole.usage is not None and whole.usage.prompt_tokens == usage.prompt_tokens
    counted = running.client.post("/v1/chat/completions/input_tokens", json={"messages": asked(data_url())}).json()
    assert counted["input_tokens"] == usage.prompt_tokens
    assert running.metric("armature_pictures_total", kind="encoded") == 1
    assert running.metric("armature_pictures_total", kind="cached") == 2
    assert running.metric("armature_picture_seconds_count") == 1


def test_a_picture_that_cannot_be_read_is_refused_with_its_place(running: LiveServer) -> None:
    def refusal(*urls: str) -> Any:
        response = running.client.post("/v1/chat/completions", json={"max_tokens": 2, "messages": asked(*urls)})
        assert response.status_code == 400, response.text
        return response.json()["error"]

    error = refusal(data_url(), url_of(base64.b64decode(data_url(size=(300, 200)).partition(",")[2])[:300]))
    assert "damaged" in error["message"] and error["param"] == "messages[0].content[1]"
    assert "no base64" in refusal("data:image/png;base64,!!!")["message"]
    error = refusal(data_url(), data_url(), data_url())
    assert "max_images" in error["message"] and error["param"] == "messages[0].content[2]"


def test_every_count_of_tokens_includes_pictures(running: LiveServer) -> None:
    encoded = data_url().partition(",")[2]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}
    text = {"type": "text", "text": "What is it?"}
    bodies: dict[str, tuple[dict[str, Any], str]] = {
        "/v1/chat/completions/input_tokens": ({"messages": asked(data_url())}, "input_tokens"),
        "/v1/messages/count_tokens": ({"messages": [{"role": "user", "content": [block, text]}]}, "input_tokens"),
        "/v1/responses/input_tokens": (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": data_url()},
                            {"type": "input_text", "text": "What is it?"},
                        ],
                    }
                ]
            },
            "input_tokens",
        ),
        "/tokenize": ({"messages": asked(data_url())}, "count"),
    }
    counts = {}
    for path, (body, name) in bodies.items():
        response = running.client.post(path, json=body)
        assert response.status_code == 200, (path, response.text)
        counts[path] = response.json()[name]
    chat = running.client.post("/v1/chat/completions", json={"max_tokens": 1, "messages": asked(data_url())}).json()
    assert set(counts.values()) == {chat["usage"]["prompt_tokens"]}, counts
    ollama = {"messages": [{"role": "user", "content": "What is it?", "images": [encoded]}], "stream": False}
    answer = running.client.post("/api/chat", json={"model": "tiny", "options": {"num_predict": 1}, **ollama}).json()
    assert answer["prompt_eval_count"] == chat["usage"]["prompt_tokens"]


def answer(running: LiveServer, url: str) -> Any:
    body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "messages": asked(url)}
    return running.client.post("/v1/chat/completions", json=body).json()


def test_a_picture_at_an_address_is_the_same_picture(running: LiveServer, files: str) -> None:
    fetched, sent = answer(running, f"http://{files}/a.png"), answer(running, data_url())
    assert fetched["choices"] == sent["choices"]
    assert fetched["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "it is known by its content"
    error = answer(running, "https://example.org/a.png")["error"]
    assert "--allow-image-urls" in error["message"] and error["param"] == "messages[0].content[0]"


def test_what_llama_cpps_own_tests_ask_of_chats(running: LiveServer, files: str) -> None:
    cases = {f"http://{files}/a.png": 200, data_url(): 200, "malformed": 400}
    cases |= {f"http://{files}/404": 400, f"http://{files}/page": 400, "https://ggml.ai": 400}
    for url, status in cases.items():
        found = answer(running, url)
        assert ("choices" in found) == (status == 200), (url, found)


def test_llama_cpps_prompts_with_pictures(running: LiveServer) -> None:
    for path in ("/models", "/v1/models"):
        able = running.client.get(path).json()["models"]
        assert able == [{"name": "tiny", "model": "tiny", "capabilities": ["completion", "multimodal"]}]
    encoded = data_url().partition(",")[2]
    question = "What is <__media__>?"

    def complete(**body: Any) -> Any:
        response = running.client.post(
            "/completions", json={"temperature": 0, "n_predict": 6, "ignore_eos": True, **body}
        )
        return response.status_code, response.json()

    status, newer = complete(prompt={"prompt_string": question, "multimodal_data": [encoded]})
    assert status == 200 and newer["tokens_evaluated"] > 34 and newer["tokens_predicted"] == 6, newer
    status, older = complete(prompt="What is [img-3]?", image_data=[{"id": 3, "data": encoded}])
    assert (status, older["content"], older["tokens_evaluated"]) == (200, newer["content"], newer["tokens_evaluated"])
    other = data_url(size=(60, 41)).partition(",")[2]
    mixed = [{"prompt_string": question, "multimodal_data": [encoded]}, "text alone"]
    status, both = complete(prompt=mixed)
    assert status == 200 and both[0]["content"] == newer["content"] and both[1]["tokens_evaluated"] < 20
    rendered = running.client.post("/apply-template", json={"messages": asked(data_url())}).json()["prompt"]
    rendered = rendered.removeprefix("<s>")  # which every prompt gets
    prompt = {"prompt_string": rendered.replace("<image>", "<__media__>"), "multimodal_data": [encoded]}
    assert complete(prompt=prompt)[1]["content"] == answer(running, data_url())["choices"][0]["message"]["content"]
    wrong = {
        "no base64": {"prompt_string": question, "multimodal_data": ["malformed"]},
        "is not a picture that is known here": {"prompt_string": "What is this?", "multimodal_data": [""]},
        "The prompt has 0 places for 1 pictures": {"prompt_string": "What is this?", "multimodal_data": [encoded]},
        "The prompt has 1 places for 2 pictures": {"prompt_string": question, "multimodal_data": [encoded, other]},
    }
    for message, prompt in wrong.items():
        status, body = complete(prompt=prompt)
        assert status == 400 and message in body["error"]["message"], body
    props = running.client.get("/props").json()
    assert props["modalities"] == {"vision": True, "audio": False} and props["media_marker"] == "<__media__>"
    assert "vision" in running.client.post("/api/show", json={"model": "tiny"}).json()["capabilities"]


# ---- the web page ----------------------------------------------------------------------------------------------------

PASTE = """async (url) => {
  const data = new DataTransfer();
  data.items.add(new File([await (await fetch(url)).blob()], "pasted.png", { type: "image/png" }));
  const target = document.querySelector(".message");
  target.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
  const dropped = new DataTransfer();
  dropped.items.add(new File([data.files[0]], "dropped.png", { type: "image/png" }));
  document.querySelector(".talk").dispatchEvent(new DragEvent("drop", { dataTransfer: dropped, bubbles: true, cancelable: true }));
}"""


def a_file(name: str, content: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": "image/png", "buffer": content}


@pytest.mark.full
@WITHOUT_BROWSER
@pytest.mark.cases(ci=1)
@pytest.mark.parametrize("size", [(390, 844), (1280, 800)], ids=["phone", "wide"])
def test_a_picture_is_sent_from_the_page_and_stays_in_its_history(
    visit: Visits, running: LiveServer, size: tuple[int, int]
) -> None:
    page = visit(running, viewport={"width": size[0], "height": size[1]})
    page.get_by_text("reads pictures").wait_for()
    bodies: list[Any] = []
    page.on("request", lambda sent: bodies.append(sent.post_data_json) if "chat/completions" in sent.url else None)
    large = io.BytesIO()
    Image.new("RGB", (3000, 1500), "blue").save(large, "PNG")
    chooser = page.locator("input[type=file]")
    chooser.set_input_files([a_file("large.png", large.getvalue()), a_file("broken.png", b"no picture")])
    page.get_by_text("broken.png cannot be read").wait_for()
    page.locator(".chip img").wait_for()
    page.get_by_role("button", name="Remove large.png").click()
    assert page.locator(".chip").count() == 0
    page.evaluate(
        PASTE.replace("await (await fetch(url)).blob()", "Uint8Array.from(atob(url), (c) => c.charCodeAt(0))"),
        data_url().partition(",")[2],
    )
    page.locator(".chip").nth(1).wait_for()
    page.get_by_role("button", name="Remove pasted.png").click()
    chooser.set_input_files([a_file("large.png", large.getvalue())])
    page.locator(".chip").nth(1).wait_for()
    assert findings(page) == []
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("4")
    page.get_by_role("button", name="Settings").click()
    page.locator(".message").fill("What are they?")
    page.get_by_role("button", name="Send", exact=True).click()
    wait_for_answers(page)
    *pictures, text = bodies[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What are they?"}
    sent = [Image.open(io.BytesIO(base64.b64decode(one["image_url"]["url"].partition(",")[2]))) for one in pictures]
    assert [(one.format, one.size) for one in sent] == [("PNG", (60, 40)), ("JPEG", (1600, 800))]
    page.reload()
    page.locator(".user img.picture").nth(1).wait_for()
    assert page.locator(".user img.picture").first.get_attribute("alt") == "dropped.png"
    page.get_by_role("button", name="Retry").click()
    wait(page, lambda: len(bodies) == 2)
    assert bodies[1]["messages"] == bodies[0]["messages"]
    wait_for_answers(page)
    assert findings(page) == []
    page.get_by_role("button", name="Completion").click()
    chooser.set_input_files([a_file("large.png", large.getvalue())])
    page.get_by_text("large.png is a picture, and a text that is continued has none: choose Chat.").wait_for()


@pytest.mark.full
@WITHOUT_BROWSER
def test_the_page_of_a_model_that_reads_text_says_so(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    picture = base64.b64decode(data_url().partition(",")[2])
    page.locator("input[type=file]").set_input_files([a_file("a.png", picture)])
    page.get_by_text("a.png is a picture, and llama reads text alone.").wait_for()
    assert page.locator(".chip").count() == 0


def test_a_model_that_reads_text_refuses_a_picture(server: LiveServer) -> None:
    response = server.client.post("/v1/chat/completions", json={"messages": asked(data_url())})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[0].content[0]")
    assert "is a picture, and this server reads only text with this model" in error["message"]
