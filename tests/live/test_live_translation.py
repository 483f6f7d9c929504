"""A tiny translator with an encoder, which transformers computes: languages, beams, limits and streams over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.live_server import LiveServer, live

CODES = ("en", "fr")
SOURCE = "Good morning"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The checkpoint's directory, and its model; its tokens 300 and 301 are languages."""
    from transformers_checkpoints import write_transformers_checkpoint

    directory = tmp_path_factory.mktemp("translator") / "model"
    model = write_transformers_checkpoint(directory, "M2M100ForConditionalGeneration")
    text = json.loads((directory / "tokenizer.json").read_text())
    for place, code in enumerate(CODES):
        token = f"__{code}__"
        text["model"]["vocab"] |= {f"<filler{n}>": n for n in range(len(text["model"]["vocab"]), 300)}
        text["model"]["vocab"][token] = 300 + place
        added = {"id": 300 + place, "content": token, "special": True, "normalized": False}
        text["added_tokens"].append(added | dict.fromkeys(("single_word", "lstrip", "rstrip"), False))
    (single,) = (part for part in text["post_processor"]["single"] if "SpecialToken" in part)
    single["SpecialToken"]["id"] = "__en__"
    text["post_processor"]["special_tokens"] = {"__en__": {"id": "__en__", "ids": [300], "tokens": ["__en__"]}}
    (directory / "tokenizer.json").write_text(json.dumps(text))
    config = json.loads((directory / "generation_config.json").read_text())
    config |= {"num_beams": 2, "max_length": 13, "no_repeat_ngram_size": 3, "length_penalty": 0.8}
    (directory / "generation_config.json").write_text(json.dumps(config))
    config = json.loads((directory / "config.json").read_text())
    config["task_specific_params"] = {"translation_en_to_de": {"prefix": "to German: "}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory, model


@pytest.fixture(scope="module")
def translator(written: tuple[Path, Any]) -> Iterator[LiveServer]:
    with live(written[0], precision="fp32", max_running_seqs=8) as server:
        yield server


def reference(written: tuple[Path, Any], text: str, language: str | None = None, **options: Any) -> str:
    """The text of the library's own `generate`."""
    import torch
    from tokenizers import Tokenizer

    directory, model = written
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(text).ids])
    first = None if language is None else tokenizer.token_to_id(f"__{language}__")
    asked = {"num_beams": 2, "max_length": 13, "no_repeat_ngram_size": 3, "length_penalty": 0.8, **options}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), forced_bos_token_id=first, **asked)
    return str(tokenizer.decode(found[0].tolist()))


def complete(server: LiveServer, **body: Any) -> Any:
    return server.client.post("/v1/completions", json={"prompt": SOURCE, **body})


def test_the_text_is_that_of_generate_with_its_defaults(translator: LiveServer, written: Any) -> None:
    answer = complete(translator).json()
    assert answer["choices"][0]["text"] == reference(written, SOURCE)
    forced = complete(translator, target_lang="fr").json()["choices"][0]["text"]
    assert forced == reference(written, SOURCE, "fr")
    greedy = complete(translator, target_lang="fr", use_beam_search=False, max_tokens=5).json()
    assert greedy["choices"][0]["text"] == reference(written, SOURCE, "fr", num_beams=1, max_length=6)
    assert greedy["usage"]["completion_tokens"] == 5


def test_a_chat_translates_the_last_message_of_the_user(translator: LiveServer, written: Any) -> None:
    messages = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "n"}]
    body = {"messages": [*messages, {"role": "user", "content": SOURCE}], "target_lang": "fr"}
    answer = translator.client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == reference(written, SOURCE, "fr")


def test_a_task_of_the_configuration_begins_the_text(translator: LiveServer, written: Any) -> None:
    answer = complete(translator, source_lang="en", target_lang="de").json()
    assert answer["choices"][0]["text"] == reference(written, "to German: " + SOURCE)


def test_streams_seeds_and_log_probabilities(translator: LiveServer) -> None:
    body = {"temperature": 1.0, "seed": 5, "logprobs": 1, "max_tokens": 6}
    whole = complete(translator, **body).json()["choices"][0]
    assert len(whole["logprobs"]["token_logprobs"]) == 6 and max(whole["logprobs"]["token_logprobs"]) < 0
    streamed = complete(translator, **body, stream=True).text
    parts = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == whole["text"]
    assert len(parts) > 2


@pytest.mark.parametrize(
    "body, field, said",
    [
        ({"prompt": "long " * 200}, "prompt", "shorten the prompt"),
        ({"target_lang": "xx"}, "target_lang", "it has en, fr"),
        ({"source_lang": "xx"}, "source_lang", "no language of this model"),
        ({"max_tokens": 5000}, "max_tokens", "at most 255 tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "transformers computes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_model_cannot_do_names_the_field(
    body: dict[str, Any], field: str, said: str, translator: LiveServer
) -> None:
    answer = complete(translator, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field and said in error["message"]
