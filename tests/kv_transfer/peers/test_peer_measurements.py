"""When peers are measured: at once, at the granter's time, instead of each other, and again."""

from __future__ import annotations

import asyncio

import pytest

from baton.engine.scheduling.blocks import Hold
from baton.kv_transfer.memory_mover import Fate
from baton.kv_transfer.peers.grants import EXPECTED_READS_S
from baton.kv_transfer.peers.peer_measurements import AGAIN_S, CONFIRM_S, LATER_ROUNDS
from baton.kv_transfer.peers.probe_pace import AT_ONCE, PROBE_EVERY_S
from baton.runtime import handoff_metrics
from baton.runtime.errors import ReadFailed
from tests.support.metric_values import metric_value
from tests.support.reader_mesh import FLOOR_GB_PER_S, READS, Mesh, Reader
from tests.support.virtual_time import at_the_end, on_virtual_time

READERS = 1000
PER_HOST = 8


def met(state: str) -> float:
    return metric_value(handoff_metrics.PEERS.labels(state))


def now_s() -> float:
    return asyncio.get_running_loop().time()


def readers(mesh: Mesh, count: int) -> list[Reader]:
    made = [Reader(mesh, 100 + number, f"host-{number // PER_HOST}") for number in range(count)]
    for reader in made:
        at_the_end(reader.peers.close)
    return made


def most_reads_in(mesh: Mesh, window_s: float, since_s: float) -> int:
    times = [at_s for at_s, _ in mesh.read_at if at_s >= since_s]
    return max((sum(t <= at_s < t + window_s for at_s in times) for t in times[::7]), default=0)


@on_virtual_time
async def test_thousand_readers_open_at_once_and_measure_in_turn() -> None:
    mesh, begun_s = Mesh(), now_s()
    all_ = readers(mesh, READERS)
    await asyncio.gather(*(reader.open() for reader in all_))
    assert now_s() - begun_s < 0.2  # none waits for others' measurements
    assert len(mesh.read_at) <= AT_ONCE * READS
    await asyncio.sleep(10)
    per_s = READS / PROBE_EVERY_S
    assert mesh.reads_since(begun_s + 1, begun_s + 10) <= 9 * per_s + READS
    await asyncio.sleep(READERS * PROBE_EVERY_S)
    measured = {reader for _, reader in mesh.read_at}
    assert measured == {reader.boot_id for reader in all_}
    assert most_reads_in(mesh, 1.0, begun_s + 1) <= per_s + READS
    assert all(reader.peers.degraded() == [] for reader in all_)


@on_virtual_time
async def test_restarted_granter_serves_a_thousand_without_a_read() -> None:
    mesh = Mesh()
    all_ = readers(mesh, READERS)
    await asyncio.gather(*(reader.open() for reader in all_))
    await asyncio.sleep(READERS * PROBE_EVERY_S)
    mesh.restart(b"2" * 16)
    reads, begun_s, before = len(mesh.read_at), now_s(), met("shared")
    await asyncio.gather(*(reader.open() for reader in all_))
    assert now_s() - begun_s < 0.2 and len(mesh.read_at) == reads
    assert met("shared") - before == READERS
    await asyncio.sleep(CONFIRM_S[0] - 1)
    assert len(mesh.read_at) == reads
    await asyncio.sleep(CONFIRM_S[1] + 60)  # each looks for itself in the end, in its turn
    assert len(mesh.read_at) - reads == READERS * (LATER_ROUNDS + 1)
    assert most_reads_in(mesh, 1.0, begun_s) <= (LATER_ROUNDS + 1) * (AT_ONCE + 4)


@on_virtual_time
async def test_reader_takes_over_what_another_of_its_host_has_measured() -> None:
    mesh = Mesh()
    first, second = readers(mesh, 2)
    await first.open()
    await asyncio.sleep(0.01)
    assert mesh.granter.reports == 1
    reads = len(mesh.read_at)
    await second.open()
    assert len(mesh.read_at) == reads
    elsewhere = Reader(mesh, 999, "host-elsewhere")
    at_the_end(elsewhere.peers.close)
    await elsewhere.open()
    assert len(mesh.read_at) == reads + READS


@on_virtual_time
async def test_hosts_without_a_name_share_nothing() -> None:
    mesh = Mesh()
    mesh.restart(b"2" * 16, host="")
    for number in range(2):
        reader = Reader(mesh, number, "")
        at_the_end(reader.peers.close)
        await reader.open()
        await asyncio.sleep(0.01)
    assert len(mesh.read_at) == 2 * READS and mesh.granter.reports == 0


@on_virtual_time
async def test_unreadable_granter_is_found_after_its_first_loss() -> None:
    """What was taken over does not count for a boot whose connection was lost."""
    mesh = Mesh()
    (reader,) = readers(mesh, 1)
    await reader.open()
    mesh.restart(b"2" * 16)
    mesh.fate = Fate(failed=True)
    await reader.open()  # taken over; its handoff fails then
    reader.peers.forget(b"2" * 16)
    with pytest.raises(ReadFailed):
        await reader.open()
    mesh.fate = Fate()
    await reader.open()


@on_virtual_time
async def test_degraded_pair_is_measured_again_after_a_minute() -> None:
    mesh = Mesh()
    (reader,) = readers(mesh, 1)
    fast = mesh.exchange.bytes_per_s
    assert fast is not None
    mesh.exchange.bytes_per_s = fast / 100  # below the floor
    await reader.open()
    (mark,) = reader.peers.degraded()
    assert 0 < mark.gb_per_s < FLOOR_GB_PER_S
    reads = len(mesh.read_at)
    await asyncio.sleep(AGAIN_S - 1)
    assert len(mesh.read_at) == reads
    await asyncio.sleep(AGAIN_S / 2)
    assert len(mesh.read_at) == reads + LATER_ROUNDS + 1 and reader.peers.degraded()
    mesh.exchange.bytes_per_s = fast
    await asyncio.sleep(3 * AGAIN_S)
    assert reader.peers.degraded() == []
    reads = len(mesh.read_at)
    await asyncio.sleep(20 * AGAIN_S)
    assert len(mesh.read_at) == reads  # good pairs are left alone


@on_virtual_time
async def test_degraded_pair_stays_marked_while_it_cannot_be_measured() -> None:
    mesh = Mesh(floor_gb_per_s=1.0)
    (reader,) = readers(mesh, 1)
    await reader.open()
    mesh.fate = Fate(failed=True)
    await asyncio.sleep(5 * AGAIN_S)
    assert len(reader.peers.degraded()) == 1
    reads = len(mesh.read_at)
    reader.peers.forget(mesh.granter.boot_id)
    await asyncio.sleep(30 * AGAIN_S)
    assert len(mesh.read_at) == reads and reader.peers.degraded() == []


@on_virtual_time
async def test_measurement_of_a_forgotten_peer_marks_none() -> None:
    mesh = Mesh(floor_gb_per_s=1.0)
    (reader,) = readers(mesh, 1)
    await reader.open()
    await mesh.next_reads(LATER_ROUNDS + 1)  # the last READ of a later measurement
    reader.peers.forget(mesh.granter.boot_id)
    await asyncio.sleep(1.0)
    assert reader.peers.degraded() == []


@pytest.mark.parametrize(("busy_s", "crowd"), [(0.5, 0), (20.0, 0), (20.0, 100)])
@on_virtual_time
async def test_pair_that_waits_for_another_takes_a_new_time(busy_s: float, crowd: int) -> None:
    """The granter serves READs promptly for a while only. `crowd`: readers that come before it."""
    mesh = Mesh()
    others = [Reader(mesh, 500 + number, "") for number in range(AT_ONCE + crowd)]
    for reader in others:
        at_the_end(reader.peers.close)
    await asyncio.gather(*(reader.open() for reader in others[:AT_ONCE]))
    (reader,) = readers(mesh, 1)
    async with reader.measurements_held():
        await reader.open()
        await asyncio.sleep(busy_s)
        await asyncio.gather(*(reader.open() for reader in others[AT_ONCE:]))
    await asyncio.sleep(2 * PROBE_EVERY_S * crowd + 1.0)
    own = [at_s for at_s, boot_id in mesh.read_at if boot_id == reader.boot_id]
    assert len(own) == READS
    times = [at_s for at_s, boot_id in mesh.granter.times if boot_id == reader.boot_id]
    assert all(any(0 <= at_s - t <= EXPECTED_READS_S for t in times) for at_s in own)


@on_virtual_time
async def test_reader_whose_pool_was_full_measures_later() -> None:
    mesh = Mesh()
    (reader,) = readers(mesh, 1)
    held = reader.pool.allocate(reader.pool.total, Hold.USED)
    await reader.open()
    assert mesh.read_at == []
    reader.pool.release(held, Hold.USED)
    await asyncio.sleep(2 * AGAIN_S)
    assert len(mesh.read_at) == LATER_ROUNDS + 1


@on_virtual_time
async def test_known_slow_host_is_marked_until_the_pair_is_measured() -> None:
    mesh = Mesh(floor_gb_per_s=1.0)
    (first,) = readers(mesh, 1)
    await first.open()
    await asyncio.sleep(0.01)
    for number in range(AT_ONCE):  # takes the times of others
        await Reader(mesh, 500 + number, f"other-{number}").open()
    second = Reader(mesh, 700, "host-0")
    at_the_end(second.peers.close)
    reads = len(mesh.read_at)
    await second.open()
    assert len(mesh.read_at) == reads and len(second.peers.degraded()) == 1
