"""What the server's main process and the API processes beside it tell each other, and the memory that they share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.metrics.reports import MetricsReport
from app.server.startup import ServedStart
from app.service.admission import OpenCounts
from app.service.engine_client import ProcessPlace
from app.settings import Settings

PROCESS = -1  # the key of the metrics that no model has, where there are several


class SharedCounts:
    """The open requests of each model in each process, and which models take requests: one page for all processes."""

    def __init__(self, memory: memoryview, num_processes: int) -> None:
        self._values, self.num_processes = memory.cast("q"), num_processes
        self._num_values = OpenCounts.num_values(num_processes) + 1  # the last one: takes requests

    @classmethod
    def num_bytes(cls, num_models: int, num_processes: int) -> int:
        return 8 * num_models * (OpenCounts.num_values(num_processes) + 1)

    def of_model(self, model: int, number: int) -> OpenCounts:
        """Return the counts of a model, with the row of process `number` to write."""
        first = model * self._num_values
        return OpenCounts(self._values[first : first + self._num_values - 1], number)

    def place(self, model: int, number: int) -> ProcessPlace:
        return ProcessPlace(number, self.num_processes, self.of_model(model, number))

    def is_open(self, model: int) -> bool:
        return bool(self._values[(model + 1) * self._num_values - 1])

    def set_open(self, model: int, is_open: bool) -> None:
        self._values[(model + 1) * self._num_values - 1] = is_open


# ---- from the main process -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ApiRecipe:
    """The first message: which of the processes this is, and what all of them serve.

    `models` are the settings of each model, and `settings` those of the process. `is_single`: one model, which stays.
    """

    number: int
    num_processes: int
    settings: Settings
    models: Sequence[Settings]
    is_single: bool


@dataclass(frozen=True, slots=True)
class EngineUp:
    """The engine of a model is ready, at the UNIX socket `address`. Another `generation` has another plan."""

    model: int
    generation: int
    address: str
    start: ServedStart


@dataclass(frozen=True, slots=True)
class ReportWanted:
    """A scrape waits for a report."""

    scrape: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Close the listeners, and end after the open requests."""


@dataclass(frozen=True, slots=True)
class ReadKeys:
    """Read the files of API keys again."""


@dataclass(frozen=True, slots=True)
class CallMessage:
    """A part of a response, as an ASGI message."""

    call: int
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a request that was passed on, and the error that was raised instead of an answer.

    `errors` is the format of errors that its body asks for. `tokens` and `seconds` are for the log.
    """

    call: int
    error: Exception | None
    errors: Any = None
    code: str = ""
    model: str = ""
    tokens: tuple[int, int] = (0, 0)
    seconds: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True, slots=True)
class Permitted:
    """The answer to `AdmitClient` and `ReserveTokens`."""

    question: int
    error: Exception | None


# ---- from an API process ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PassedCall:
    """A request that the main process answers: an ASGI scope of plain values, the body, and whose it is."""

    call: int
    scope: Mapping[str, Any]
    body: bytes
    client: Hashable | None


@dataclass(frozen=True, slots=True)
class CallCancelled:
    call: int


@dataclass(frozen=True, slots=True)
class ModelServed:
    """The process answers requests of a model from now on."""

    model: int


@dataclass(frozen=True, slots=True)
class Reported:
    """What was counted since the last report, by the number of the model, or `PROCESS`."""

    reports: Mapping[int, MetricsReport]
    scrape: int | None = None


@dataclass(frozen=True, slots=True)
class AdmitClient:
    question: int
    client: Hashable


@dataclass(frozen=True, slots=True)
class ReserveTokens:
    question: int
    client: Hashable
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SettleTokens:
    client: Hashable
    num_reserved: int
    num_tokens: int
