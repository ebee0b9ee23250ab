"""JSON logs on stderr, one object a line, for our own events and for the libraries' alike.

Events are named in words and carry fields: `log.info("handoff opened", handoff_id=...)`.
`bind_request` adds the request to every event of the task that serves it. Prompt and output
text never reach a log: fields of the names in TEXT_FIELDS are withheld. A line that cannot be
written (a full disk) is counted and fails no caller. The process owns the configuration: `setup` is
called once by its entry point, never by a library module.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import orjson
import structlog
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.typing import FilteringBoundLogger, Processor

from baton.runtime import metrics

TEXT_FIELDS = frozenset({"prompt", "messages", "content", "text", "delta", "tokens", "body"})
_QUIET = ("httpx", "httpcore", "uvicorn.access", "uvicorn.error")
_Event = MutableMapping[str, Any]


def setup(service: str, level: str = "info") -> None:
    """Route structlog and the standard library's logging to stderr as JSON.

    `service` names the process in every line ("router", "decode-0"). `level` is a name as in
    TelemetryConfig.log_level. A second call replaces the first.
    """
    number = logging.getLevelNamesMapping()[level.upper()]

    def add_service(_: object, __: str, event: _Event) -> _Event:
        event["service"] = service
        return event

    shared: list[Processor] = [
        merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        add_service,
        _withhold_text,
    ]
    structlog.configure(
        processors=[*shared, _render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=_StderrLogger,
        cache_logger_on_first_use=False,
    )
    _route_standard_logging(number, shared)


def get(name: str) -> FilteringBoundLogger:
    """A logger whose events carry `component=name`; may be taken before `setup`."""
    logger: FilteringBoundLogger = structlog.get_logger(component=name)
    return logger


def bind_request(request_id: str, **fields: object) -> AbstractContextManager[None]:
    """Within the block, and in tasks started there, every event carries the request's id."""
    return bound_contextvars(request_id=request_id, **fields)


def fault_of(error: BaseException) -> str:
    """Return the type of an unexpected error and the line that raised it. Neither has a client's
    text, which the error's own text may repeat."""
    location = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        location = f" at {frame.f_code.co_filename}:{line}"
    return type(error).__name__ + location


def _withhold_text(_: object, __: str, event: _Event) -> _Event:
    for name in TEXT_FIELDS.intersection(event):
        if not isinstance(event[name], int):  # a count may pass
            event[name] = "withheld"
    return event


def _render(_: object, __: str, event: _Event) -> str:
    """A line must never fail because of its fields: what JSON does not know goes as repr."""
    try:
        return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # an integer beyond 64 bits, a lone surrogate
        return json.dumps({str(name): repr(value) for name, value in event.items()})


def _add_component(_: object, __: str, event: _Event) -> _Event:
    event["component"] = event["_record"].name
    return event


class _StderrLogger:
    """Writes a line with a single call, so that threads do not interleave. Never raises for a
    line that finds no room: the caller would fail."""

    def __init__(self, *_: object) -> None:
        pass

    def msg(self, line: str) -> None:
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except OSError:  # a full disk, or a closed pipe
            metrics.LOG_LINES_LOST.inc()

    debug = info = warning = error = critical = exception = log = fatal = msg


class _StderrHandler(logging.Handler):
    """Sends the standard library's records the same way."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _StderrLogger().msg(self.format(record))
        except Exception:  # logging's own contract: it reports, the program goes on
            self.handleError(record)


def _route_standard_logging(level: int, shared: list[Processor]) -> None:
    handler = _StderrHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_add_component, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "grpc"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
