"""Every failure that a person or a machine can cause, in words; HTTP status codes live in `api/errors.py` alone.

ArmatureError
├── RequestError                 one request fails, its client is told
│   ├── InvalidRequest           a value that cannot be honoured
│   │   ├── ContextLengthExceeded
│   │   ├── UnsupportedParameter
│   │   └── WrongModelKind
│   ├── ModelNotFound
│   ├── BodyTooLarge
│   ├── Unauthorized
│   ├── Overloaded               carries `retry_after_seconds`
│   ├── NotReady
│   ├── ServiceStopping
│   ├── RequestTimeout
│   └── StepFailed
└── StartupError                 the process ends, its operator is told
    ├── UnknownArgument
    ├── SettingsInvalid
    ├── CheckpointInvalid
    ├── PlanImpossible
    ├── NoRecipe
    └── ServingFailed            a device or a thread that nobody could foresee
"""

from __future__ import annotations

from typing import ClassVar


class ArmatureError(Exception):
    """Root of the tree. `code` is stable and safe for clients to switch on; the message is for people."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(ArmatureError):
    """One request cannot be served. `field` names the offending field of the body where there is one."""

    code = "request_error"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequest(RequestError):
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class WrongModelKind(InvalidRequest):
    code = "wrong_model_kind"


class ModelNotFound(RequestError):
    code = "model_not_found"


class BodyTooLarge(RequestError):
    code = "body_too_large"


class Unauthorized(RequestError):
    code = "unauthorized"


class Overloaded(RequestError):
    """The queue is full. `retry_after_seconds` is computed from the queue and the measured speed."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NotReady(RequestError):
    code = "not_ready"


class ServiceStopping(RequestError):
    code = "service_stopping"


class RequestTimeout(RequestError):
    code = "request_timeout"


class StepFailed(RequestError):
    code = "step_failed"


class StartupError(ArmatureError):
    """The process cannot serve. `exit_code` is 2 for what the operator can mend, 1 for what they cannot."""

    code = "startup_error"
    exit_code: ClassVar[int] = 2


class UnknownArgument(StartupError):
    """Says what was not understood and what was probably meant."""

    code = "unknown_argument"


class SettingsInvalid(StartupError):
    code = "settings_invalid"


class CheckpointInvalid(StartupError):
    code = "checkpoint_invalid"


class PlanImpossible(StartupError):
    code = "plan_impossible"


class NoRecipe(StartupError):
    code = "no_recipe"


class ServingFailed(StartupError):
    """The worker has ended, or never began: who runs the process can but start it again."""

    code = "serving_failed"
    exit_code = 1
