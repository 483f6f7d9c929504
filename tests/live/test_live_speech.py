"""Speech to text over OpenAI's routes and Hugging Face's, with a tiny random Whisper, and sounds that are none."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import openai
import pytest

from task_checkpoints import write_speech_checkpoint
from tests.live.live_server import LiveServer, live

soundfile = pytest.importorskip("soundfile", reason="the extra transformers has it")


def sound(seconds: float = 1.0, rate: int = 16_000, kind: str = "WAV", channels: int = 1) -> bytes:
    samples = numpy.random.default_rng(0).standard_normal((int(seconds * rate), channels)) * 0.1
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Any, Path]]:
    directory = tmp_path_factory.mktemp("whisper")
    model = write_speech_checkpoint(directory, "whisper")
    with live(directory) as server:
        yield server, model, directory


def by_pipeline(model: Any, directory: Path, data: bytes, **options: Any) -> Any:
    from transformers import AutoFeatureExtractor, AutoTokenizer, pipeline

    extractor = AutoFeatureExtractor.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    pipe = pipeline(
        "automatic-speech-recognition", model=model, tokenizer=tokenizer, feature_extractor=extractor, device="cpu"
    )
    return pipe(soundfile.read(io.BytesIO(data), dtype="float32")[0], **options)


def test_a_text_is_the_pipelines_in_each_format(whisper: Any) -> None:
    server, model, directory = whisper
    wanted = by_pipeline(model, directory, sound(), return_timestamps=True)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    ask = lambda **more: client.audio.transcriptions.create(file=("a.wav", sound()), model="whisper-1", **more)  # noqa: E731
    found = ask(response_format="verbose_json")
    assert found.text == wanted["text"] and found.duration == pytest.approx(1.0)
    starts = [one["timestamp"][0] for one in wanted["chunks"]]
    assert starts and [segment.start for segment in found.segments or ()] == starts
    assert ask(response_format="vtt").startswith("WEBVTT\n\n00:00:")
    assert ask(response_format="srt").startswith("1\n00:00:")
    assert ask(response_format="text") == by_pipeline(model, directory, sound())["text"] + "\n"
    events = list(ask(stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text == wanted["text"]
    assert server.metric("armature_audio_seconds_total") >= 5.0


def test_a_translation_a_prompt_and_other_files(whisper: Any) -> None:
    from huggingface_hub import InferenceClient

    server, _, _ = whisper
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    for kind, rate, channels in (("FLAC", 44_100, 2), ("OGG", 8_000, 1), ("MP3", 48_000, 1)):
        files = {"file": sound(0.5, rate, kind, channels)}
        reply = server.client.post("/v1/audio/translations", files=files, data={"prompt": "names"})
        assert reply.status_code == 200 and "text" in reply.json(), reply.text
    assert client.audio.transcriptions.create(file=("a", sound()), model="any", language="de").text is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        assert InferenceClient(model=server.url).automatic_speech_recognition(sound()).text is not None


def test_what_is_refused_names_the_field(whisper: Any) -> None:
    client = whisper[0].client
    path = "/v1/audio/transcriptions"
    good = sound()
    head = bytearray(sound(0.1, kind="FLAC"))
    head[21:26] = bytes([head[21] & 0xF0 | 0x0F, 0xFF, 0xFF, 0xFF, 0xFF])  # says that it has hours of samples
    cases: list[tuple[dict[str, Any], dict[str, str], str, str]] = [
        ({"file": b"not a sound"}, {}, "file", "is not a sound"),
        ({"file": bytes(head)}, {}, "file", "samples and 1 channels; it may have"),
        ({"file": sound(5_000, 8)}, {}, "file", "5,000 s in 40,000 samples and 1 channels; it may have 4,194 s"),
        ({"file": sound(0.1, 44_101)}, {}, "file", "not a usual rate"),
        ({"other": good}, {}, "file", "missing or empty"),
        ({"file": good}, {"language": "xx"}, "language", "must be one of de, en"),
        ({"file": good}, {"temperature": "warm"}, "temperature", "number"),
        ({"file": good}, {"response_format": "xml"}, "response_format", "verbose_json"),
        ({"file": good}, {"timestamp_granularities[]": "word"}, "timestamp_granularities", "verbose_json"),
        ({"file": good}, {"include[]": "logprobs"}, "include", "not supported"),
    ]
    for files, data, field, said in cases:
        reply = client.post(path, files=files, data=data)
        assert reply.status_code == 400, (field, reply.text)
        assert reply.json()["error"]["param"] == field and said in reply.json()["error"]["message"], reply.text
    assert client.post(path, json={"file": "x"}).status_code == 400
    assert client.post(path, files={"file": good}, headers={"origin": "http://other"}).status_code in (400, 403)
    assert client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}).status_code == 400
    body = {"inputs": "", "parameters": {}}
    assert "inputs" in json.dumps(client.post("/", json=body).json())
