"""The times that a granter gives its readers, and what is remembered of pairs of hosts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from baton.kv_transfer.peers import probe_pace
from baton.kv_transfer.peers.host_id import host_id
from baton.kv_transfer.peers.probe_pace import (
    AT_ONCE,
    KNOWN_S,
    MAX_AFTER_S,
    PROBE_EVERY_S,
    HostBandwidths,
    ProbePace,
)

KEY = ("host-1", "DRAM", 1 << 20)


def test_first_readers_measure_at_once_and_then_four_a_second() -> None:
    pace = ProbePace()
    times = [pace.after_s(100.0) for _ in range(1000)]
    assert times[:AT_ONCE] == [0.0] * AT_ONCE and times[AT_ONCE] == PROBE_EVERY_S
    assert times == sorted(times) and times[-1] == pytest.approx(248.0)


def test_time_restores_what_was_taken_and_no_more() -> None:
    pace = ProbePace()
    for _ in range(AT_ONCE):
        pace.after_s(0.0)
    assert pace.after_s(PROBE_EVERY_S) == 0.0
    assert pace.after_s(PROBE_EVERY_S) == PROBE_EVERY_S
    late = [pace.after_s(1e6) for _ in range(AT_ONCE + 1)]
    assert late == [0.0] * AT_ONCE + [PROBE_EVERY_S]


def test_no_time_is_too_far_away() -> None:
    pace = ProbePace()
    assert max(pace.after_s(0.0) for _ in range(20_000)) == MAX_AFTER_S


def test_measurement_is_known_for_a_while() -> None:
    hosts = HostBandwidths()
    hosts.record(KEY, 12.5, 0.0)
    assert hosts.known(KEY, KNOWN_S - 1) == 12.5
    assert hosts.known(KEY, KNOWN_S) == 0.0
    assert hosts.known(("host-1", "VRAM", 1 << 20), 0.0) == 0.0
    hosts.record(KEY, 3.0, KNOWN_S)
    assert hosts.known(KEY, KNOWN_S) == 3.0


@pytest.mark.parametrize("gb_per_s", [0.0, -1.0, math.inf, math.nan, 1e9])
def test_what_cannot_be_true_is_not_remembered(gb_per_s: float) -> None:
    hosts = HostBandwidths()
    hosts.record(KEY, gb_per_s, 0.0)
    hosts.record(("", "DRAM", 1), 1.0, 0.0)  # of no host
    assert hosts.known(KEY, 0.0) == 0.0 and hosts.known(("", "DRAM", 1), 0.0) == 0.0


def test_remembered_hosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_pace, "MAX_HOSTS", 2)
    hosts = HostBandwidths()
    for number in range(3):
        hosts.record((f"host-{number}", "DRAM", 1), 1.0, 0.0)
    known = [hosts.known((f"host-{number}", "DRAM", 1), 0.0) for number in range(3)]
    assert known == [0.0, 1.0, 1.0]


def test_host_id_is_the_machines_and_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "boot_id").write_text("5f3e\n")
    assert host_id(tmp_path / "boot_id") == "5f3e"
    assert host_id(tmp_path / "none") is None
    assert host_id() == host_id()
