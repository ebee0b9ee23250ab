"""Logs are JSON lines on stderr, from our code and from libraries, without prompt text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from baton.runtime import logs, metrics
from tests.support.json_values import JsonObject
from tests.support.metric_values import metric_value

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def configuration_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capture: Capture) -> list[JsonObject]:
    captured = capture.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_an_event_is_one_json_line_with_its_fields(capsys: Capture) -> None:
    logs.setup("decode-0", "info")
    logs.get("handoff").info("handoff opened", blocks=4, peer="prefill-0")
    (line,) = lines(capsys)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "handoff opened",
        "level": "info",
        "service": "decode-0",
        "component": "handoff",
        "blocks": 4,
        "peer": "prefill-0",
    }


def test_a_logger_taken_before_setup_follows_it(capsys: Capture) -> None:
    log = logs.get("early")
    logs.setup("router", "info")
    log.info("one")
    logs.setup("router", "error")
    log.info("two")
    log.error("three")
    assert [line["event"] for line in lines(capsys)] == ["one", "three"]


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_the_level_holds_for_libraries_too(capsys: Capture, level: str) -> None:
    logs.setup("router", level)
    for name in ("debug", "info", "warning", "error"):
        getattr(logs.get("ours"), name)(name)
        getattr(logging.getLogger("grpc"), name)(name)
    names = [line["level"] for line in lines(capsys)]
    wanted = ["debug", "info", "warning", "error"]
    assert names == [name for name in wanted[wanted.index(level) :] for _ in range(2)]


def test_library_records_take_the_same_shape(capsys: Capture) -> None:
    logs.setup("router", "info")
    with logs.bind_request("r1"):
        logging.getLogger("uvicorn.error").warning("port %d in use", 8000)
    (line,) = lines(capsys)
    assert line["event"] == "port 8000 in use"
    assert (line["component"], line["level"]) == ("uvicorn.error", "warning")
    assert (line["service"], line["request_id"]) == ("router", "r1")


def test_an_exception_is_in_its_line(capsys: Capture) -> None:
    logs.setup("router", "info")
    try:
        raise KeyError("lost")
    except KeyError:
        logs.get("x").exception("it broke")
        logging.getLogger("grpc").exception("it broke there")
    ours, theirs = lines(capsys)
    for line in (ours, theirs):
        assert "KeyError: 'lost'" in line["exception"]
        assert line["level"] == "error"


async def test_a_request_is_named_in_its_own_task_alone(capsys: Capture) -> None:
    logs.setup("router", "info")
    log = logs.get("x")

    async def serve(request_id: str) -> None:
        with logs.bind_request(request_id, attempt=1):
            await asyncio.sleep(0)
            log.info("in")
            await asyncio.create_task(child())
        log.info("out")

    async def child() -> None:
        log.info("child")

    await asyncio.gather(serve("a"), serve("b"))
    reported = [(line["event"], line.get("request_id")) for line in lines(capsys)]
    assert sorted(reported, key=str) == sorted(
        [("in", "a"), ("in", "b"), ("child", "a"), ("child", "b"), ("out", None), ("out", None)],
        key=str,
    )


@pytest.mark.parametrize("field", sorted(logs.TEXT_FIELDS))
def test_prompt_text_is_withheld(capsys: Capture, field: str) -> None:
    logs.setup("router", "info")
    logs.get("x").info("request", **{field: ["my secret"]})
    logs.get("x").info("request", **{field: 12})
    text, count = lines(capsys)
    assert text[field] == "withheld"
    assert count[field] == 12


def test_fields_that_json_does_not_know_do_not_lose_the_line(capsys: Capture) -> None:
    logs.setup("router", "info")
    log = logs.get("x")
    log.info("odd", boot_id=b"\x00\xff", error=ValueError("v"), nan=float("nan"))
    log.info("huge", big=1 << 80)
    log.info("lone surrogate", name="\ud800")
    plain, huge, surrogate = lines(capsys)
    assert plain["boot_id"] == "b'\\x00\\xff'"
    assert plain["error"] == "ValueError('v')"
    assert plain["nan"] is None
    assert huge["big"] == str(1 << 80)
    assert surrogate["name"] == "'\\ud800'"


def test_a_fault_is_named_without_the_text_of_its_error() -> None:
    with pytest.raises(UnicodeEncodeError) as raised:
        "my secret \ud83d".encode()
    assert "secret" in repr(raised.value)
    fault = logs.fault_of(raised.value)
    assert re.fullmatch(rf"UnicodeEncodeError at {re.escape(__file__)}:\d+", fault)
    assert logs.fault_of(ValueError("secret")) == "ValueError"  # it was not raised


def test_routine_logs_of_libraries_are_quiet(capsys: Capture) -> None:
    logs.setup("router", "info")
    logging.getLogger("uvicorn.access").info("GET / 200")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("httpx").info("HTTP Request")
    assert lines(capsys) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_fails_no_caller_that_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = metric_value(metrics.LOG_LINES_LOST)
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        logs.setup("router", "info")
        logs.get("x").info("ours", blocks=4)
        logging.getLogger("grpc").error("theirs")
        assert metric_value(metrics.LOG_LINES_LOST) == lost + 2
        monkeypatch.undo()
        with contextlib.suppress(OSError):  # what it still holds
            full.close()
