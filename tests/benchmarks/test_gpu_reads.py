"""The part of `make gpu` about moving KV, without a GPU: what READs and sums are judged by, which
bytes land, and the link that stands beside them."""

from __future__ import annotations

import base64
import math

import pytest
import torch

from benchmarks.gpu_parts import handoff as gpu_handoff
from benchmarks.gpu_parts import speed as gpu_speed
from benchmarks.gpu_parts.block_churn import BlockChurn, descriptors


@pytest.mark.parametrize(
    ("link_gb_per_s", "rate", "holds"),
    [(60.0, 3000.0, True), (60.0, 2500.0, False), (2000.0, 3500.0, True), (2000.0, 2000.0, False)],
)
def test_sums_are_judged_by_the_link_that_is_present(
    monkeypatch: pytest.MonkeyPatch, link_gb_per_s: float, rate: float, holds: bool
) -> None:
    """By a fiftieth of a slow link's time, and by the memory's own rate where the link is as fast:
    there a sum that reads each byte once cannot cost a fiftieth."""
    handoff, speed = gpu_handoff, gpu_speed
    size = math.prod(handoff.checksum_sizes(True))
    monkeypatch.setattr(handoff, "seconds_of", lambda *_: size / rate / 1e9)
    ceilings = {"link_gb_per_s": link_gb_per_s, "copy_gb_per_s": 4000.0}
    given = speed.Given(torch.device("cpu"), True, ceilings=ceilings)
    figures = {each.name: each for each in handoff.checksum(given)}
    assert figures["checksum_share_of_link"].holds is holds
    assert figures["checksum_share_of_link"].value == pytest.approx(link_gb_per_s / rate)
    assert figures["checksum_share_at_400_gbit_s"].holds is (50.0 / rate <= 0.02)


@pytest.mark.parametrize(
    ("link_gb_per_s", "rate", "holds"), [(50.0, 40.5, True), (50.0, 38.5, False), (2.0, 1.7, True)]
)
def test_reads_are_judged_by_the_link_that_is_present(
    monkeypatch: pytest.MonkeyPatch, link_gb_per_s: float, rate: float, holds: bool
) -> None:
    """Those of pools after long use; the other orders of blocks stand beside them."""
    handoff = gpu_handoff
    link = handoff.Link("a copy", link_gb_per_s)
    kinds = ("consecutive", "scattered", "used", "verified", "unlike")
    found = {name: handoff.Reading(rate if name == "used" else 1.0, 8.5) for name in kinds}
    monkeypatch.setattr(handoff, "nixl_installed", lambda: True)
    monkeypatch.setattr(handoff, "read_layouts", lambda *_: (link, found))
    given = gpu_speed.Given(torch.device("cpu"), True)
    present, *beside, runs, read, ratio = handoff.handoff(given)
    assert (present.name, present.value, present.beside) == (
        "link_gb_per_s",
        link_gb_per_s,
        "a copy",
    )
    assert [each.value for each in beside] == [1.0] * 4
    assert (runs.name, runs.value) == ("handoff_blocks_per_descriptor", 8.5)
    assert (read.name, read.value) == ("handoff_read_gb_per_s", rate)
    assert (ratio.name, ratio.holds) == ("handoff_read_over_link", holds)
    assert ratio.value == pytest.approx(read.value / link_gb_per_s)


def test_the_read_that_sets_a_connection_up_does_not_count() -> None:
    assert gpu_handoff.settled([1.0, 40.0, 41.0, 45.0]) == 41.0


def test_reads_of_all_layouts_bring_the_granters_bytes() -> None:
    """Two processes, in host memory: each layout is checked byte by byte when it has landed."""
    pytest.importorskip("nixl")
    link, found = gpu_handoff.read_layouts(torch.device("cpu"), 64, 4096, 2)
    assert link.gb_per_s > 0 and all(each.gb_per_s > 0 for each in found.values())
    assert [found[name].blocks_per_descriptor for name in ("consecutive", "unlike")] == [64, 0.5]
    assert 1 <= found["scattered"].blocks_per_descriptor < 2


def test_wrong_bytes_of_a_read_are_found() -> None:
    landed = torch.ones((3, 8), dtype=torch.uint8)
    gpu_handoff.check_landed(landed, torch.ones(3, dtype=torch.uint8))
    landed[1, 7] = 2
    with pytest.raises(RuntimeError, match="its bytes are not those"):
        gpu_handoff.check_landed(landed, torch.ones(3, dtype=torch.uint8))


def test_pools_in_use_hand_over_every_block_once() -> None:
    churn = BlockChurn(256)
    for _ in range(60):
        theirs, ours = churn.hand_over()
        assert len(theirs) == len(ours) == len(set(theirs)) == len(set(ours)) > 0
        churn.granter.check()
        churn.reader.check()
    assert churn.reader.available <= 0.4 * 256
    assert descriptors([1, 2, 3, 7], [4, 5, 9, 10]) == 3
    assert descriptors([1, 2, 3], [4, 5, 6]) == 1


def test_the_link_without_shared_memory_is_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the host: a byte is copied off the device, and on to it again."""
    handoff, pool = gpu_handoff, torch.arange(64, dtype=torch.uint8)
    copied = []

    def seconds_of(work, device):
        work()
        copied.append((pool.clone(), device))
        return 64 / 1e9

    monkeypatch.setattr(handoff, "seconds_of", seconds_of)
    assert handoff.exported_handle(pool) is None
    link = handoff.peer_link(pool, None)
    assert (link.name, link.gb_per_s) == ("two copies through host memory", pytest.approx(1.0))
    ((after, device),) = copied
    assert after.equal(torch.arange(64, dtype=torch.uint8)) and device.type == "cpu"


def test_the_link_by_shared_memory_is_a_copy_of_the_peers_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handoff, pool, theirs = gpu_handoff, torch.zeros(64, dtype=torch.uint8), torch.arange(64)
    opened = []

    def open_storage(*parts):
        opened.extend(parts)
        return theirs.to(torch.uint8).untyped_storage()

    def seconds_of(work, device):
        work()
        return 64 / 2e9

    monkeypatch.setattr(handoff, "seconds_of", seconds_of)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_storage)
    link = handoff.peer_link(pool, [0, {"bytes": base64.b64encode(b"handle").decode()}, 64])
    assert (link.name, link.gb_per_s) == ("a copy by CUDA IPC", pytest.approx(2.0))
    assert opened == [0, b"handle", 64] and pool.equal(theirs.to(torch.uint8))
