"""What a translator's files say of its source texts and of its requests."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import UnsupportedParameter
from app.text.source_text import SourceText, generation_defaults
from app.text.tokenizer import Tokenizer
from tiny_checkpoints import write_tokenizer

TASKS = {
    "translation_en_to_de": {"prefix": "translate English to German: "},
    "summarization": {"prefix": "summarize: "},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceText:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return SourceText(Tokenizer(directory), 512, 128, TASKS)


def test_a_task_or_its_languages_begin_the_text(source: SourceText) -> None:
    assert source.prefix("summarization", None, None) == "summarize: "
    assert source.prefix(None, "en", "de") == "translate English to German: "
    assert source.prefix("translation", None, None) == source.prefix(None, None, None) == ""


def test_a_language_that_the_model_lacks_is_refused_by_its_field(source: SourceText) -> None:
    source.check_languages("en", "de")
    with pytest.raises(UnsupportedParameter, match="translation_en_to_de") as refused:
        source.check_languages(None, "xx")
    assert refused.value.field == "target_lang"


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, {"temperature": 0.0, "max_tokens": 127}),
        ({"do_sample": True, "max_length": 20, "min_length": 5}, {"max_tokens": 19, "min_tokens": 4}),
        (
            {"num_beams": 4, "length_penalty": 2, "early_stopping": True, "max_new_tokens": 9},
            {"temperature": 0.0, "max_tokens": 9, "beam_width": 3, "length_penalty": 2.0, "early_stopping": True},
        ),
        ({"num_beams": "4", "max_length": None}, {"temperature": 0.0, "max_tokens": 127}),
    ],
)
def test_the_defaults_are_those_of_generate(
    config: dict[str, Any], expected: dict[str, Any], source: SourceText
) -> None:
    assert generation_defaults(config, source, max_beams=3) == expected
