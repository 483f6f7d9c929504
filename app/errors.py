"""Exceptions for every failure that a client or an operator can cause.

A `RequestError` fails one request, and its client reads the message; a `StartupError` ends the process, and its
operator does. HTTP status codes are in `api/errors.py` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from armature_kernels.errors import KernelError


class ArmatureError(Exception):
    """Base class. `code` is stable, so that clients can compare it; the message is for people."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(ArmatureError):
    """One request cannot be served. `field` names the field of the body at fault, if there is one."""

    code = "request_error"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequest(RequestError):
    """The request has a value that is wrong or cannot be used."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt and completion together, are longer than the context."""

    code = "context_length_exceeded"


class TemplateStopped(InvalidRequest):
    """The chat template needs more time or memory for these messages than it may take."""


class UnsupportedParameter(InvalidRequest):
    """The request uses a parameter that this server or route does not support."""

    code = "unsupported_parameter"


class ThreadNotFound(UnsupportedParameter):
    """The request continues a conversation that this server does not hold."""

    code = "thread_not_found"


class WrongModelKind(InvalidRequest):
    """The served model is of a kind that cannot answer this route."""

    code = "wrong_model_kind"


class ModelNotFound(RequestError):
    """The request names a model or version that is not served."""

    code = "model_not_found"


class BodyTooLarge(RequestError):
    code = "body_too_large"


class Unauthorized(RequestError):
    code = "unauthorized"


class PermissionDenied(RequestError):
    """The request's key may not use the model."""

    code = "permission_denied"


class Overloaded(RequestError):
    """The queue is full. `retry_after_seconds` is computed from the queue and the measured speed."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds

    def __reduce__(self) -> tuple[type[Overloaded], tuple[str, float]]:
        return type(self), (self.message, self.retry_after_seconds)


class RateLimited(Overloaded):
    """The client has used up its requests or tokens of this minute."""

    code = "rate_limit_exceeded"


class NotReady(RequestError):
    """The model is still loading, or the worker has stopped. `retry_after_seconds` None: there is no estimate."""

    code = "not_ready"

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ServiceStopping(RequestError):
    code = "service_stopping"


class RequestTimeout(RequestError):
    code = "request_timeout"


class StepFailed(RequestError):
    code = "step_failed"


class StartupError(ArmatureError):
    """The process cannot serve. `exit_code` is 2 if the operator can correct the cause, else 1."""

    code = "startup_error"
    exit_code: ClassVar[int] = 2


class PrecisionTooCostly(StartupError):
    """The weights were packed in a precision that costs more quality than allowed; the server plans again."""

    code = "precision_too_costly"


class UnknownArgument(StartupError):
    """A command-line argument is unknown. The message suggests the likely intended one."""

    code = "unknown_argument"


class SettingsInvalid(StartupError):
    code = "settings_invalid"


class CheckpointInvalid(StartupError):
    code = "checkpoint_invalid"


class NotNative(CheckpointInvalid):
    """The model has an architecture, or a value of its config.json, that no native engine computes."""


class ModelUnavailable(StartupError):
    """The model is not on this machine and cannot be fetched: its name, the token, the disk or the setting offline."""

    code = "model_unavailable"


class FetchFailed(StartupError):
    """Fetching the model failed for a reason outside this machine: the network, the hub, or a damaged file."""

    code = "fetch_failed"
    exit_code = 1


class PlanImpossible(StartupError):
    """The settings or the model do not fit this machine."""

    code = "plan_impossible"


class NoRecipe(StartupError):
    """The package has no recipe (weight format and kernels) for this device, precision and architecture."""

    code = "no_recipe"


class ServingFailed(StartupError):
    """The worker has ended or never started; only a restart of the process helps."""

    code = "serving_failed"
    exit_code = 1


@contextmanager
def raise_kernel_errors_as(kind: type[StartupError]) -> Iterator[None]:
    """Raise an error of the kernels, which know nothing of the server, as one of the above."""
    try:
        yield
    except KernelError as error:
        raise kind(error.message) from error
