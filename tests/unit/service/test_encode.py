"""An encoder's requests through the service: what the worker is sent, what is refused, and how each ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from app.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotReady,
    Overloaded,
    RequestTimeout,
    ServiceStopping,
    StepFailed,
    WrongModelKind,
)
from app.messages import Abort, ArraysReady, Infer, Signature, TensorSpec, Text
from app.metrics.instruments import Metrics
from app.service.admission import OpenCounts
from app.service.encode import MAX_HIDDEN_BYTES, MAX_TEXTS, SHORT_CHARACTERS, TOKEN_BYTES, tokenize_texts
from app.service.requests import EncodingRequest, InferenceRequest, Truncation
from app.service.served_model import ServedEncoder, ServedProgram, to_numpy
from app.service.service import Service
from fake_encoder import CLASSIFIER, CONFIG, LIMITS, PROMPTED, SIZE, TIMINGS, array, encoding, ids_of, tokenizer, vector
from fake_worker import FakeWorker, serving
from fake_worker import request as generation

LONG = "the fox said hello to the green world and the fox said no"


def wanted(*inputs: Any, **fields: Any) -> EncodingRequest:
    return EncodingRequest(
        **{"inputs": inputs, "outputs": ("embedding",), "api": "native", "request_id": "r", **fields}
    )


def counted(service: Any, name: str) -> float:
    lines = service._client.metrics.render()[0].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def test_texts_pairs_and_ids_go_to_the_worker_and_vectors_come_back_in_order() -> None:
    async with encoding() as (service, worker, _):
        inputs = ("the fox", ("hello", "world"), Text((2, 9, 3)), "said " * 4)
        encoded = await service.encode(wanted(*inputs, normalize=False, dimensions=3))
        (order,) = worker.encodes
        assert order.texts == (*ids_of("the fox", ("hello", "world")), Text((2, 9, 3)), *ids_of("said " * 4))
        assert (order.outputs, order.normalize, order.dimensions, order.arrived_at) == (("embedding",), False, 3, 100.0)
        assert to_numpy(encoded.arrays["embedding"]).tolist() == [vector(text)[:3] for text in order.texts]
        assert (encoded.timings, encoded.lengths) == (TIMINGS, tuple(len(text.token_ids) for text in order.texts))
        assert encoded.usage.prompt_tokens == sum(encoded.lengths)
        assert (service.num_open, service._client.admission.num_held_bytes, worker.aborts) == (0, 0, [])
        assert counted(service, 'armature_requests_total{api="native",outcome="stop"}') == 1
        assert counted(service, 'armature_tokens_total{kind="prompt"}') == sum(encoded.lengths)


async def test_short_texts_are_read_on_the_loop_and_long_ones_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is read on the loop is not counted as work of the threads."""
    sizes: list[int] = []
    async with encoding(limits=replace(LIMITS, max_model_len=10_000)) as (service, _, _):
        read = service._client.read

        async def noted(num_bytes: int, *arguments: Any) -> Any:
            sizes.append(num_bytes)
            return await read(num_bytes, *arguments)

        monkeypatch.setattr(service._client, "read", noted)
        await service.encode(wanted("x" * (SHORT_CHARACTERS - 4), ("x", "y"), Text((1, 2))))
        assert sizes == []
        await service.encode(wanted("x" * SHORT_CHARACTERS, "x"))
        await service.encode(wanted(Text((1,) * (SHORT_CHARACTERS + 1))))
        assert sizes == [SHORT_CHARACTERS + 1] * 2
        text = "fox " * SHORT_CHARACTERS
        encoded = await service.encode(wanted(text, text))
        assert encoded.lengths == (SHORT_CHARACTERS + 2,) * 2


async def test_a_text_with_a_token_that_the_model_does_not_know_is_refused() -> None:
    known, unknown = (max(text.token_ids) for text in ids_of("the", "world"))
    async with encoding(limits=replace(LIMITS, vocab_size=max(known, unknown))) as (service, worker, _):
        fits, fails = ("the", "world") if known < unknown else ("world", "the")
        await service.encode(wanted(fits))
        with pytest.raises(
            InvalidRequest, match=r"^input\[1\] has the token '.*' with the id \d+, which this model does not know"
        ) as caught:
            await service.encode(wanted(fits, fails))
        assert caught.value.field == "input[1]" and len(worker.encodes) == 1


@pytest.mark.parametrize(
    ("given", "kind", "field"),
    [
        ({"inputs": ()}, InvalidRequest, "input"),
        ({"inputs": ("x",) * (MAX_TEXTS + 1)}, InvalidRequest, "input"),
        ({"inputs": ("x", "")}, InvalidRequest, "input[1]"),
        ({"inputs": ("",), "field": "inputs"}, InvalidRequest, "inputs"),
        ({"inputs": ("x", ("", ""))}, InvalidRequest, "input[1]"),
        ({"inputs": ("", "x"), "num_queries": 1}, InvalidRequest, "query"),
        ({"truncation": Truncation(True, max_tokens=0)}, InvalidRequest, "truncate_prompt_tokens"),
        ({"truncation": Truncation(True, max_tokens=17)}, InvalidRequest, "truncate_prompt_tokens"),
        ({"truncation": Truncation(True, max_tokens=1)}, InvalidRequest, "truncate_prompt_tokens"),
        ({"inputs": (Text(()),)}, InvalidRequest, "input"),
        ({"inputs": (Text((1, LIMITS.vocab_size)),)}, InvalidRequest, "input"),
        ({"inputs": (Text((1, -1)),)}, InvalidRequest, "input"),
        ({"inputs": (Text((1, 2), (0, 2)),)}, InvalidRequest, "token_type_ids"),
        ({"inputs": ("x", LONG * 2)}, ContextLengthExceeded, "input[1]"),
        ({"inputs": (Text((1,) * 17),)}, ContextLengthExceeded, "input"),
        ({"dimensions": 0}, InvalidRequest, "dimensions"),
        ({"dimensions": SIZE + 1}, InvalidRequest, "dimensions"),
        ({"outputs": ("logits",)}, WrongModelKind, "model"),
        ({"prompt": "query"}, InvalidRequest, "prompt_name"),
        ({"inputs": ("lone \ud800",)}, InvalidRequest, None),
    ],
)
async def test_what_is_refused_reaches_no_batch(
    given: dict[str, Any], kind: type[Exception], field: str | None
) -> None:
    async with encoding() as (service, worker, _):
        with pytest.raises(kind) as caught:
            await service.encode(wanted(*given.pop("inputs", ("x",)), **given))
        assert getattr(caught.value, "field", None) == field
        assert (worker.commands, service.num_open) == ([], 0)
        assert counted(service, 'armature_requests_total{api="native",outcome="invalid"}') == 1


@pytest.mark.parametrize("truncate_left", [False, True])
async def test_too_long_a_text_is_cut_where_that_is_asked_for(truncate_left: bool) -> None:
    async with encoding() as (service, worker, _):
        await service.encode(wanted(LONG * 2, Text(tuple(range(20))), truncation=Truncation(True, truncate_left)))
        text, own = worker.encodes[0].texts
        whole = tokenizer().encode_texts([LONG * 2])[0].token_ids
        kept = whole[-15:-1] if truncate_left else whole[1:15]
        assert text.token_ids == (whole[0], *kept, whole[-1])
        assert own.token_ids == tuple(range(20))[slice(-16, None) if truncate_left else slice(16)]


async def test_hidden_states_beyond_what_an_answer_holds_are_refused() -> None:
    async with encoding() as (service, _, _):
        served = service.encoder
        wide = ServedEncoder(
            "wide", served.limits, served.tokenizer, replace(CONFIG, hidden_size=MAX_HIDDEN_BYTES // 4 // 5)
        )
        fits, too_much = (
            wanted("a b", outputs=("last_hidden_state",)),
            wanted("a b c d", outputs=("last_hidden_state",)),
        )
        assert len(tokenize_texts(wide, fits)) == 1
        with pytest.raises(InvalidRequest, match="send fewer"):
            tokenize_texts(wide, too_much)


@pytest.mark.parametrize(
    ("asked", "behind"),
    [
        ({}, ["hello a", "hello b"]),
        ({"prompt": "query"}, ["the fox a", "the fox b"]),
        ({"num_queries": 1}, ["the fox a", "hello b"]),
    ],
)
async def test_a_checkpoints_prompts_stand_before_texts(asked: dict[str, Any], behind: list[str]) -> None:
    async with encoding(PROMPTED) as (service, worker, _):
        await service.encode(wanted("a", "b", **asked))
        assert list(worker.encodes[0].texts) == ids_of(*behind)


async def test_a_prompts_tokens_are_counted_where_they_are_not_pooled() -> None:
    silent = replace(PROMPTED, pooling=replace(PROMPTED.pooling, skips_prompt=True))
    async with encoding(silent) as (service, worker, _):
        await service.encode(wanted("a", ("a", "b"), Text((2, 9, 3)), prompt="query"))
        assert [text.num_prompt_tokens for text in worker.encodes[0].texts] == [3, 3, 0], "[CLS] the fox"
        assert worker.encodes[0].texts[0].token_ids == ids_of("the fox a")[0].token_ids


async def test_a_request_that_fails_leaves_its_neighbours_alone() -> None:
    async with encoding() as (service, worker, _):
        worker.bad = ids_of("said")[0].token_ids[1]
        results = await asyncio.gather(
            *(service.encode(wanted(text)) for text in ("a", "said", "b")), return_exceptions=True
        )
        assert [isinstance(result, StepFailed) for result in results] == [False, True, False]
        assert (service.num_open, worker.aborts) == (0, [])
        assert counted(service, 'armature_requests_total{api="native",outcome="failed"}') == 1


async def test_who_leaves_is_forgotten_and_who_waits_too_long_is_notified() -> None:
    async with encoding() as (service, worker, clock):
        worker.holds = True
        leaving = asyncio.ensure_future(service.encode(wanted("a")))
        while not worker.encodes:
            await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        late = asyncio.ensure_future(
            service.encode(wanted("fox " * 10 * SHORT_CHARACTERS, truncation=Truncation(True)))
        )
        await asyncio.sleep(0)
        clock.seconds += LIMITS.request_timeout_seconds
        with pytest.raises(RequestTimeout):
            await late
        assert [abort.reason for abort in worker.aborts] == ["aborted", "timeout"]
        assert (service.num_open, service._client._listeners) == (0, {})
        worker.answer(worker.encodes[0])  # nobody listens any more


async def test_an_answer_and_the_end_of_its_time_in_one_turn_are_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with encoding() as (service, worker, _):
        worker.holds = True
        register, expire = service._client.register, []
        monkeypatch.setattr(service._client, "register", lambda *call: expire.append(call[2]) or register(*call))
        answer = asyncio.ensure_future(service.encode(wanted("a")))
        while not worker.encodes:
            await asyncio.sleep(0)
        worker.answer(worker.encodes[0])
        expire[0]()
        with pytest.raises(RequestTimeout):
            await answer
        assert worker.aborts == [Abort(worker.encodes[0].request_id, "timeout")]


async def test_places_and_bytes_are_counted() -> None:
    async with encoding(limits=replace(LIMITS, max_running_seqs=1, max_waiting_requests=1)) as (service, worker, _):
        worker.holds = True
        first = asyncio.ensure_future(service.encode(wanted("a")))
        while not worker.encodes:
            await asyncio.sleep(0)
        held = service._client.admission.num_held_bytes
        assert held == 3 * TOKEN_BYTES + 4 * SIZE, "ids and a vector"
        service._client.admission.counts.set(OpenCounts.HELD_BYTES, LIMITS.max_held_bytes - 1)
        with pytest.raises(Overloaded, match="Open requests and their responses hold 256 MiB"):
            await service.encode(wanted("a"))
        service._client.admission.counts.set(OpenCounts.HELD_BYTES, held)
        second = asyncio.ensure_future(service.encode(wanted("a")))
        while len(worker.encodes) < 2:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="places are taken"):
            await service.encode(wanted("a"))
        for order in worker.encodes:
            worker.answer(order)
        await asyncio.gather(first, second)
        assert (service.num_open, service._client.admission.num_held_bytes) == (0, 0)


async def test_hidden_states_asked_by_many_are_bounded_together() -> None:
    limits = replace(LIMITS, max_running_seqs=9, max_held_bytes=3 * 3 * (TOKEN_BYTES + 4 * SIZE) + 1)
    async with encoding(limits=limits) as (service, worker, _):
        worker.holds = True
        asked = wanted("a", outputs=("last_hidden_state",))
        open_ones = [asyncio.ensure_future(service.encode(asked)) for _ in range(3)]
        while len(worker.encodes) < 3:
            await asyncio.sleep(0)
        assert service._client.admission.num_held_bytes == 3 * 3 * (TOKEN_BYTES + 4 * SIZE), "a row for each token"
        with pytest.raises(Overloaded, match="MiB more exceed the limit") as refused:
            await service.encode(asked)
        assert refused.value.retry_after_seconds
        for order in worker.encodes:
            worker.answer(order)
        await asyncio.gather(*open_ones)
        assert service._client.admission.num_held_bytes == 0
        again = asyncio.ensure_future(service.encode(wanted(*("a",) * 9, outputs=("last_hidden_state",))))
        while len(worker.encodes) < 4:
            await asyncio.sleep(0)
        assert service._client.admission.num_held_bytes > limits.max_held_bytes, (
            "alone a request has the size that it has"
        )
        worker.answer(worker.encodes[-1])
        await again


async def test_a_service_that_is_not_there_yet_or_stops_says_so() -> None:
    async with encoding() as (service, worker, _):
        worker.state = "loading"
        with pytest.raises(NotReady):
            await service.encode(wanted("a"))
        worker.state, worker.holds = "ready", True
        open_one = asyncio.ensure_future(service.encode(wanted("a")))
        while not worker.encodes:
            await asyncio.sleep(0)
        await service.stop()
        for asked in (open_one, service.encode(wanted("a"))):
            with pytest.raises(ServiceStopping):
                await asked


async def test_each_kind_of_model_says_what_it_is_not() -> None:
    async with encoding(CLASSIFIER) as (service, _, _):
        with pytest.raises(WrongModelKind, match="generates no text"):
            await anext(service.generate(generation()))
        with pytest.raises(WrongModelKind, match="classification head and makes no embeddings"):
            await service.encode(wanted("a"))
        assert await service.detokenize(await service.tokenize("the fox")) == "the fox"
    async with serving() as (decoder, _, _):
        with pytest.raises(WrongModelKind, match="generates text"):
            await decoder.encode(wanted("a"))


async def test_a_programs_tensors_go_to_the_worker_and_its_outputs_come_back() -> None:
    signature = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 1)),))
    worker = FakeWorker()
    service = Service(worker, Metrics())
    await service.start()
    service.serve(ServedProgram("p", LIMITS, signature))
    given, made = array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), array([[1.0], [2.0], [3.0]])
    held: list[int] = []

    def answered(command: object) -> None:
        assert isinstance(command, Infer)
        held.append(service._client.admission.num_held_bytes)
        service.on_events([ArraysReady(command.request_id, {"y": made}, TIMINGS, 3)])

    worker.send_error = answered
    asked = InferenceRequest({"x": given}, ("y",), "oip", "r")
    inferred = await service.infer(asked)
    assert (inferred.arrays, inferred.timings) == ({"y": made}, TIMINGS)
    (order,) = worker.commands
    assert held == [3 * 2 * 4 + 3 * 1 * 4], "what came and what goes"
    assert service._client.admission.num_held_bytes == 0
    assert isinstance(order, Infer) and (order.inputs, order.outputs) == ({"x": given}, ("y",))
    assert (counted(service, "armature_vectors_total"), service.num_open) == (3, 0)
    with pytest.raises(WrongModelKind, match="infer"):
        await service.encode(wanted("a"))
    with pytest.raises(WrongModelKind, match="exported program"):
        await service.tokenize("a")
    await service.stop()
    async with encoding() as (encoder, _, _):
        with pytest.raises(WrongModelKind, match="is an encoder"):
            await encoder.infer(asked)
