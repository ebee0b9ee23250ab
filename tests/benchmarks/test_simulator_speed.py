"""The figures of the simulator's own speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.runtime.errors import ConfigError
from benchmarks.simulator import speed


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """20 requests, each of whose prompts begins with one block that all share."""
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 200 * number,
            "input_length": 1024,
            "output_length": 30,
            "hash_ids": [0, number + 1],
        }
        for number in range(20)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_each_figure_has_its_time_and_limit(trace: Path) -> None:
    found = {each.name: each for each in speed.of_speed(trace, count=20, wide=20)}
    assert found["trace_s"].holds and found["trace_every_token_s"].holds
    assert all(each.value > 0 for each in found.values())
    per_request_us, million_s = (
        found[name].value for name in ("wide_us_per_request", "wide_million_s")
    )
    assert million_s == pytest.approx(per_request_us)


def test_a_slow_simulator_misses_its_limit(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are longer where Python is slower, and as they are where it is faster."""
    monkeypatch.setattr(speed, "_processor_s", lambda *_, **__: next(times))
    for loop_ns, held in ((20.0, (False, True)), (60.0, (True, True))):
        times = iter([10.5, 59.0, 1.0])
        monkeypatch.setattr(speed, "_loop_ns", lambda loop_ns=loop_ns: loop_ns)
        runs, tokens, *_ = speed.of_speed(trace, count=20, wide=20)
        assert (runs.holds, tokens.holds) == held


def test_a_trace_that_is_too_short_is_refused(trace: Path) -> None:
    with pytest.raises(ConfigError, match="has 20 requests: 12000 are needed"):
        speed.of_speed(trace)
