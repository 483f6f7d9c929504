"""A live server with a tiny model that reads pictures, and unchanged clients."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image

from picture_checkpoints import write_reader
from tests.live.live_server import LiveServer, live


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("reader") / "model"
    write_reader(directory, "SmolVLMForConditionalGeneration/llama")
    with live(directory, served_model_name="tiny", max_images=2) as server:
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


def test_what_pictures_may_be(running: LiveServer) -> None:
    def post(*urls: str) -> Any:
        return running.client.post("/v1/chat/completions", json={"max_tokens": 2, "messages": asked(*urls)})

    for url in (data_url("CMYK", "JPEG"), data_url("RGBA"), data_url("P"), data_url("I;16"), data_url("L")):
        assert post(url).status_code == 200
    exif = Image.Exif()
    exif[0x0112] = 6
    assert post(data_url("RGB", "JPEG", exif=exif)).status_code == 200
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    large = io.BytesIO()
    Image.new("1", (9000, 9000)).save(large, "PNG")
    whole = base64.b64decode(data_url(size=(300, 200)).partition(",")[2])
    wrong = {
        "several frames": file.getvalue(),
        "9000 x 9000 pixels": large.getvalue(),
        "damaged": whole[: len(whole) // 2],
        "is not a picture that is known here": b"<svg/>",
        "32 bits in a channel": base64.b64decode(data_url("F", "TIFF").partition(",")[2]),
    }
    for message, data in wrong.items():
        response = post(url_of(data))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "messages[0].content[0]"), message
        assert message in error["message"]
    assert "no base64" in post("data:image/png;base64,!!!").json()["error"]["message"]
    error = post(data_url(), data_url(), data_url()).json()["error"]
    assert "max_images" in error["message"] and error["param"] == "messages[0].content[2]"


def test_a_model_that_reads_text_refuses_a_picture(server: LiveServer) -> None:
    response = server.client.post("/v1/chat/completions", json={"messages": asked(data_url())})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[0].content[0]")
    assert "is a picture, and this server reads only text with this model" in error["message"]
