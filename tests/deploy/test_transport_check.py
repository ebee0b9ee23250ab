"""The doctor's NIXL findings: one real measurement, the rest from scripted reports."""

from __future__ import annotations

import os

import pytest

from baton.deploy.cli import transport_check
from baton.deploy.cli.transport_check import transport
from baton.kv_transfer import preflight
from baton.kv_transfer.preflight import PreflightReport, Processes
from baton.runtime.config import HandoffConfig
from baton.runtime.errors import ConfigError, ReadFailed


def script(monkeypatch: pytest.MonkeyPatch, gb_per_s: dict[str | None, float]) -> list[str | None]:
    """Reports by the UCX_TLS that the measurement sees; answers the list of those seen."""
    seen: list[str | None] = []

    async def loopback(floor_gb_per_s: float, ends: Processes | None = None) -> PreflightReport:
        chosen = os.environ.get("UCX_TLS") if ends is None else ends.arguments[-1]
        seen.append(chosen)
        if chosen not in gb_per_s:
            raise ReadFailed("no such transport")
        rate = gb_per_s[chosen]
        return PreflightReport(chosen or "cma", rate, 5.0, 1 << 20, rate < floor_gb_per_s)

    monkeypatch.setattr(preflight, "loopback", loopback)
    return seen


def test_both_transports_are_named_with_their_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    seen = script(monkeypatch, {None: 6.5, "tcp": 1.25})
    own, tcp = transport(HandoffConfig())
    assert seen == [None, "tcp"]
    assert (own.level, tcp.level) == ("ok", "ok")
    assert "6.50 GB/s over cma" in own.found and "1.25 GB/s over tcp" in tcp.found
    assert "UCX_TLS" not in os.environ


def test_the_users_own_choice_alone_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "rc,sm")
    assert script(monkeypatch, {"rc,sm": 40.0}) == []
    (only,) = transport(HandoffConfig())
    assert "over rc,sm" in only.found
    assert os.environ["UCX_TLS"] == "rc,sm"


def test_a_slow_transport_warns_and_a_broken_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    script(monkeypatch, {"tcp": 0.01})
    own, tcp = transport(HandoffConfig(preflight_floor_gb_per_s=0.05))
    assert (own.level, own.found, own.remedy) == (
        "fail", "no such transport", transport_check.BROKEN,
    )  # fmt: skip
    assert (tcp.level, tcp.remedy) == ("warn", transport_check.SLOW)
    assert "DEGRADED" in tcp.found


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, and no UCX_TLS."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(transport_check, "visible_gpus", lambda device: 0 if device == "cpu" else 2)


@pytest.mark.parametrize(
    ("device", "named"),
    [("auto", ["cuda:0", "cuda:1"]), ("cuda:1", ["cuda:1"]), ("cpu", [])],
)
def test_each_gpu_that_workers_may_use_is_measured(
    monkeypatch: pytest.MonkeyPatch, gpus: None, device: str, named: list[str]
) -> None:
    seen = script(monkeypatch, {None: 6.5, "tcp": 1.25, "cuda:0": 900.0, "cuda:1": 0.01})
    found = {finding.name: finding for finding in transport(HandoffConfig(), device)}
    assert seen == [None, "tcp", *named]
    assert list(found)[2:] == [f"nixl on {name}" for name in named]
    if device != "cpu":
        slow = found["nixl on cuda:1"]
        assert (slow.level, slow.remedy) == ("warn", transport_check.SLOW_GPU)
    if device == "auto":
        good = found["nixl on cuda:0"]
        assert (good.level, good.remedy) == ("ok", "") and "900.00 GB/s" in good.found


def test_a_gpu_that_is_not_there_leaves_the_hosts_findings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(device: str) -> int:
        raise ConfigError("torch sees 0 GPUs")

    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(transport_check, "visible_gpus", none)
    script(monkeypatch, {None: 6.5, "tcp": 1.25})
    found = transport(HandoffConfig(), "cuda")
    assert [finding.name for finding in found] == ["nixl transport", "nixl over tcp"]


def test_a_gpu_whose_memory_cannot_be_read_fails(
    monkeypatch: pytest.MonkeyPatch, gpus: None
) -> None:
    script(monkeypatch, {None: 6.5, "tcp": 1.25})
    bad = transport(HandoffConfig(), "cuda:0")[-1]
    assert (bad.name, bad.level, bad.remedy) == (
        "nixl on cuda:0", "fail", transport_check.BROKEN_GPU,
    )  # fmt: skip


def test_this_host_really_moves_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    (finding,) = transport(HandoffConfig(preflight_floor_gb_per_s=0.0))
    assert finding.level == "ok"
    assert "GB/s" in finding.found and "tcp" in finding.found
    assert "DRAM to DRAM" in finding.found
