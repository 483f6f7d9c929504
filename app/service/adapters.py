"""The LoRA adapters that requests choose by model name: loading and unloading them, and which requests use them.

Everything runs on the event loop, except reading an adapter. The mailbox keeps the order: a request comes after the
weights of its adapter, and a slot is emptied after its last request has left the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NoReturn

from app.errors import InvalidRequest, ModelNotFound, RequestError
from app.messages import Command, LoadedAdapter, SetAdapter

log = logging.getLogger(__name__)
MAX_NAME = 256  # characters of an adapter's name


@dataclass(slots=True)
class Adapter:
    """An adapter that is served. `num_open` requests use it; `is_leaving` if it is unloaded after them."""

    name: str
    path: str
    loaded: LoadedAdapter
    num_open: int = 0
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class AdapterStore:
    """Adapters at the start, and how to load more.

    `initial` has names and paths, in the order of their slots, of which there are `num_slots`. `read` reads the weights
    of a path for a slot, in a thread, and raises `InvalidRequest`; None: clients may not load adapters.
    """

    initial: Sequence[tuple[str, str]] = ()
    num_slots: int = 0
    read: Callable[[str, int], None] | None = None


class Adapters:
    """The adapters by name. Names of the model itself take precedence and are never among them."""

    def __init__(self, store: AdapterStore, put: Callable[[Command], None]) -> None:
        self._read, self._put = store.read, put
        self._initial = tuple(store.initial)
        self._numbers = count()
        self._free = list(range(store.num_slots))
        self._by_name: dict[str, Adapter] = {}
        self._loading: set[str] = set()
        for name, path in store.initial:
            self._by_name[name] = Adapter(name, path, LoadedAdapter(self._free.pop(0), next(self._numbers)))

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._by_name.values()))

    def find(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def acquire(self, name: str) -> Adapter:
        """Return the adapter, which stays loaded until `release`. Raises `ModelNotFound` if it is not served."""
        adapter = self._by_name.get(name)
        if adapter is None:
            _not_loaded(name)
        adapter.num_open += 1
        return adapter

    def release(self, adapter: Adapter) -> None:
        adapter.num_open -= 1
        self._drop_if_unused(adapter)

    async def load(self, name: str, path: str, reserved: Sequence[str]) -> None:
        """Load an adapter from its path below the operator's directory. `reserved` are names of the model itself.

        Raises:
            InvalidRequest: It may not or cannot be loaded, or the name is in use.
        """
        if self._read is None:
            _not_allowed()
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise InvalidRequest(f"lora_name must have 1 to {MAX_NAME} printable characters.", field="lora_name")
        if name in reserved:
            raise InvalidRequest(f"{name!r} is a name of the model itself: choose another.", field="lora_name")
        if name in self._by_name or name in self._loading:
            raise InvalidRequest(f"The adapter {name!r} is loaded already: unload it first.", field="lora_name")
        if not self._free:
            raise InvalidRequest(
                f"All {len(self._by_name)} places for adapters are in use (max_loras): unload one first, and let its requests"
                " end.",
                field="lora_name",
            )
        slot = self._free.pop(0)
        self._loading.add(name)
        try:
            await asyncio.to_thread(self._read, path, slot)
            self._put(SetAdapter(slot, is_loaded=True))
            self._by_name[name] = Adapter(name, path, LoadedAdapter(slot, next(self._numbers)))
        finally:
            self._loading.discard(name)
            if name not in self._by_name:
                self._free.insert(0, slot)

    def load_again(self) -> None:
        """Load what clients have loaded into an engine that was started again, on a thread, before it is ready."""
        initial = [(name, path, slot) for slot, (name, path) in enumerate(self._initial)]
        for adapter in self:
            slot = adapter.loaded.slot
            if self._read is None or (adapter.name, adapter.path, slot) in initial:
                continue
            try:
                self._read(adapter.path, slot)
            except RequestError as error:
                log.warning("the adapter %s is not served any more: %s", adapter.name, error.message)
                del self._by_name[adapter.name]
                adapter.is_leaving = True
                self._drop_if_unused(adapter)
            else:
                self._put(SetAdapter(slot, is_loaded=True))

    def unload(self, name: str) -> None:
        """Serve the adapter to no further request, and free its place after its last one.

        Raises `InvalidRequest` if clients may not unload adapters, and `ModelNotFound`.
        """
        if self._read is None:
            _not_allowed()
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            _not_loaded(name)
        adapter.is_leaving = True
        self._drop_if_unused(adapter)

    def _drop_if_unused(self, adapter: Adapter) -> None:
        if adapter.is_leaving and not adapter.num_open:
            self._put(SetAdapter(adapter.loaded.slot, is_loaded=False))
            self._free.append(adapter.loaded.slot)


def _not_allowed() -> NoReturn:
    raise InvalidRequest(
        "Adapters are loaded at the start only (--lora NAME=DIR); with lora_root, clients may load those in that directory."
    )


def _not_loaded(name: str) -> NoReturn:
    raise ModelNotFound(f"The adapter {name[:100]!r} is not loaded.", field="model")
