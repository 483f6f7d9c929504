"""What is shown of a prompt: its tokens with their scores, and a gap that is filled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from app.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from app.messages import PromptScored, TokenLogprob, TokenScore, TokensReady
from app.metrics.instruments import Metrics
from app.service.prompt import read_prompt, tokenize_prompt
from app.service.requests import ChoiceFinished, GenerationRequest, Infill, PromptToken, ScoredToken, TextDelta
from app.service.served_model import ServedDecoder
from app.text.tokenizer import Tokenizer
from fake_worker import LIMITS, Client, finished, request, serving, tokenizer
from small_tokenizers import byte_level, write_tokenizer

SCORED: dict[str, Any] = {"prompt_logprobs": 1, "logprobs": 0, "n": 2}


def scores(ids: list[int]) -> tuple[TokenScore, ...]:
    return tuple(TokenScore(token_id, -float(place), place, ((7, -0.5),)) for place, token_id in enumerate(ids, 1))


async def test_the_prompt_comes_once_all_of_it_is_scored_before_each_choice() -> None:
    async with serving() as (service, worker, _):
        client = Client(service, request("the fox said hello", echo=True, params=SCORED))
        (order,) = await worker.orders()
        name, ids = order.request_id, list(order.token_ids)
        service.on_events([PromptScored(name, scores(ids[1:])[:1])])
        service.on_events([PromptScored(name, scores(ids[1:])[1:])])
        own = (TokenLogprob(5, -1.0),)
        service.on_events([TokensReady(name, choice, (5,), own) for choice in (0, 1)])
        stop = finished(name, num_tokens=2, stop_token_id=2, stop_logprob=TokenLogprob(2, -3.0))
        service.on_events([stop, structs.replace(stop, choice=1)])
        pieces = await client.over()
    shown = [piece for piece in pieces if isinstance(piece, TextDelta) and piece.prompt]
    assert [(piece.choice, piece.text) for piece in shown] == [(choice, "the fox said hello") for choice in (0, 1)]
    assert pieces[1:3] == shown
    first, second = shown[0].prompt[:2]
    assert first == PromptToken(ids[0], tokenizer().token_bytes(ids[0]).decode())
    spelled = tokenizer().token_bytes(7)
    top = (ScoredToken(7, spelled.decode(errors="replace"), spelled, -0.5),)
    assert second.score is not None
    assert (second.token_id, second.rank, second.score.logprob, second.score.top) == (ids[1], 1, -1.0, top)
    assert [one.token_id for one in shown[0].prompt] == ids
    ends = [piece.stop_token for piece in pieces if isinstance(piece, ChoiceFinished)]
    assert [end and (end.token_id, end.logprob) for end in ends] == [(2, -3.0)] * 2


async def test_a_prompt_of_one_token_needs_no_scores_and_a_request_may_have_no_completion() -> None:
    counted: list[tuple[int, int]] = []

    class Counting(Metrics):
        def prompt_tokens(self, computed: int, cached: int) -> None:
            counted.append((computed, cached))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fake_worker.Metrics", Counting)
        async with serving() as (service, worker, _):
            client = Client(service, request(token_ids=(9,), params={"prompt_logprobs": 0, "max_tokens": 0}))
            (order,) = await worker.orders()
            service.on_events([finished(order.request_id, "length")])
            pieces = await client.over()
    (shown,) = [piece for piece in pieces if isinstance(piece, TextDelta)]
    assert (shown.text, [one.token_id for one in shown.prompt]) == ("", [9])
    assert isinstance(pieces[-1], ChoiceFinished)
    assert (pieces[-1].reason, pieces[-1].num_completion_tokens, pieces[-1].usage.prompt_tokens) == ("length", 0, 1)
    assert counted == [(1, 1)]


# ---- a gap ---------------------------------------------------------------------------------------------------------


def coder(directory: Path, *names: str, context: int = 64) -> ServedDecoder:
    inner = byte_level()
    inner.add_special_tokens(list(names or ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")))
    limits = replace(LIMITS, max_model_len=context, vocab_size=400)
    return ServedDecoder("coder", limits, Tokenizer(write_tokenizer(directory, inner)), None)


def filling(suffix: str, **fields: Any) -> GenerationRequest:
    gap = Infill(suffix, fields.pop("files", ()), fields.pop("fits", False))
    return request(fields.pop("prompt", "the fox"), infill=gap, **fields)


def text_of(model: ServedDecoder, wanted: GenerationRequest) -> str:
    return model.tokenizer.decode(tokenize_prompt(model, wanted).token_ids, skip_special_tokens=False)


def test_a_gap_stands_between_special_tokens(tmp_path: Path) -> None:
    model = coder(tmp_path)
    assert text_of(model, filling(" end")) == "<fim_prefix>the fox<fim_suffix> end<fim_middle>"
    ids = tuple(model.tokenizer.encode("hen", False))
    wanted = GenerationRequest(filling("").params, "native", "r", token_ids=ids, infill=Infill(" end"))
    assert text_of(model, wanted) == "<fim_prefix>hen<fim_suffix> end<fim_middle>"
    command = read_prompt(model, filling(" end")).command("r", 0.0)
    assert command.params.stop_token_ids == (model.tokenizer.token_id("<file_sep>"),)


def test_a_long_file_is_shortened_around_the_gap_or_refused(tmp_path: Path) -> None:
    model = coder(tmp_path, context=40)
    long = {"prompt": "the fox " * 500, "params": {"max_tokens": 8}}
    shortened = tokenize_prompt(
        model, filling("hen " * 500, fits=True, files=(("a", "b" * 90),), **dict(long))
    ).token_ids
    assert len(shortened) == 39 - 8
    text = model.tokenizer.decode(shortened, skip_special_tokens=False)
    assert text.startswith("<fim_prefix>") and "the fox <fim_suffix>hen" in text and text.endswith("<fim_middle>")
    with pytest.raises(ContextLengthExceeded):
        tokenize_prompt(model, filling("end", **dict(long)))
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
        tokenize_prompt(model, filling("end", truncate_prompt_tokens=5))


def test_a_model_without_the_tokens_refuses_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedParameter, match="'coder' has none") as refused:
        tokenize_prompt(coder(tmp_path, "<fim_prefix>"), filling("end"))
    assert refused.value.field == "suffix"
