"""Tokens that one step made come together: each counts, and all were waited for once."""

from __future__ import annotations

from app.messages import TokensReady
from app.service.requests import ChoiceFinished
from fake_worker import Client, finished, request, serving, tokens


async def test_tokens_of_one_step_count_each_and_are_waited_for_once() -> None:
    """Guesses that were right come with the token before them, and a stop string may end the answer in their midst."""
    async with serving() as (service, worker, clock):
        client = Client(service, request(params={"stop": ("lo w",)}))
        (order,) = await worker.orders()
        first, *rest = tokens(order.request_id, "say hello world and more")
        together = TokensReady(order.request_id, 0, tuple(token_id for one in rest for token_id in one.token_ids))
        service.on_events([first])
        await client.until(2)
        clock.seconds += 0.02
        service.on_events([together, finished(order.request_id, "length", 1 + len(together.token_ids))])
        pieces = await client.over()
        end = pieces[-1]
        assert (
            isinstance(end, ChoiceFinished)
            and client.text == "say hel"
            and (end.reason, end.matched_stop) == ("stop", "lo w")
        )
        assert 1 < end.num_completion_tokens < 1 + len(rest)
        text = service._client.metrics.render()[0].decode()
        assert f'armature_tokens_total{{kind="completion"}} {end.num_completion_tokens:.1f}' in text
        assert "armature_inter_token_latency_seconds_count 1.0" in text


async def test_a_stop_token_behind_others_of_its_step_is_not_waited_for_again() -> None:
    async with serving() as (service, worker, clock):
        client = Client(service, request())
        (order,) = await worker.orders()
        first, second, *_ = tokens(order.request_id, "say hello")
        service.on_events([first])
        await client.until(2)
        clock.seconds += 0.02
        service.on_events([second, finished(order.request_id, "stop", 3)])
        await client.over()
        text = service._client.metrics.render()[0].decode()
        assert (
            "armature_inter_token_latency_seconds_count 1.0" in text
            and 'armature_tokens_total{kind="completion"} 3.0' in text
        )
