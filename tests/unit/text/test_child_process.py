"""A process gets the time to start, and errors and panics of libraries in Rust become errors of ours."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models

from app.errors import InvalidRequest
from app.text import child_process
from app.text.chat import TemplateProcess
from app.text.child_process import ConvertRustErrors, ReplyStatus, TemplateLimits, is_rust_panic


def test_the_first_answer_may_take_as_long_as_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    # An interpreter starts in more than a millisecond, so only the factor allows the first answer.
    monkeypatch.setattr(child_process, "MIN_WALL_SECONDS", 0.001)
    monkeypatch.setattr(child_process, "COMPILE_FACTOR", 120_000)
    process = TemplateProcess("text", TemplateLimits(cpu_seconds=1e-5))
    assert process.check() == (ReplyStatus.TEXT, "")
    process.close()


def panicking() -> Tokenizer:
    """Return a tokenizer whose post-processor asks for a token that it does not describe: the library panics."""
    pieces = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    content = json.loads(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())
    content["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": {}}
    return Tokenizer.from_str(json.dumps(content))


def test_a_panic_becomes_an_error_of_ours() -> None:
    with pytest.raises(InvalidRequest, match=r"^cannot encode: no entry") as caught:  # noqa: SIM117
        with ConvertRustErrors(InvalidRequest, "cannot encode"):
            panicking().encode_batch_fast(["a"])
    cause = caught.value.__cause__
    assert cause is not None and is_rust_panic(type(cause)) and not isinstance(cause, Exception)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), ValueError("x"), MemoryError()])
def test_other_exceptions_pass(error: BaseException) -> None:
    with pytest.raises(type(error)), ConvertRustErrors(InvalidRequest, "cannot encode"):
        raise error


def test_a_bare_exception_becomes_an_error_of_ours() -> None:
    with pytest.raises(InvalidRequest, match="cannot encode: why"), ConvertRustErrors(InvalidRequest, "cannot encode"):
        raise Exception("why")
