"""A request in the service: the messages to the worker, the events for the client, and refusals before both."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from app.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotReady,
    RequestError,
    ServiceStopping,
    UnsupportedParameter,
)
from app.messages import SequenceFinished, Timings, TokenLogprob, TokensReady
from app.service.prompt import read_prompt
from app.service.requests import Accepted, ChoiceFinished, ScoredToken, TextDelta, Usage
from fake_worker import LIMITS, TIMINGS, Client, FakeWorker, finished, request, serving, tokenizer, tokens


async def answer_of(events: Any, wanted: Any) -> tuple[list[Any], FakeWorker]:
    """The whole answer where the worker says these events."""
    async with serving() as (service, worker, clock):
        client = Client(service, wanted)
        (order,) = await worker.orders()
        clock.seconds += 2
        service.on_events(events(order.request_id))
        return list(await client.over()), worker


async def test_a_completion_from_prompt_to_end() -> None:
    def events(name: str) -> list[Any]:
        spoken = tokens(name, " said hello")
        return [*spoken, finished(name, num_tokens=len(spoken) + 1, stop_token_id=2)]

    pieces, worker = await answer_of(events, request("the fox", params={"max_tokens": 9}))
    ids = tokenizer().encode("the fox")
    assert pieces[0] == Accepted(tuple(ids))
    assert "".join(piece.text for piece in pieces[1:-1]) == " said hello"
    count = len(tokenizer().encode(" said hello", False))
    assert pieces[-1] == ChoiceFinished(
        0, "stop", Usage(len(ids), 1, count + 1), count + 1, Timings(0.25, 0.5, 0.0, 1), matched_stop=2
    )
    assert [piece.timings for piece in pieces[1:-1]] == [TIMINGS, *[None] * (count - 1)]
    (order,) = await worker.orders()
    assert (order.token_ids, order.params.max_tokens, order.arrived_at) == (tuple(ids), 9, 100.0)
    assert worker.aborts == []


async def test_a_chat_goes_through_the_template_and_starts_a_text() -> None:
    messages = ({"role": "user", "content": "hello"},)
    pieces, _ = await answer_of(lambda name: [finished(name)], request(messages=messages, api="chat"))
    assert tokenizer().decode(pieces[0].prompt_token_ids, skip_special_tokens=False) == "<s>user: hello\nassistant:"


@pytest.mark.parametrize("chat, text", [(False, " said"), (True, "said")])
async def test_a_completion_goes_on_where_its_prompt_ends_and_a_chat_begins_a_text(chat: bool, text: str) -> None:
    inner = tokenizer("sentence_piece")
    source: dict[str, Any] = {"messages": ({"role": "user", "content": "hello"},)} if chat else {"prompt": "hello"}
    async with serving(form="sentence_piece") as (service, worker, _):
        client = Client(service, request(**source))
        (order,) = await worker.orders()
        assert (
            list(order.token_ids).count(inner.bos_token_id or -1) == 1
        )  # the template's, or else the tokenizer's: never both
        said = inner.encode("said", add_special_tokens=False)
        service.on_events([TokensReady(order.request_id, 0, tuple(said)), finished(order.request_id)])
        await client.over()
        assert client.text == text


async def test_tokens_without_text_are_reported_with_the_end() -> None:
    pieces, _ = await answer_of(lambda name: [TokensReady(name, 0, (2, 2)), finished(name, "length")], request())
    assert pieces[1] == TextDelta(0, "", (2, 2), timings=TIMINGS)


async def test_token_ids_are_taken_as_they_are() -> None:
    pieces, _ = await answer_of(lambda name: [finished(name)], request(token_ids=(9, 0, 8)))
    assert pieces[0].prompt_token_ids == (9, 0, 8)


async def test_names_are_unique_whatever_clients_call_their_requests() -> None:
    async with serving() as (service, worker, _):
        clients = [Client(service, request(request_id="same")) for _ in range(2)]
        first, second = await worker.orders(2)
        assert first.request_id != second.request_id
        service.on_events([*tokens(second.request_id, "b"), finished(first.request_id), finished(second.request_id)])
        await asyncio.gather(*(client.over() for client in clients))
        assert sorted(client.text for client in clients) == ["", "b"]


async def test_text_and_tokens_stay_together() -> None:
    def events(name: str) -> list[Any]:
        return [*tokens(name, "aᚠ"), finished(name)]

    pieces, _ = await answer_of(events, request())
    deltas = [piece for piece in pieces if isinstance(piece, TextDelta)]
    assert [(delta.text, len(delta.token_ids)) for delta in deltas] == [("a", 1), ("ᚠ", 3)]


async def test_log_probabilities_are_spelled() -> None:
    rune = tokenizer().encode("ᚠ", False)[0]
    letter = tokenizer().encode("x", False)[0]

    def events(name: str) -> list[Any]:
        return [
            TokensReady(name, 0, (letter,), (TokenLogprob(letter, -0.5, ((rune, -0.1), (letter, -0.5))),)),
            finished(name),
        ]

    pieces, _ = await answer_of(events, request(params={"logprobs": 2}))
    (scored,) = pieces[1].logprobs
    assert (scored.token_id, scored.text, scored.bytes, scored.logprob) == (letter, "x", b"x", -0.5)
    assert scored.top == (ScoredToken(rune, "\ufffd", "ᚠ".encode()[:1], -0.1), ScoredToken(letter, "x", b"x", -0.5))


async def test_a_beam_search_reports_everything_at_its_end() -> None:
    ids = tuple(tokenizer().encode(" said", False))
    pieces, _ = await answer_of(
        lambda name: [SequenceFinished(name, 0, "length", TIMINGS, len(ids), ids)], request(params={"beam_width": 4})
    )
    assert [piece.text for piece in pieces[1:-1]] == [" said"]
    assert pieces[-1].usage.completion_tokens == len(ids)


async def test_choices_come_as_they_grow_and_usage_adds_up() -> None:
    def events(name: str) -> list[Any]:
        late = replace(TIMINGS, cached_tokens=2)  # the second choice finds the whole prompt, which the first has read
        one, two = tokens(name, "abc"), tokens(name, "xy", choice=1, timings=late)
        return [
            *one[:2],
            *two,
            structs.replace(finished(name, "length", 2, choice=1), timings=late),
            *one[2:],
            finished(name, "length", 3),
        ]

    pieces, _ = await answer_of(events, request(params={"n": 2}))
    texts = {
        choice: "".join(p.text for p in pieces if isinstance(p, TextDelta) and p.choice == choice) for choice in (0, 1)
    }
    assert texts == {0: "abc", 1: "xy"}
    ends = [piece for piece in pieces if isinstance(piece, ChoiceFinished)]
    assert [(end.choice, end.num_completion_tokens, end.usage.completion_tokens) for end in ends] == [
        (1, 2, 4),
        (0, 3, 5),
    ]
    assert [end.usage.cached_tokens for end in ends] == [1, 1]


async def test_an_echo_comes_before_each_choice() -> None:
    pieces, _ = await answer_of(
        lambda name: [finished(name), finished(name, choice=1)], request(echo=True, params={"n": 2})
    )
    assert pieces[1:3] == [TextDelta(0, "the fox"), TextDelta(1, "the fox")]


async def test_events_may_come_from_another_thread() -> None:
    async with serving() as (service, worker, _):
        client = Client(service, request())
        (order,) = await worker.orders()
        thread = threading.Thread(
            target=service.on_events, args=([*tokens(order.request_id, "hello"), finished(order.request_id)],)
        )
        thread.start()
        await client.over()
        thread.join()
        assert client.text == "hello"


REFUSED: list[tuple[dict[str, Any], type[RequestError], str | None, str]] = [
    ({"prompt": ""}, InvalidRequest, "prompt", "no tokens"),
    ({"token_ids": ()}, InvalidRequest, "token_ids", "no tokens"),
    ({"token_ids": (1, 340)}, InvalidRequest, "token_ids", r"must be in \[0, 340\), not 340"),
    ({"token_ids": (-1, 5)}, InvalidRequest, "token_ids", r"must be in \[0, 340\), not -1"),
    ({"prompt": "a\ud800"}, InvalidRequest, None, "surrogate"),
    ({"params": {"stop_token_ids": (340,)}}, InvalidRequest, "stop_token_ids", "340"),
    (
        {"token_ids": (9,) * 64},
        ContextLengthExceeded,
        "token_ids",
        "maximum context length is 64 tokens.*have 64 tokens",
    ),
    (
        {"token_ids": (9,) * 60, "params": {"max_tokens": 5}},
        ContextLengthExceeded,
        "max_tokens",
        r"requested 65 tokens \(60 in",
    ),
    ({"prompt": "a" * 99}, ContextLengthExceeded, "prompt", "However, the prompt has [0-9]+ tokens"),
    ({"messages": ()}, InvalidRequest, "messages", "at least one"),
]


@pytest.mark.cases(test=3)
@pytest.mark.parametrize("fields, kind, field, sentence", REFUSED)
async def test_what_can_never_be_served_is_refused_and_never_reaches_the_worker(
    fields: dict[str, Any], kind: type[RequestError], field: str | None, sentence: str
) -> None:
    async with serving() as (service, worker, _):
        with pytest.raises(kind, match=sentence) as caught:
            await Client(service, request(**fields)).over()
        assert caught.value.field == field
        assert (worker.commands, service.num_open) == ([], 0)


async def test_the_longest_request_that_fits_is_served() -> None:
    pieces, _ = await answer_of(lambda name: [finished(name)], request(token_ids=(9,) * 60, params={"max_tokens": 4}))
    assert isinstance(pieces[-1], ChoiceFinished)


async def test_a_clipped_limit_may_reach_past_the_context() -> None:
    """Clients of Anthropic, Ollama and llama.cpp send limits without knowing the context."""
    asked = replace(request(token_ids=(9,) * 60, params={"max_tokens": 500}), clips_max_tokens=True)
    pieces, _ = await answer_of(lambda name: [finished(name)], asked)
    assert isinstance(pieces[-1], ChoiceFinished)


async def test_without_a_template_a_chat_is_refused_with_the_way_out() -> None:
    async with serving(template=None) as (service, _, _clock):
        with pytest.raises(InvalidRequest, match="no chat template: send a prompt"):
            await Client(service, request(messages=({"role": "user", "content": "a"},))).over()


@pytest.mark.parametrize("state", ["loading", "failed"])
async def test_while_the_worker_is_not_ready_requests_are_refused(state: str) -> None:
    async with serving() as (service, worker, _):
        worker.state, worker.stage = state, "loading weights, 40%"
        assert not service.ready
        with pytest.raises(NotReady, match="40%"):
            await Client(service, request()).over()


async def test_a_stopping_service_takes_nothing_new_and_ends_what_is_open() -> None:
    async with serving() as (service, worker, _):
        first = Client(service, request())
        await worker.orders()
        service.drain()
        with pytest.raises(ServiceStopping):
            await Client(service, request()).over()
        assert (service.stage, service.ready, service.num_open) == ("stopping", False, 1)
        await service.stop()
        with pytest.raises(ServiceStopping):
            await first.over()
        assert [abort.reason for abort in worker.aborts] == ["aborted"]


async def test_a_text_with_a_token_that_the_model_does_not_know_is_refused() -> None:
    """Some tokenizers have more tokens than their model: those of images, or added ones that were never trained."""
    largest = max(tokenizer().encode("the fox"))
    async with serving(replace(LIMITS, vocab_size=largest)) as (service, worker, _):
        chat = request(messages=({"role": "user", "content": "the fox"},))
        for asked, field in ((request("the fox"), "prompt"), (chat, "messages")):
            with pytest.raises(
                InvalidRequest, match=f"^{field} has the token '.*, which this model does not"
            ) as caught:
                await Client(service, asked).over()
            assert caught.value.field == field
        assert not worker.commands


async def test_only_the_operator_lets_clients_order_their_requests() -> None:
    asked = request(params={"priority": -(2**31)})
    async with serving() as (service, worker, _):
        with pytest.raises(UnsupportedParameter, match="scheduling_policy=priority") as caught:
            await Client(service, asked).over()
        assert caught.value.field == "priority" and not worker.commands
    async with serving(replace(LIMITS, has_priorities=True)) as (service, worker, _):
        assert read_prompt(service.model, asked).command("r", 0.0).params.priority == -(2**31)  # type: ignore[arg-type]


async def test_tokenize_and_detokenize() -> None:
    async with serving() as (service, _, _clock):
        ids = await service.tokenize("the fox")
        assert ids == tokenizer().encode("the fox")
        assert await service.detokenize(ids) == "the fox"
        chat = await service.tokenize_chat([{"role": "user", "content": "a"}], {})
        assert chat[0] == tokenizer().bos_token_id
        with pytest.raises(InvalidRequest, match=f"must be in .*, not {LIMITS.vocab_size}"):
            await service.detokenize([LIMITS.vocab_size])
        assert await service.detokenize([]) == ""
