"""Every error that Baton raises on purpose, with what a client and a caller may do about it.

    BatonError
    ├── InvalidRequest        400  the client's request; names the field and the remedy
    │   ├── ContextExceeded   400  prompt and output do not fit the context
    │   ├── NotFound          404  unknown model or route
    │   ├── TooLarge          413  body over the limit
    │   └── Unauthenticated   401  no key, or a wrong one
    ├── Overloaded            503  no room now; Retry-After
    │   └── RateLimited       429  this client's own limit
    ├── DeadlineExceeded      504  the request's time is over
    ├── Cancelled             499  the client left
    ├── Unavailable           503  no worker can serve this now
    │   ├── Draining          503  the worker stops in good order; not a failure
    │   │   └── StalePlacement 503 the prefill workers of a placement are not there any more
    │   └── WorkerLost        503  the worker died or fell silent; another may succeed
    ├── ConfigError           500  a setting, a folder or a port; names the remedy
    │   └── ModelError        500  the model's files
    ├── HandoffError          503  the move of KV failed
    │   ├── Incompatible      503  the two pools do not fit; names what differs
    │   ├── LeaseLost         503  the lease ended before the blocks were verified
    │   ├── ReadFailed        503  the mover reports an error or a missed deadline
    │   ├── AnswerOverdue     503  the granter keeps its lease and withholds what it owes
    │   └── ChecksumMismatch  503  the bytes are not the ones that were offered
    ├── OutOfBlocks           503  the pool is full (inside a worker; never seen by clients)
    ├── EngineError           500  the device or the numbers went wrong
    │   └── OutOfMemory       503  the device has no memory for a slice of a step
    └── DeviceLost            500  the device does not answer; ends its worker

This module is pure standard library: engine/ imports it too. Foreign exceptions are
translated into these at one seam each, keeping the cause.
"""

from __future__ import annotations


class BatonError(Exception):
    """Root of the tree. `http_status` and `grpc_code` are what a client sees; `retryable`
    says whether the same request can succeed elsewhere or later."""

    http_status: int = 500
    grpc_code: str = "INTERNAL"
    retryable: bool = False

    @property
    def code(self) -> str:
        """The class name: the code on the wire and in logs."""
        return type(self).__name__


class InvalidRequest(BatonError):
    """The request is malformed or out of range.

    `field` is the path of the offending field as the client wrote it (`messages[0].role`);
    the message says what is wrong and what to do.
    """

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextExceeded(InvalidRequest):
    """Prompt and output have more tokens than the context."""


class NotFound(InvalidRequest):
    http_status = 404
    grpc_code = "NOT_FOUND"


class TooLarge(InvalidRequest):
    http_status = 413
    grpc_code = "RESOURCE_EXHAUSTED"


class Unauthenticated(InvalidRequest):
    http_status = 401
    grpc_code = "UNAUTHENTICATED"


class Overloaded(BatonError):
    """No room now. `retry_after_s` goes out as the Retry-After header."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(BatonError):
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"


class Cancelled(BatonError):
    http_status = 499
    grpc_code = "CANCELLED"


class Unavailable(BatonError):
    http_status = 503
    grpc_code = "UNAVAILABLE"
    retryable = True


class Draining(Unavailable):
    """The worker takes nothing new, or hands back what it has no time to finish. It does
    not count as a failure: the caller continues with another worker at once."""


class StalePlacement(Draining):
    """Every prefill worker that a request was placed with has left or restarted while the
    request waited. The worker that reports it stays: it may take the next placement."""


class WorkerLost(Unavailable):
    """The worker died or fell silent."""


class ConfigError(BatonError):
    """A setting, a folder or a port is wrong; the message names it and the remedy."""


class ModelError(ConfigError):
    """The model's files are missing, broken or of an unsupported kind."""


class HandoffError(BatonError):
    """The move of a request's KV failed; another prefill worker may succeed."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    retryable = True


class Incompatible(HandoffError):
    """The two workers' pools do not fit; the message names each difference."""

    retryable = False


class LeaseLost(HandoffError):
    pass


class ReadFailed(HandoffError):
    pass


class AnswerOverdue(HandoffError):
    """The granter renews the lease, but its checksums, offers or first tokens do not come."""


class ChecksumMismatch(HandoffError):
    pass


class OutOfBlocks(BatonError):
    """The pool has no free block. Schedulers handle it; it never reaches a client."""

    http_status = 503
    grpc_code = "RESOURCE_EXHAUSTED"
    retryable = True


class EngineError(BatonError):
    """The device failed, or the model produced numbers that are not finite."""

    retryable = True


class OutOfMemory(EngineError):
    """The device has no memory for one slice of a step; its request alone fails. Another
    worker, or this one with less to do, may have it."""

    http_status = 503
    grpc_code = "RESOURCE_EXHAUSTED"


class DeviceLost(BatonError):
    """A step is not done in time and may write into its blocks at any later time: no block of
    this pool can be trusted again. No caller handles it: the worker ends, and its supervisor
    restarts it."""

    retryable = True


def by_code(code: str, detail: str) -> BatonError:
    """The error that a peer named on the wire; an unknown name becomes a BatonError."""
    if code not in _BY_CODE:  # perhaps a class defined after this module was read
        _BY_CODE.update(_tree(BatonError))
    found = _BY_CODE.get(code)
    if found is None:
        return BatonError(f"{code}: {detail}")
    return found(detail)


def _tree(root: type[BatonError]) -> dict[str, type[BatonError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


_BY_CODE = _tree(BatonError)
