"""Logs of other systems, as samples of a timing model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.measured_logs import (
    chunk_samples,
    middle,
    read_log,
    read_logs,
    step_samples,
)


def entry(
    issued_s: float, prompt: int, first_s: float, end_s: float, output: int
) -> dict[str, Any]:
    """Return a request of a log, whose clock began long ago."""
    return {
        "prompt_len": prompt,
        "output_len": output,
        "issue_time": 9000.0 + issued_s,
        "first_token_time": 9000.0 + first_s,
        "complete_time": 9000.0 + end_s,
        "ttft_ms": 0.0,
        "tpot_ms": 0.0,
    }


ENTRIES = [
    entry(0.0, 100, 0.1, 2.1, 21),
    entry(1.0, 300, 1.3, 5.3, 41),
    entry(9.0, 50, 9.2, 9.3, 2),
    entry(9.1, 60, 9.4, 9.5, 2),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rate in (4, 2.5):
        text = repr(list(reversed(ENTRIES))) + "\n{'a second': 'line'}\n"
        (tmp_path / f"system-4-{rate}.exp").write_text(text)
    (tmp_path / "system-c2-4-1.exp").write_text(repr(ENTRIES))
    return tmp_path


def test_a_log_is_in_order_and_has_its_rate(folder: Path) -> None:
    logs = read_logs(folder, "system")
    assert [log.rate for log in logs] == [2.5, 4.0]
    issued = [each.arrived_s for each in logs[0].traffic()]
    assert issued == pytest.approx([0.0, 1.0, 9.0, 9.1])


def test_a_prompt_that_met_no_other_is_a_chunk(folder: Path) -> None:
    found = chunk_samples(read_log(folder / "system-4-4.exp"))
    assert [(each.amounts[0], each.seconds) for each in found] == [
        (100.0, pytest.approx(0.1)),
        (300.0, pytest.approx(0.3)),
    ]
    assert found[0].amounts[1] == 100 * 101 / 2


def test_a_gap_has_those_that_decoded_beside_it(folder: Path) -> None:
    first, second = step_samples(read_log(folder / "system-4-4.exp"))
    assert first.seconds == pytest.approx(0.1) and second.seconds == pytest.approx(0.1)
    assert first.amounts[0] == pytest.approx(1 + 0.8 / 2)
    assert first.amounts[1] == pytest.approx(110.5 + 0.4 * 320.5)
    assert second.amounts[0] == pytest.approx(1 + 0.8 / 4)


def test_prompts_on_the_same_engine_are_taken_out_of_gaps(folder: Path) -> None:
    log = read_log(folder / "system-4-4.exp")
    first, second = step_samples(log, lambda tokens: tokens / 1000)
    assert first.seconds == pytest.approx((2.0 - 0.3) / 20)
    assert second.seconds == pytest.approx(0.1)


def test_the_ends_of_a_log_are_left_out() -> None:
    log = list(range(30))
    assert list(middle(log)) == log[3:27]  # type: ignore[arg-type, comparison-overlap]
