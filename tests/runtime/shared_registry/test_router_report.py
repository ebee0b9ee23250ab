"""Reports between routers: read back as written, and refused unless they are signed and true."""

from __future__ import annotations

import json

import pytest

from baton.runtime.shared_registry.router_report import (
    MAX_BOOTS,
    MAX_HOST,
    MAX_REPORT_BYTES,
    ReportSigner,
    RouterReport,
)
from baton.runtime.shared_registry.signed_entry import EntrySigner
from tests.support.json_values import JsonObject

REPORT = RouterReport("a" * 32, 7, ("b" * 32,), (("c" * 32, 2, 300),), "node-1")
SIGNER = ReportSigner(("token",))


def test_report_is_read_as_it_was_written() -> None:
    assert SIGNER.read(SIGNER.write(REPORT)) == REPORT


def test_either_of_two_tokens_counts_and_another_does_not() -> None:
    content = ReportSigner(("new", "old")).write(REPORT)
    assert ReportSigner(("old", "new")).read(content) == REPORT
    assert "not signed" in str(ReportSigner(("other",)).read(content))


def test_key_is_not_that_of_registry_entries() -> None:
    report, entry = SIGNER.texts, EntrySigner(("token",)).texts
    assert json.loads(report.write({})) != json.loads(entry.write({}))


def test_longest_report_is_read() -> None:
    boots = tuple(f"{number:032x}" for number in range(2 * MAX_BOOTS))
    placed = tuple((boot, 1 << 30, 1 << 30) for boot in boots)
    content = SIGNER.write(RouterReport("a" * 32, (1 << 63) - 1, boots, placed, "é" * MAX_HOST))
    report = SIGNER.read(content)
    assert isinstance(report, RouterReport) and len(content) < MAX_REPORT_BYTES
    assert report.open == boots[:MAX_BOOTS] and report.placed == placed[:MAX_BOOTS]


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"nothing", b"\xff", b"[" * 50_000, b" " * (MAX_REPORT_BYTES + 1)],
)
def test_text_that_is_no_report_is_refused(content: bytes) -> None:
    assert isinstance(SIGNER.read(content), str)


def test_nesting_too_deep_to_be_written_again_is_refused() -> None:
    """Reading needs fewer frames than writing: at some depth only the second one fails."""
    content = json.loads(SIGNER.write(REPORT))
    text = json.dumps(content | {"open": "NESTED"})
    for depth in range(850, 1001):
        nested = text.replace('"NESTED"', "[" * depth + "]" * depth).encode()
        assert len(nested) < MAX_REPORT_BYTES
        assert isinstance(SIGNER.read(nested), str)


@pytest.mark.parametrize(
    "changed",
    [
        {"router": "A" * 32},
        {"router": 7},
        {"counter": -1},
        {"counter": True},
        {"counter": 1 << 63},
        {"open": ["b"]},
        {"open": "b" * 32},
        {"open": ["b" * 32] * (MAX_BOOTS + 1)},
        {"placed": [["c" * 32, 1]]},
        {"placed": [["c" * 32, -1, 1]]},
        {"placed": [["c" * 32, 1, 1.5]]},
        {"placed": [["c" * 32, 1 << 31, 1]]},
        {"placed": [7]},
        {"host": None},
        {"host": "h" * (MAX_HOST + 1)},
        {"more": 1},
    ],
)
def test_signed_report_that_cannot_be_true_is_refused(changed: JsonObject) -> None:
    content = json.loads(SIGNER.write(REPORT))
    del content["signature"]
    content |= changed
    assert isinstance(SIGNER.read(SIGNER.texts.write(content)), str)


def test_changed_report_is_refused() -> None:
    content = SIGNER.write(REPORT)
    assert "not signed" in str(SIGNER.read(content.replace(b"b" * 32, b"d" * 32)))
