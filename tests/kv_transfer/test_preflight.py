"""The preflight names the transport that UCX logs, or says what it cannot know."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.kv_transfer import preflight
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import Fate
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.nixl_mover import NixlMover
from baton.runtime.errors import ReadFailed
from tests.support import handoff_stage
from tests.support.machine_speed import slowness

pytestmark = pytest.mark.timed

LOG = """
[1] |  0..inf | zero-copy | tcp/lo |
[1] | par self cfg#0 | remote memory read by ucp_get* into host memory from host |
[1] | Range  | Description | Config |
[1] | 0..8K | short | tcp/lo |
[1] | 8193..inf | zero-copy | cma/memory |
"""


def test_the_row_of_large_reads_names_the_transport() -> None:
    assert preflight.chosen_transport(LOG) == "cma/memory"
    assert preflight.chosen_transport(LOG.replace("ucp_get", "ucp_put")) is None
    assert preflight.chosen_transport("") is None


@pytest.mark.parametrize(
    ("tls", "name"),
    [
        ("", "a transport of UCX's choice"),
        ("tcp", "tcp"),
        ("tcp,self", "tcp"),
        ("tcp,cma", "UCX_TLS=tcp,cma"),
        ("^cma", "a transport of UCX's choice"),
        ("rc", "UCX_TLS=rc"),
    ],
)
def test_nothing_is_named_that_is_not_known(tls: str, name: str) -> None:
    assert preflight.possible_transport(tls) == name


UCX = "a transport of UCX's choice"
SEE = "(UCX_PROTO_INFO=y shows it)"


@pytest.mark.parametrize(
    ("tls", "over_tcp", "here", "name"),
    [
        ("", True, True, "tcp"),
        ("", False, True, f"shared memory, a transport of UCX's choice {SEE}"),
        ("", False, False, f"not tcp, a transport of UCX's choice {SEE}"),
        ("", None, True, f"a transport of UCX's choice {SEE}"),
        ("tcp,cma", True, True, "tcp"),
        ("tcp,cma", False, True, f"shared memory, UCX_TLS=tcp,cma {SEE}"),
        ("rc", None, False, f"UCX_TLS=rc {SEE}"),
        ("tcp", None, True, "tcp"),
    ],
)
def test_the_report_shows_findings_and_how_to_see_the_rest(
    tls: str, over_tcp: bool | None, here: bool, name: str
) -> None:
    assert preflight.known_transport(tls, over_tcp, here) == name


@pytest.fixture(autouse=True)
def slow_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child may take as much longer to start as this processor does."""
    monkeypatch.setattr(preflight, "LOOPBACK_TIMEOUT_S", 60.0 * slowness())


def counting(monkeypatch: pytest.MonkeyPatch, arrivals: list[int | None]) -> None:
    """So many bytes come in over TCP during each READ."""
    rounds = iter(arrivals)
    monkeypatch.setattr(preflight.tcp_bytes, "since", lambda before: next(rounds))


@pytest.mark.parametrize(
    ("arrivals", "reported"),
    [
        ([256] * 6, "tcp"),
        ([300, 256, 256, 1000, 256, 256], "tcp"),
        ([256] * 5 + [0], UCX),  # other bytes than the READ's: nothing is known
        ([0] * 5 + [256], UCX),
        ([130] * 6, UCX),
        ([None] * 6, UCX),
        ([0] * 6, "shared memory"),
        ([40] * 6, "shared memory"),  # a little talk beside it
    ],
)
def test_tcp_is_named_where_every_reads_bytes_came_in_over_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arrivals: list[int | None],
    reported: str,
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(preflight, "_RDMA_DEVICES", str(tmp_path / "none"))
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=1e-6))
    stage.reader.kind = "nixl"
    scale = handoff_stage.BLOCK_BYTES / 256
    counting(monkeypatch, [None if n is None else int(n * scale) for n in arrivals])

    async def main() -> str:
        await stage.reader.connect(stage.granter.describe())
        return (
            await preflight.measure(stage.reader, handoff_stage.GRANTER, [0], [0], 0.0)
        ).transport

    named, _ = handoff_stage.on_virtual_time(main)
    assert named.startswith(reported)
    (tmp_path / "none").mkdir()
    counting(monkeypatch, [0] * 6)
    assert handoff_stage.on_virtual_time(main)[0].startswith("not tcp")


def test_pools_of_one_process_are_no_transport_of_ucx() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=1e-6))

    async def main() -> str:
        await stage.reader.connect(stage.granter.describe())
        return (
            await preflight.measure(stage.reader, handoff_stage.GRANTER, [0], [0], 0.0)
        ).transport

    assert handoff_stage.on_virtual_time(main)[0] == "the memory mover"


def test_a_slow_pair_is_called_degraded() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=1e-6))

    async def main() -> preflight.PreflightReport:
        await stage.reader.connect(stage.granter.describe())
        blocks = range(4)
        return await preflight.measure(
            stage.reader, handoff_stage.GRANTER, blocks, blocks, 5.0, "a wire"
        )

    report, _ = handoff_stage.on_virtual_time(main)
    assert report.gb_per_s == pytest.approx(4 * handoff_stage.BLOCK_BYTES / 1e-6 / 1e9, rel=1e-3)
    assert report.degraded and report.read_bytes == 4 * handoff_stage.BLOCK_BYTES
    assert "over a wire" in report.line and "DEGRADED" in report.line
    assert "DRAM to DRAM" in report.line
    whole = preflight.PreflightReport("x", 9.0, 1.0, 1, degraded=False)
    assert "DEGRADED" not in whole.line


def test_memory_of_both_ends_is_named() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=1e-6))

    async def main() -> str:
        far = dataclasses.replace(stage.granter.describe(), memory="VRAM", device_id=3)
        await stage.reader.connect(far)
        return (await preflight.measure(stage.reader, handoff_stage.GRANTER, [0], [0], 0.0)).memory

    named, _ = handoff_stage.on_virtual_time(main)
    assert named == "VRAM of device 3 to DRAM"


async def test_bytes_that_land_wrong_are_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real READs from a child; this end then spoils what landed before it looks."""
    pytest.importorskip("nixl")

    class Spoiling:
        def __init__(self, blocks: int, block_bytes: int) -> None:
            self.pool = HostPool(np.ones((blocks, block_bytes), np.uint8), 1)
            self.mover = NixlMover(self.pool, b"s" * 16)

        def __getattr__(self, name: str) -> object:
            return getattr(self.mover, name)

        async def checksums(
            self, blocks: Sequence[int], seeds: Sequence[int]
        ) -> NDArray[np.uint64]:
            self.pool.array[0, 0] += 1
            return await self.mover.checksums(blocks, seeds)

    made: Any = Spoiling
    ends = preflight.Processes(preflight.on_host().arguments, made)
    with pytest.raises(ReadFailed, match="the READs ended .DRAM to DRAM. with wrong bytes"):
        await preflight.read_from_child(2, 4096, ends)


def test_a_read_that_hangs_says_until_when_its_blocks_are_lost() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(stuck=True))

    async def main() -> None:
        await stage.reader.connect(stage.granter.describe())
        with pytest.raises(preflight.PreflightFailed) as caught:
            await preflight.measure(stage.reader, handoff_stage.GRANTER, [0], [0], 0.0)
        assert not caught.value.settled.done()
        stage.exchange.release_stuck()
        assert caught.value.settled.done()

    handoff_stage.on_virtual_time(main)


def test_a_read_that_never_started_frees_its_blocks_at_once() -> None:
    stage = handoff_stage.Stage()
    stage.exchange.bytes_per_s = handoff_stage.BLOCK_BYTES / (4 * preflight.READ_TIMEOUT_S)

    async def main() -> None:
        await stage.reader.connect(stage.granter.describe())
        before = stage.reader.read(handoff_stage.GRANTER, [1], [1])
        with pytest.raises(preflight.PreflightFailed) as caught:
            await preflight.measure(stage.reader, handoff_stage.GRANTER, [0], [0], 0.0)
        assert caught.value.settled.done() and not before.settled.done()
        await before.landed

    handoff_stage.on_virtual_time(main)
    assert not stage.own[0].any()


def test_a_pool_survives_its_line_of_json() -> None:
    pool = PeerPool(b"\xff" * 16, "nixl", b"\x00meta", 1 << 47, 4096, 3)
    fields = asdict(pool) | {"boot_id": pool.boot_id.hex(), "metadata": pool.metadata.hex()}
    assert preflight.described(json.dumps(fields)) == pool


@pytest.mark.parametrize("tls", ["tcp", "tcp,cma"])
async def test_a_reader_sees_by_itself_whether_its_bytes_came_over_tcp(
    monkeypatch: pytest.MonkeyPatch, tls: str
) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_TLS", tls)
    monkeypatch.setattr(preflight, "possible_transport", lambda tls: "a guess")
    report = await preflight.read_from_child(8, 1 << 20, preflight.on_host())
    if tls == "tcp":
        assert report.transport == "tcp"
    else:
        assert report.transport.startswith(("shared memory, a guess", "not tcp, a guess"))


async def test_this_host_is_measured_over_the_named_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with asyncio.timeout(60 * slowness()):
        report = await preflight.loopback(floor_gb_per_s=1e6)
    assert report.transport.startswith("tcp") and report.gb_per_s > 0 and report.degraded
