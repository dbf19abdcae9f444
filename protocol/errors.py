"""The error tree: what can go wrong, its stable code, its HTTP status and whether a retry may help.

NearlineError
├── InvalidRequest            the caller's fault; a retry of the same bytes cannot help
│   ├── ContextLengthExceeded
│   ├── UnsupportedCheckpoint   an architecture, dtype or adapter feature we do not serve
│   ├── CheckpointCorrupt       missing, torn or altered bytes
│   ├── NoChatTemplate          messages for a model that only continues text
│   ├── NameTaken, AdapterMismatch, PayloadTooLarge, IdempotencyMismatch
│   ├── Unauthorized, Forbidden
│   └── NotFound → ModelNotFound, JobNotFound
├── Busy                      load; a retry may help
│   ├── Overloaded, RateLimited, StartTimeout
│   └── SloUnattainable, DeadlineExceeded   a retry cannot help before the deadline
└── Fault                     ours
    ├── CheckpointUnreadable    bad bytes, met while serving
    ├── NotANumber              weights that are whole, and a step over them that is not finite; the same anywhere
    └── InstanceFailed, NodeLost, OutOfMemory, StorageFull, StateUnavailable, SourceUnavailable, Cancelled

Every error is one row of `ERRORS`; a test checks that the table is complete.
"""

from dataclasses import dataclass


class NearlineError(Exception):
    """Base of all errors that cross a process or reach a user. `message` must name the cure."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> str:
        return ERRORS[type(self)].code

    @property
    def status(self) -> int:
        return ERRORS[type(self)].status


class InvalidRequest(NearlineError): ...


class ContextLengthExceeded(InvalidRequest): ...


class UnsupportedCheckpoint(InvalidRequest): ...


class CheckpointCorrupt(InvalidRequest): ...


class NoChatTemplate(InvalidRequest): ...


class NameTaken(InvalidRequest): ...


class AdapterMismatch(InvalidRequest): ...


class PayloadTooLarge(InvalidRequest): ...


class IdempotencyMismatch(InvalidRequest): ...


class Unauthorized(InvalidRequest): ...


class Forbidden(InvalidRequest): ...


class NotFound(InvalidRequest): ...


class ModelNotFound(NotFound): ...


class JobNotFound(NotFound): ...


class Busy(NearlineError): ...


class Overloaded(Busy): ...


class RateLimited(Busy): ...


class StartTimeout(Busy): ...


class SloUnattainable(Busy): ...


class DeadlineExceeded(Busy): ...


class Fault(NearlineError): ...


class InstanceFailed(Fault): ...


class CheckpointUnreadable(Fault): ...


class NotANumber(Fault): ...


class NodeLost(Fault): ...


class OutOfMemory(Fault): ...


class StorageFull(Fault): ...


class StateUnavailable(Fault): ...


class SourceUnavailable(Fault): ...


class Cancelled(Fault): ...


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """`type` is the OpenAI error type; `is_retryable` becomes the `x-should-retry` header."""

    code: str
    status: int
    type: str
    is_retryable: bool


_BAD, _BUSY, _OURS = "invalid_request_error", "rate_limit_error", "server_error"

ERRORS: dict[type[NearlineError], ErrorRow] = {
    NearlineError: ErrorRow("internal_error", 500, _OURS, False),
    InvalidRequest: ErrorRow("invalid_request", 400, _BAD, False),
    ContextLengthExceeded: ErrorRow("context_length_exceeded", 400, _BAD, False),
    UnsupportedCheckpoint: ErrorRow("unsupported_checkpoint", 422, _BAD, False),
    CheckpointCorrupt: ErrorRow("checkpoint_corrupt", 422, _BAD, False),
    NoChatTemplate: ErrorRow("no_chat_template", 400, _BAD, False),
    NameTaken: ErrorRow("name_taken", 400, _BAD, False),
    AdapterMismatch: ErrorRow("adapter_mismatch", 422, _BAD, False),
    PayloadTooLarge: ErrorRow("payload_too_large", 413, _BAD, False),
    IdempotencyMismatch: ErrorRow("idempotency_mismatch", 422, _BAD, False),
    Unauthorized: ErrorRow("invalid_api_key", 401, "authentication_error", False),
    Forbidden: ErrorRow("permission_denied", 403, "permission_error", False),
    NotFound: ErrorRow("not_found", 404, "not_found_error", False),
    ModelNotFound: ErrorRow("model_not_found", 404, "not_found_error", False),
    JobNotFound: ErrorRow("job_not_found", 404, "not_found_error", False),
    Busy: ErrorRow("busy", 503, _OURS, True),
    Overloaded: ErrorRow("overloaded", 429, _BUSY, True),
    RateLimited: ErrorRow("rate_limit_exceeded", 429, _BUSY, True),
    StartTimeout: ErrorRow("start_timeout", 503, _OURS, True),
    SloUnattainable: ErrorRow("slo_unattainable", 503, _OURS, False),
    DeadlineExceeded: ErrorRow("deadline_exceeded", 504, _OURS, False),
    Fault: ErrorRow("fault", 500, _OURS, True),
    InstanceFailed: ErrorRow("instance_failed", 500, _OURS, True),
    CheckpointUnreadable: ErrorRow("checkpoint_unreadable", 500, _OURS, True),
    NotANumber: ErrorRow("not_a_number", 500, _OURS, False),
    NodeLost: ErrorRow("node_lost", 503, _OURS, True),
    OutOfMemory: ErrorRow("out_of_memory", 507, _OURS, False),
    StorageFull: ErrorRow("storage_full", 507, _OURS, False),
    StateUnavailable: ErrorRow("state_unavailable", 503, _OURS, True),
    SourceUnavailable: ErrorRow("source_unavailable", 503, _OURS, True),
    Cancelled: ErrorRow("cancelled", 499, _OURS, False),
}

_BY_CODE = {row.code: cls for cls, row in ERRORS.items()}


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as it crosses a process: `raise info.exception()` gives the same type back."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: BaseException) -> "ErrorInfo":
        """Describe any exception; one that is not ours becomes `internal_error` with its type and text."""
        if isinstance(error, NearlineError):
            return cls(error.code, error.message, error.param, error.retry_after_s)
        return cls(ERRORS[NearlineError].code, f"{type(error).__name__}: {error}")

    def while_serving(self, digest: str) -> "ErrorInfo":
        """The same as whoever only wanted an answer should hear it: bytes that are bad or not there are no fault of
        theirs, and another node may have good ones."""
        if self.code not in (ERRORS[CheckpointCorrupt].code, ERRORS[ModelNotFound].code):
            return self
        text = f"checkpoint {digest} cannot be read here: {self.message}"
        return ErrorInfo(ERRORS[CheckpointUnreadable].code, text, self.param, self.retry_after_s)

    def exception(self) -> NearlineError:
        cls = _BY_CODE.get(self.code, NearlineError)
        return cls(self.message, param=self.param, retry_after_s=self.retry_after_s)
