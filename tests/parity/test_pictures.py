"""Pictures in chats: greedy text equals that of the library's processor and `generate`, in FP32, whatever runs beside."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from app.backends import selection
from app.engine.decoder.device_runner import DeviceDecoderRunner
from app.engine.scheduler.batch import Batch
from app.engine.transformers import tower_kernels
from app.engine.transformers.loading import PackedLinear
from app.engine.transformers.tower import PictureTower
from app.errors import InvalidRequest
from app.messages import FIRST_VECTOR_ID, RequestFailed, SamplingParams, TokensReady
from app.models.decoders.config import ModelConfig
from app.server import prepare as prepare_module
from app.server.prepare import prepare
from app.server.startup import make_served_model, read_chat_template
from app.service.prompt import Prompt, read_prompt, render_chat
from app.service.requests import GenerationRequest, Picture
from app.service.served_model import ServedDecoder
from app.settings import Settings
from app.text.tokenizer_check import try_and_load
from picture_checkpoints import FORMS, Reference, write_reader
from quantized_files import write_as_gptq
from simulated_device import SimulatedDeviceBackend, with_gpu

NUM_TOKENS = 8
AXES, BLOCKS = "Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"
FAST = ("SmolVLMForConditionalGeneration/llama", "LlavaNextForConditionalGeneration/granite", AXES, BLOCKS)


def picture(width: int, height: int, seed: int) -> Any:
    values = numpy.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(values)


SMALL, WIDE, TALL = picture(30, 20, 1), picture(90, 50, 2), picture(25, 80, 3)
Talk = list[tuple[str, list[Any]]]  # role, and texts and pictures
TALKS: dict[str, Talk] = {
    "one": [("user", [SMALL, "What is it?"])],
    "wide": [("user", ["Look: ", WIDE, " what?"])],
    "two": [("user", [WIDE, "and", TALL, "?"])],
    "earlier": [("user", [SMALL, "What is it?"]), ("assistant", ["A thing."]), ("user", ["Why?"])],
    "text": [("user", ["Hello there"])],
}


@dataclass
class Served:
    reference: Reference
    model: ServedDecoder
    engine: Any

    def request(self, talk: Talk, max_tokens: int = NUM_TOKENS, **params: Any) -> GenerationRequest:
        found: list[Picture] = []
        messages = []
        for role, parts in talk:
            content = []
            for part in parts:
                if isinstance(part, str):
                    content.append({"type": "text", "text": part})
                else:
                    content.append({"type": "image"})
                    found.append(Picture(base64.b64encode(file_of(part)).decode(), "messages[0].content[0]"))
            messages.append({"role": role, "content": content})
        given = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)
        return GenerationRequest(given, "chat", "", messages=tuple(messages), pictures=tuple(found))

    def prompt(self, talk: Talk, **params: Any) -> Prompt:
        request = self.request(talk, **params)
        assert self.model.pictures is not None
        return read_prompt(self.model, request, self.model.pictures.read(request.pictures) if request.pictures else ())

    def texts(self, talks: Sequence[Talk], **params: Any) -> list[list[int]]:
        """The completions of conversations that run together."""
        found: dict[str, list[int]] = {str(place): [] for place in range(len(talks))}
        for place, talk in enumerate(talks):
            assert self.engine.add(self.prompt(talk, **params).command(str(place), 0.0)) == []
        while self.engine.has_work:
            for event in self.engine.step():
                assert not isinstance(event, RequestFailed), event.error
                if isinstance(event, TokensReady):
                    found[event.request_id] += event.token_ids
        return list(found.values())

    def expected(self, talk: Talk) -> list[int]:
        text = render_chat(self.model, self.request(talk).messages or (), {})
        pictures = [part for _, parts in talk for part in parts if not isinstance(part, str)]
        return self.reference.generated(text, pictures, NUM_TOKENS)


def file_of(shown: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    shown.save(file, kind, **options)
    return file.getvalue()


def serve(directory: Path, reference: Reference, **settings: Any) -> Served:
    from app.engine.build import BuildRequest, build

    values = {"precision": "fp32", "threads": 1, "cache_dir": directory / "cache", **settings}
    prepared = prepare(Settings(model=directory, **values))
    tokenizer = try_and_load(prepared.checkpoint.location, None, False)
    model = make_served_model(prepared, tokenizer, read_chat_template(prepared, tokenizer))
    assert isinstance(model, ServedDecoder)
    return Served(reference, model, build(BuildRequest(prepared.checkpoint, prepared.plan)))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that serves the tiny checkpoint of a family, which is written once."""
    written: dict[str, tuple[Path, Reference]] = {}
    opened: list[ServedDecoder] = []

    def start(name: str, **settings: Any) -> Served:
        if name not in written:
            directory = tmp_path_factory.mktemp("reader") / "model"
            written[name] = directory, write_reader(directory, name)
        made = serve(*written[name], **settings)
        opened.append(made.model)
        return made

    yield start
    for model in opened:
        model.close()


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in FORMS]
)
def test_text_is_that_of_the_library_alone_and_in_a_crowd(name: str, served: Callable[..., Served]) -> None:
    one = served(name)
    talks = [talk for kind, talk in TALKS.items() if kind != "text" or "PaliGemma" not in name]
    expected = [one.expected(talk) for talk in talks]
    assert len({tuple(text) for text in expected}) > 2, "the pictures matter"
    alone = [one.texts([talk])[0] for talk in talks]
    assert alone == expected
    assert one.texts(talks) == expected, "with what the first ones left in the prefix cache"


@pytest.mark.parametrize("name", [FAST[0], AXES, BLOCKS])
def test_prompts_in_small_parts_have_the_same_text(name: str, served: Callable[..., Served]) -> None:
    one = served(name, max_batch_tokens=5, max_running_seqs=4)
    assert one.texts(list(TALKS.values())) == [one.expected(talk) for talk in TALKS.values()]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        (AXES, 24),
        (BLOCKS, 512),
        pytest.param("PaliGemmaForConditionalGeneration/gemma2", 512, marks=pytest.mark.full),
        pytest.param("Gemma4ForConditionalGeneration/blocks", 512, marks=pytest.mark.full),
    ],
)
def test_a_device_has_the_same_text(
    name: str, most: int, served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "probe", with_gpu)
    monkeypatch.setattr(selection, "DEVICE_BACKENDS", {"cuda": SimulatedDeviceBackend})
    one = served(name, device="cuda", kv_cache_bytes=2**23, max_batch_tokens=most)
    assert isinstance(one.engine.runner, DeviceDecoderRunner)
    talks = [talk for kind, talk in TALKS.items() if kind != "text" or "PaliGemma" not in name]
    expected = [one.expected(talk) for talk in talks]
    assert one.texts(talks) == expected
    assert one.texts(talks) == expected, "with what the first ones left in the prefix cache"


TOGETHER = ("Lfm2", "Mistral3", "InternVL", "LlavaOnevision", "Gemma4", "PaliGemma", "Qwen2_5", "Glm4v", "Ovis2")


@pytest.mark.parametrize(
    "name",
    [*FAST, *(pytest.param(name, marks=pytest.mark.full) for name in FORMS if name.startswith(TOGETHER))],
)
def test_pictures_of_one_size_are_encoded_together(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_reader(tmp_path, name)
    config = prepare(Settings(model=tmp_path, cache_dir=tmp_path / "cache")).checkpoint.model_config
    assert isinstance(config, ModelConfig)
    tower = PictureTower(tmp_path, config)
    files = [(file_of(one), "messages") for one in (WIDE, SMALL, picture(90, 50, 7), TALL, picture(90, 50, 8))]
    together: list[int] = []
    encode = tower.read_alike
    monkeypatch.setattr(tower, "read_alike", lambda shown, *more: together.append(len(shown)) or encode(shown, *more))
    others = [(file_of(picture(90, 50, 9)), ""), (b"none", ""), (file_of(picture(40, 41, 9)), "")]
    found, more = tower.read_all(files, False, others)
    assert sorted(together) == [1, 1, 4] and [one is None for one in more] == [False, True, True]
    for one, file in zip(found, files, strict=True):
        alone = tower.read_all([file], False)[0][0]
        assert (one.token_ids, one.around) == (alone.token_ids, alone.around)
        for run, other in zip(one.runs, alone.runs, strict=True):
            ours, theirs = ((each.start, each.num_rows, each.places, each.block) for each in (run, other))
            assert ours == theirs
            pair = (numpy.frombuffer(each.data, "<f4") for each in (run, other))
            numpy.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [FAST[0], AXES, BLOCKS])
def test_the_second_question_computes_neither_the_picture_nor_its_tokens_again(
    name: str, served: Callable[..., Served]
) -> None:
    one = served(name)
    known: list[bool] = []
    assert one.model.pictures is not None
    one.model.pictures.report = lambda is_known, seconds: known.append(is_known)
    first: Talk = [("user", [WIDE, TALL, "What is it?"])]
    second: Talk = [("user", [WIDE, TALL, "Where is it?"])]
    other: Talk = [("user", [picture(90, 50, 9), TALL, "Where is it?"])]
    assert one.texts([first]) == [one.expected(first)]
    batches: list[Batch] = []
    run = one.engine.runner.run
    one.engine.runner.run = lambda batch: batches.append(batch) or run(batch)
    assert one.texts([second]) == [one.expected(second)]
    length = len(one.prompt(second).token_ids)
    assert batches[0].cached_tokens > length - 20 and batches[0].num_tokens < 20
    batches.clear()
    assert one.texts([other]) == [one.expected(other)]
    assert batches[0].cached_tokens < 10, "another picture with the same tokens is another prompt"
    assert known == [False, False, *[True] * 4, False, True]


def test_a_quantized_language_model_has_the_tower_of_the_plain_one(tmp_path: Path) -> None:
    reference = write_reader(tmp_path / "plain", AXES)
    quantized = serve(write_as_gptq(tmp_path / "plain", tmp_path / "gptq", 32), reference, precision="auto")
    plain = serve(tmp_path / "plain", reference)
    prompts = [one.prompt(TALKS["two"]) for one in (plain, quantized)]
    placed = [one.placed for one in prompts]
    assert replace(placed[0], vectors=()) == replace(placed[1], vectors=()) and len(placed[0].vectors) == 2
    vectors = [
        torch.cat([torch.frombuffer(bytearray(each.data), dtype=torch.float32) for each in one.vectors])
        for one in placed
    ]
    assert torch.cosine_similarity(*vectors, dim=0) > 0.999, "the tower may be in BF16 or eight bits here"
    assert len(quantized.texts([TALKS["two"]])[0]) == NUM_TOKENS
    for one in (plain, quantized):
        one.model.close()


@pytest.mark.parametrize(
    "name",
    [
        *FAST,
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in FORMS
            if name.partition("For")[0] in ("Qwen2_5_VL", "Gemma4", "Mistral3", "Lfm2Vl", "Glm4v", "Ovis2")
        ),
    ],
)
def test_a_tower_by_kernels_has_nearly_the_same_vectors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tower_kernels, "_LARGE_WEIGHT", 1)
    monkeypatch.setattr(tower_kernels, "_seconds", lambda multiply, rows: 0.0 if "multiply" in repr(multiply) else 1.0)
    write_reader(tmp_path, name)
    config = prepare(Settings(model=tmp_path, cache_dir=tmp_path / "cache")).checkpoint.model_config
    assert isinstance(config, ModelConfig)
    found = []
    for dtype, is_quantized in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        tower = PictureTower(tmp_path, config, 1.0, dtype, is_quantized)
        assert dtype == "float32" or any(isinstance(one, PackedLinear) for one in tower._model.modules())
        vectors = tower.read_all([(file_of(WIDE), "messages")], True)[0][0]
        found.append(numpy.concatenate([numpy.frombuffer(run.data, "<f4") for run in vectors.runs]))
    for one, least in zip(found[1:], (0.999, 0.995), strict=True):
        similarity = found[0] @ one / numpy.linalg.norm(found[0]) / numpy.linalg.norm(one)
        assert least < similarity < 1.0


def test_penalties_know_no_tokens_of_pictures(served: Callable[..., Served]) -> None:
    one = served(FAST[0])
    prompt = one.prompt(TALKS["two"])
    assert max(prompt.token_ids) < 320 and max(prompt.placed.engine_ids) >= FIRST_VECTOR_ID
    plain, penal = ({}, {"repetition_penalty": 2.0, "presence_penalty": 0.5})
    assert len(one.texts([TALKS["two"]], **penal)[0]) == NUM_TOKENS
    assert one.texts([TALKS["two"]], **penal) != one.texts([TALKS["two"]], **plain)


def test_what_cannot_be_combined_is_refused(served: Callable[..., Served]) -> None:
    one = served(FAST[0])
    with pytest.raises(InvalidRequest, match="prompt_logprobs cannot be combined with pictures"):
        one.prompt(TALKS["one"], prompt_logprobs=1)
    with pytest.raises(InvalidRequest, match="makes 2 places for 1 pictures"):
        one.prompt([("user", [SMALL, "What is <image>?"])])
    with pytest.raises(InvalidRequest, match="maximum context length"):
        one.prompt([("user", [SMALL, WIDE, TALL] * 3)])


def test_a_prompt_whose_tokens_see_each_other_is_within_the_window(served: Callable[..., Served]) -> None:
    one = served("PaliGemmaForConditionalGeneration/gemma2")
    assert len(one.prompt([("user", [SMALL, "What?"])]).token_ids) < 64
    with pytest.raises(InvalidRequest, match="tokens that see each other, and a layer's window 64"):
        one.prompt([("user", [SMALL, "What is it? " * 6])])
