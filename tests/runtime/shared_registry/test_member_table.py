"""The members that a reader knows: by counters and its own clock alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.runtime.registry import WorkerRecord
from baton.runtime.shared_registry import member_table
from baton.runtime.shared_registry.member_table import MemberTable
from baton.runtime.shared_registry.signed_entry import SignedEntry

ONE = WorkerRecord("decode-0", "a" * 32, "decode", "10.0.0.1:1", "10.0.0.1:2", "m", 10)


def test_only_a_higher_counter_is_a_sign_of_life() -> None:
    table = MemberTable(10.0)
    assert table.learn(SignedEntry(ONE, 1, 5), 0.0)
    assert not table.learn(SignedEntry(ONE, 1, 5), 9.0)
    assert not table.learn(SignedEntry(ONE, 1, 4), 9.0)
    table.expire(10.0)
    assert table.records() == [ONE]
    table.expire(10.1)
    assert table.records() == []


def test_a_copy_of_an_old_entry_lists_no_forgotten_member_again() -> None:
    table = MemberTable(10.0)
    table.learn(SignedEntry(ONE, 1, 5), 0.0)
    table.expire(10.1)
    assert not table.learn(SignedEntry(ONE, 1, 5), 11.0)
    assert not table.learn(SignedEntry(ONE, 1, 4), 11.0)
    assert table.records() == []
    assert table.learn(SignedEntry(ONE, 1, 6), 12.0)  # it was cut off, and lives
    assert table.records() == [ONE]


def test_counters_of_the_oldest_forgotten_boots_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_table, "MAX_FORGOTTEN", 1)
    table = MemberTable(10.0)
    newer = replace(ONE, boot_id="b" * 32)
    for record, now_s in ((ONE, 0.0), (newer, 20.0)):
        table.learn(SignedEntry(record, 1, 5), now_s)
        table.expire(now_s + 10.1)
    assert table.learn(SignedEntry(ONE, 1, 5), 40.0)
    assert not table.learn(SignedEntry(newer, 1, 5), 40.0)


def test_a_withdrawn_boot_does_not_come_back() -> None:
    table = MemberTable(10.0)
    table.learn(SignedEntry(ONE, 1, 5), 0.0)
    table.learn(SignedEntry(ONE, 1, 6, withdrawn=True), 1.0)
    assert not table.learn(SignedEntry(ONE, 1, 7), 2.0)
    assert table.records() == []


def test_an_outage_is_no_silence_of_the_members() -> None:
    table = MemberTable(10.0)
    table.learn(SignedEntry(ONE, 1, 5), 0.0)
    table.resume(100.0)
    table.expire(110.0)
    assert table.records() == [ONE]


def test_boots_of_a_worker_are_in_the_order_of_their_start() -> None:
    table = MemberTable(10.0)
    newer = replace(ONE, boot_id="b" * 32)
    table.learn(SignedEntry(newer, 2, 3), 0.0)
    table.learn(SignedEntry(ONE, 1, 9), 1.0)
    assert table.records() == [ONE, newer]


def test_a_full_table_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_table, "MAX_MEMBERS", 1)
    table = MemberTable(10.0)
    table.learn(SignedEntry(ONE, 1, 5), 0.0)
    assert not table.learn(SignedEntry(replace(ONE, boot_id="b" * 32), 2, 1), 0.0)
    assert table.learn(SignedEntry(ONE, 1, 6), 1.0)
    assert table.records() == [ONE]
