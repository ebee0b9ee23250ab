"""An announcement's age is what its reader saw; the wall clock serves only a reader that has not
looked."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from baton.runtime.registry import DirectoryRegistry, WorkerRecord

ONE = WorkerRecord("decode-0", "a" * 32, "decode", "127.0.0.1:1", "127.0.0.1:2", "m", 10)
TWO = WorkerRecord("prefill-0", "b" * 32, "prefill", "127.0.0.1:3", "127.0.0.1:4", "m", 11)
TTL_S, RENEW_S, LOOK_S = 15.0, 3.0, 0.5


@dataclass
class Host:
    """A folder, and the clocks of its readers: a file is dated by the wall clock."""

    folder: Path
    wall_s: float = 1_000_000.0
    since_start_s: float = 500.0

    def time(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.since_start_s

    def passes(self, seconds: float) -> None:
        self.wall_s += seconds
        self.since_start_s += seconds

    def announce(self, record: WorkerRecord = ONE, skew_s: float = 0.0) -> None:
        """By a process whose wall clock is ahead by `skew_s`."""
        DirectoryRegistry(self.folder).announce(record)
        dated_s = self.wall_s + skew_s
        os.utime(self.folder / f"{record.worker_id}.worker", (dated_s, dated_s))

    def reader(self) -> DirectoryRegistry:
        return DirectoryRegistry(self.folder, ttl_s=TTL_S)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path / "registry")
    monkeypatch.setattr("baton.runtime.registry.time", made)
    return made


@pytest.mark.parametrize("jump_s", [-86_400.0, -16.0, 16.0, 86_400.0])
def test_a_changed_clock_hides_no_live_worker_and_no_death(host: Host, jump_s: float) -> None:
    reader = host.reader()
    host.announce(ONE)
    host.announce(TWO)
    assert reader.workers() == [ONE, TWO]
    host.wall_s += jump_s
    for look in range(100):  # ONE goes on, TWO has died
        if look % round(RENEW_S / LOOK_S) == 0:
            host.announce(ONE)
        assert ONE in reader.workers()
        assert (TWO in reader.workers()) == (look * LOOK_S <= TTL_S)
        host.passes(LOOK_S)


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_a_writer_whose_clock_is_wrong_is_seen_like_any_other(host: Host, skew_s: float) -> None:
    reader = host.reader()
    assert reader.workers() == []
    host.passes(LOOK_S)
    host.announce(skew_s=skew_s)  # a new worker, after the last look: it is not old
    assert reader.workers() == [ONE]
    host.passes(TTL_S - LOOK_S)
    assert reader.workers() == [ONE]
    host.passes(2 * LOOK_S)
    assert reader.workers() == []


def test_a_first_look_takes_no_long_dead_worker_for_a_live_one(host: Host) -> None:
    host.announce()
    host.passes(TTL_S + 0.1)
    assert host.reader().workers() == []  # as `baton ps` looks: once


def test_a_first_look_goes_on_where_the_files_date_ends(host: Host) -> None:
    host.announce()
    host.passes(10.0)
    reader = host.reader()
    assert reader.workers() == [ONE]
    host.passes(TTL_S - 10.0)
    assert reader.workers() == [ONE]
    host.passes(0.1)
    assert reader.workers() == []


@pytest.mark.parametrize("skew_s", [20.0, 86_400.0])
def test_with_a_wrong_clock_a_dead_worker_shows_for_one_lifetime(host: Host, skew_s: float) -> None:
    host.announce(skew_s=skew_s)
    host.passes(10.0)
    reader, shown_s = host.reader(), 0.0
    while reader.workers():
        host.passes(LOOK_S)
        shown_s += LOOK_S
    assert shown_s == TTL_S + LOOK_S  # the first look that did not show it


def test_with_a_wrong_clock_a_live_worker_hides_until_renewal(
    host: Host,
) -> None:
    host.announce(skew_s=-3600.0)
    reader = host.reader()
    assert reader.workers() == []
    host.passes(RENEW_S)
    host.announce(skew_s=-3600.0)
    assert reader.workers() == [ONE]


def test_a_paused_reader_takes_the_age_of_a_change_from_the_file(host: Host) -> None:
    """As after SIGSTOP, or a decode worker that had no peer to greet for an hour."""
    reader = host.reader()
    host.announce(ONE)
    host.announce(TWO)
    assert reader.workers() == [ONE, TWO]
    host.passes(1.0)
    host.announce(TWO)  # its last words
    host.passes(3600.0)
    host.announce(ONE)
    host.passes(RENEW_S)
    assert reader.workers() == [ONE]


def test_what_has_not_changed_is_not_read_again(host: Host) -> None:
    reader = host.reader()
    host.announce()
    assert reader.workers() == [ONE]
    path = host.folder / "decode-0.worker"
    status = path.stat()
    path.write_text("rubbish")  # in place, and dated back: for the reader the same announcement
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    host.passes(LOOK_S)
    assert reader.workers() == [ONE]
    host.announce(replace(ONE, address="127.0.0.1:9"))
    assert [record.address for record in reader.workers()] == ["127.0.0.1:9"]


def test_a_worker_that_left_is_not_remembered(host: Host) -> None:
    reader = host.reader()
    for number in range(50):
        record = replace(ONE, worker_id=f"decode-{number}")
        host.announce(record)
        assert reader.workers() == [record]
        path = host.folder / f"{record.worker_id}.worker"
        status, gone = path.stat(), host.folder / "gone"
        path.rename(gone)
        assert reader.workers() == [] and reader.faults() == {}
        gone.write_text("rubbish")  # a reader with a memory of it would not read this
        os.utime(gone, ns=(status.st_atime_ns, status.st_mtime_ns))
        gone.rename(path)
        assert reader.workers() == [] and list(reader.faults()) == [record.worker_id]
        path.unlink()


def test_a_worker_that_leaves_by_a_wrong_clock_leaves(host: Host) -> None:
    host.announce(skew_s=-3600.0)
    host.reader().withdraw(ONE.worker_id, ONE.boot_id)
    assert list(host.folder.iterdir()) == []
