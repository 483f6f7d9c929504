"""Every request ends exactly once: by a stop string, out of time, because its client left, because the engine died."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import NotReady, RequestTimeout, ServiceStopping, StepFailed
from app.messages import Abort, Command, Event, Generate, RequestFailed, TokensReady
from app.service.requests import Accepted, ChoiceFinished, StreamEvent, TextDelta
from fake_worker import LIMITS, Client, finished, request, serving, tokenizer, tokens

SLOW = {"bad_words": ("lion",)}  # such a request is read by a thread


def ends(pieces: list[StreamEvent]) -> list[tuple[int, str, object]]:
    return [(piece.choice, piece.reason, piece.matched_stop) for piece in pieces if isinstance(piece, ChoiceFinished)]


async def test_a_stop_string_across_tokens_ends_the_choice_at_once_and_once() -> None:
    async with serving() as (service, worker, _):
        client = Client(service, request(params={"stop": ("ello w",)}))
        (order,) = await worker.orders()
        spoken = tokens(order.request_id, "say hello world and more")
        service.on_events([*spoken, finished(order.request_id, "length", 99)])
        pieces = await client.over()
        assert client.text == "say h"
        assert ends(pieces) == [(0, "stop", "ello w")]
        assert worker.aborts == [Abort(order.request_id, "stop", 0)]
        needed = next(count for count in range(len(spoken)) if "ello w" in _text(spoken[:count]))
        end = pieces[-1]
        assert isinstance(end, ChoiceFinished)
        assert end.usage.completion_tokens == end.num_completion_tokens == needed
        assert end.usage.cached_tokens == 1


def _text(events: list[Event]) -> str:
    return tokenizer().decode(
        [token_id for event in events if isinstance(event, TokensReady) for token_id in event.token_ids]
    )


async def test_one_choice_stops_and_the_other_goes_on() -> None:
    async with serving() as (service, worker, _):
        client = Client(service, request(params={"n": 2, "stop": ("!",)}))
        (order,) = await worker.orders()
        service.on_events([*tokens(order.request_id, "a!b"), *tokens(order.request_id, "xy", choice=1)])
        await client.until(4)
        service.on_events([finished(order.request_id, "stop", 9), *tokens(order.request_id, "z", choice=1)])
        service.on_events([finished(order.request_id, "length", 3, choice=1)])
        assert ends(await client.over()) == [(0, "stop", "!"), (1, "length", None)]
        assert worker.aborts == [Abort(order.request_id, "stop", 0)]


async def test_held_back_text_comes_out_at_the_end() -> None:
    async with serving() as (service, worker, _):
        client = Client(service, request(params={"stop": ("hello!",)}))
        (order,) = await worker.orders()
        service.on_events([*tokens(order.request_id, "hello"), finished(order.request_id, "length")])
        assert ends(await client.over()) == [(0, "length", None)]
        assert client.text == "hello"


async def test_out_of_time_with_nothing_is_an_error() -> None:
    async with serving() as (service, worker, clock):
        client = Client(service, request(params=SLOW))
        await asyncio.sleep(0)  # one turn of the loop: the request has arrived, its words are read in a thread
        clock.seconds += LIMITS.request_timeout_seconds
        with pytest.raises(RequestTimeout, match="before its first token"):
            await client.over()
        assert [(abort.reason, abort.choice) for abort in worker.aborts] == [("timeout", None)]
        assert service.num_open == 0


async def test_out_of_time_with_something_is_an_answer() -> None:
    async with serving() as (service, worker, clock):
        worker.send_error = lambda command: (
            service.on_events(tokens(command.request_id, "x hello")) if isinstance(command, Generate) else None
        )
        client = Client(service, request(params={"stop": ("hello!",), "n": 2} | SLOW))
        await asyncio.sleep(0)
        clock.seconds += LIMITS.request_timeout_seconds
        assert ends(await client.over()) == [(0, "timeout", None), (1, "timeout", None)]
        assert client.text == "x hello"
        assert [abort.reason for abort in worker.aborts] == ["timeout"]


async def test_out_of_time_frees_engine_and_place_though_nobody_reads() -> None:
    async with serving() as (service, worker, clock):
        async with aclosing(service.generate(request(params=SLOW))) as pieces:
            first = asyncio.ensure_future(anext(pieces))
            await asyncio.sleep(0)
            clock.seconds += LIMITS.request_timeout_seconds
            assert isinstance(await first, Accepted)
            while not worker.aborts:  # the reader does nothing but let the loop turn
                await asyncio.sleep(0)
            assert (worker.aborts[0].reason, service.num_open) == ("timeout", 0)
        assert service.num_open == 0


async def test_a_request_that_has_ended_leaves_no_timer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), []
    plain = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda *call: timers.append(plain(*call)) or timers[-1])
    async with serving() as (service, worker, _):
        client = Client(service, request())
        service.on_events([finished((await worker.orders())[0].request_id)])
        await client.over()
        lasting = [timer for timer in timers if timer.when() > loop.time() + LIMITS.request_timeout_seconds / 2]
        assert len(lasting) == 1
        assert lasting[0].cancelled()


async def test_out_of_time_while_the_prompt_is_read() -> None:
    release = threading.Event()

    class Slow:
        def encode(self, text: str, add_special_tokens: bool, limits: object) -> list[int]:
            release.wait(10)
            return [1]

    async with serving(replace(LIMITS, request_timeout_seconds=0.001)) as (service, worker, _):
        service.serve(replace(service.model, tokenizer=Slow()))  # type: ignore[arg-type]
        with pytest.raises(RequestTimeout, match="Reading the prompt"):
            await Client(service, request(params=SLOW)).over()
        release.set()
        assert (worker.commands, service.num_open) == ([], 0)


async def test_a_client_that_leaves_before_the_first_token() -> None:
    async with serving() as (service, worker, _):
        client = Client(service, request())
        (order,) = await worker.orders()
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        assert worker.aborts == [Abort(order.request_id)]
        assert service.num_open == 0


async def test_a_client_that_leaves_between_two_pieces() -> None:
    async with serving() as (service, worker, _):
        async with aclosing(service.generate(request())) as pieces:
            assert isinstance(await anext(pieces), Accepted)
            (order,) = await worker.orders()
            service.on_events(tokens(order.request_id, "hello"))
            assert isinstance(await anext(pieces), TextDelta)
        assert worker.aborts == [Abort(order.request_id)]
        assert service.num_open == 0
        service.on_events(tokens(order.request_id, "too late"))  # is passed over


async def test_a_client_that_leaves_while_its_prompt_is_read() -> None:
    async with serving() as (service, worker, _):
        client = Client(service, request(params=SLOW))
        await asyncio.sleep(0)  # one turn of the loop: the task has begun, the pool has not answered
        assert service.num_open == 1
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        assert (worker.commands, service.num_open) == ([], 0)


async def test_a_failed_step_fails_its_requests_only() -> None:
    async with serving() as (service, worker, _):
        unlucky, lucky = Client(service, request("a")), Client(service, request("b"))
        orders = {order.token_ids: order.request_id for order in await worker.orders(2)}
        ours, others = orders[tuple(tokenizer().encode("a"))], orders[tuple(tokenizer().encode("b"))]
        service.on_events([RequestFailed(ours, StepFailed("out of luck")), *tokens(others, "fine"), finished(others)])
        with pytest.raises(StepFailed, match="out of luck"):
            await unlucky.over()
        await lucky.over()
        assert (lucky.text, service.num_open) == ("fine", 0)


async def test_when_the_worker_dies_all_requests_are_notified() -> None:
    async with serving() as (service, worker, _):
        clients = [Client(service, request()) for _ in range(3)]
        orders = await worker.orders(3)
        service.on_events(tokens(orders[0].request_id, "some"))
        worker.alive, worker.state = False, "failed"
        service.on_worker_exit(StepFailed("The engine has stopped."))
        for client in clients:
            with pytest.raises(StepFailed, match="engine has stopped"):
                await client.over()
        assert (service.alive, service.ready, service.num_open) == (False, False, 0)
        with pytest.raises(NotReady):
            await Client(service, request()).over()


async def test_a_worker_that_dies_unseen_gets_no_new_request() -> None:
    async with serving() as (service, worker, _):
        worker.alive = False  # the thread has ended and its last words are on their way
        with pytest.raises(NotReady, match="engine has stopped"):
            await Client(service, request()).over()


async def test_a_mailbox_that_is_closed_refuses_before_anything_is_accepted() -> None:
    def closed(command: Command) -> None:
        if isinstance(command, Generate):
            raise ServiceStopping("The server is stopping.")

    async with serving() as (service, worker, _):
        worker.send_error = closed
        client = Client(service, request())
        with pytest.raises(ServiceStopping):
            await client.over()
        assert (client.chunks, service.num_open) == ([], 0)


async def test_words_after_the_loop_has_ended_are_lost_without_harm() -> None:
    def in_its_own_loop() -> None:
        async def serve_once() -> None:
            async with serving() as (service, _, _clock):
                kept.append(service)

        kept: list = []
        asyncio.run(serve_once())
        kept[0].on_events(tokens("r", "late"))
        kept[0].on_worker_exit(StepFailed("The engine has stopped."))

    await asyncio.to_thread(in_its_own_loop)


happenings = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.integers(0, 2), st.sampled_from(["a", "b!", "!", "ᚠ", "hello"])),
        st.tuples(st.just("end"), st.integers(0, 2), st.sampled_from(["stop", "length", "aborted", "timeout"])),
        st.tuples(st.just("fail"), st.just(0), st.just("")),
        st.tuples(st.just("leave"), st.just(0), st.just("")),
        st.tuples(st.just("die"), st.just(0), st.just("")),
    ),
    max_size=14,
)


@pytest.mark.full
@given(happenings, st.integers(1, 3))
def test_whatever_happens_each_request_and_each_choice_ends_once(script: list[tuple[str, int, str]], n: int) -> None:
    asyncio.run(_play(script, n))


async def _play(script: list[tuple[str, int, str]], n: int) -> None:
    async with serving() as (service, worker, _):
        client = Client(service, request(params={"n": n, "stop": ("!",)}))
        name = (await worker.orders())[0].request_id
        for what, choice, text in script:
            if what == "leave":
                client.task.cancel()
            elif what == "die":
                service.on_worker_exit(StepFailed("The engine has stopped."))
            elif what == "fail":
                service.on_events([RequestFailed(name, StepFailed("no"))])
            elif choice < n:
                service.on_events(
                    tokens(name, text, choice) if what == "text" else [finished(name, text, choice=choice)]
                )  # type: ignore[arg-type]
            await asyncio.sleep(0)  # a turn of the loop, so that some things happen between two pieces
        if not client.task.done():
            service.on_events([finished(name, choice=choice) for choice in range(n)])
        await asyncio.wait([client.task])
        over = [piece.choice for piece in client.chunks if isinstance(piece, ChoiceFinished)]
        assert len(over) == len(set(over)) <= n
        after_the_end = [
            p for p in client.chunks if isinstance(p, TextDelta) and p.choice in over and _later(client.chunks, p)
        ]
        assert not after_the_end
        complete = len(over) == n
        assert complete == (client.error is None and not client.task.cancelled())
        assert len([abort for abort in worker.aborts if abort.choice is None]) == (not complete)
        assert (service.num_open, service._client._listeners) == (0, {})


def _later(pieces: list[StreamEvent], delta: TextDelta) -> bool:
    """True where the delta comes after its choice has ended."""
    end = next(
        place
        for place, piece in enumerate(pieces)
        if isinstance(piece, ChoiceFinished) and piece.choice == delta.choice
    )
    return next(place for place, piece in enumerate(pieces) if piece is delta) > end
