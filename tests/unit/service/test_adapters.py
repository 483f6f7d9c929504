"""Adapters in the service: which request uses which, and the order of what the worker is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from app.errors import InvalidRequest, ModelNotFound
from app.messages import Abort, Generate, LoadedAdapter, SetAdapter
from app.service.adapters import AdapterStore
from fake_worker import Client, FakeWorker, finished, request, serving

LISTED = (("law", "/adapters/law"), ("med", "/adapters/med"))


def store(
    listed: tuple[tuple[str, str], ...] = LISTED,
    slots: int = 3,
    read: Callable[[str, int], None] = lambda path, slot: None,
) -> AdapterStore:
    return AdapterStore(listed, slots, read)


def commands(worker: FakeWorker) -> list[Any]:
    return [SetAdapter if isinstance(one, SetAdapter) else type(one) for one in worker.commands]


async def test_a_request_names_its_adapter_and_others_have_none() -> None:
    async with serving() as (service, worker, _):
        service.serve_adapters(store())
        clients = []
        for number, name in enumerate(("med", "demo", "law"), 1):  # one after the other, so that their order is known
            clients.append(Client(service, request(model=name)))
            orders = await worker.orders(number)
        assert [order.adapter for order in orders] == [LoadedAdapter(1, 1), None, LoadedAdapter(0, 0)]
        service.on_events([finished(order.request_id) for order in orders])
        for client in clients:
            await client.over()


async def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    async with serving() as (service, _, _):
        service.serve_adapters(store())
        with pytest.raises(ModelNotFound, match="'poetry' is not loaded"):
            await Client(service, request(model="poetry")).over()


async def test_an_adapter_is_loaded_before_its_first_request_and_gets_a_new_number() -> None:
    read = list[tuple[str, int]]()
    async with serving() as (service, worker, _):
        service.serve_adapters(store(read=lambda path, slot: read.append((path, slot))))
        await service.adapters.load("poetry", "poems", ("demo",))
        assert (read, worker.commands) == ([("poems", 2)], [SetAdapter(2, is_loaded=True)])
        client = Client(service, request(model="poetry"))
        (order,) = await worker.orders()
        assert order.adapter == LoadedAdapter(2, 2)
        service.on_events([finished(order.request_id)])
        await client.over()
        service.adapters.unload("poetry")
        await service.adapters.load("poetry", "poems", ("demo",))
        found = service.adapters.find("poetry")
        assert found is not None
        assert found.loaded == LoadedAdapter(2, 3)


async def test_unloading_refuses_new_requests_and_waits_for_open_ones() -> None:
    async with serving() as (service, worker, _):
        service.serve_adapters(store())
        client = Client(service, request(model="law"))
        (order,) = await worker.orders()
        service.adapters.unload("law")
        assert commands(worker) == [Generate]
        with pytest.raises(ModelNotFound, match="'law' is not loaded"):
            await Client(service, request(model="law")).over()
        service.on_events([finished(order.request_id)])
        await client.over()
        assert worker.commands[-1] == SetAdapter(0, is_loaded=False)


async def test_a_request_that_is_given_up_leaves_before_its_adapter() -> None:
    async with serving() as (service, worker, _):
        service.serve_adapters(store())
        client = Client(service, request(model="law"))
        await worker.orders()
        service.adapters.unload("law")
        client.task.cancel()
        await asyncio.wait([client.task])
        assert commands(worker) == [Generate, Abort, SetAdapter]


async def test_what_cannot_be_loaded_is_refused_and_takes_no_place() -> None:
    def read(path: str, slot: int) -> None:
        raise InvalidRequest("It is damaged.", field="lora_path")

    async with serving() as (service, worker, _):
        service.serve_adapters(store(read=read))
        for name, message in (
            ("law", "is loaded already"),
            ("demo", "a name of the model itself"),
            ("", "1 to 256"),
            ("a\nb", "1 to 256"),
            ("poetry", "It is damaged"),
            ("poetry", "It is damaged"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await service.adapters.load(name, "poems", ("demo",))
        assert worker.commands == []
        assert [adapter.name for adapter in service.adapters] == ["law", "med"]


async def test_places_are_limited() -> None:
    async with serving() as (service, _, _):
        service.serve_adapters(store(slots=2))
        with pytest.raises(InvalidRequest, match="All 2 places"):
            await service.adapters.load("poetry", "poems", ())
        service.adapters.unload("law")
        await service.adapters.load("poetry", "poems", ())


async def test_without_a_directory_for_them_clients_change_nothing() -> None:
    async with serving() as (service, worker, _):
        service.serve_adapters(AdapterStore(LISTED, 2))
        with pytest.raises(InvalidRequest, match="loaded at the start only"):
            await service.adapters.load("poetry", "poems", ())
        with pytest.raises(InvalidRequest, match="loaded at the start only"):
            service.adapters.unload("law")
        assert worker.commands == []
