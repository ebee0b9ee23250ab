"""The radix index against a plain model of it: sets of identities per worker."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.proto import worker_pb2
from baton.router.fleet.radix_index import RadixIndex
from baton.runtime import metrics
from baton.runtime.identity import chain, cluster_key, root
from tests.support.router_books import widest_holders

KEY = cluster_key("test")
ROOT = root(KEY, "model", "float32")
WORKERS = ["a", "b", "c"]


def prefix(*tokens: int) -> list[bytes]:
    return chain(KEY, ROOT, tokens, 1)


def events(boot: bytes, sequence: int, **fields: Any) -> worker_pb2.BlockEvents:
    for name in ("stored", "removed"):
        fields[name] = b"".join(fields.get(name, []))
    return worker_pb2.BlockEvents(boot_id=boot, sequence=sequence, **fields)


def snapshot(boot: bytes, stored: list[bytes], sequence: int = 0) -> worker_pb2.BlockEvents:
    return events(boot, sequence, stored=stored, snapshot=True, snapshot_end=True)


def test_match_counts_leading_blocks_of_every_worker() -> None:
    index = RadixIndex()
    blocks = prefix(1, 2, 3, 4)
    index.apply("a", snapshot(b"x", blocks))
    index.apply("b", snapshot(b"x", blocks[:2]))
    index.apply("c", snapshot(b"x", blocks[1:]))  # without its first block: useless
    assert index.match(blocks) == {"a": 4, "b": 2}
    assert index.match(prefix(1, 2, 9)) == {"a": 2, "b": 2}
    assert index.match(prefix(9)) == {}
    assert index.match([]) == {}


def test_deltas_must_be_consecutive() -> None:
    index = RadixIndex()
    blocks = prefix(1, 2)
    assert not index.apply("a", events(b"x", 1, stored=blocks))  # no snapshot yet
    assert index.apply("a", snapshot(b"x", blocks[:1], sequence=4))
    assert index.apply("a", events(b"x", 5, stored=blocks[1:]))
    assert index.match(blocks) == {"a": 2}
    assert not index.apply("a", events(b"x", 7))
    assert index.match(blocks) == {}


def test_another_boot_voids_what_was_known() -> None:
    index = RadixIndex()
    blocks = prefix(1, 2)
    index.apply("a", snapshot(b"x", blocks))
    assert not index.apply("a", events(b"y", 1))
    assert index.match(blocks) == {}
    index.apply("a", snapshot(b"y", blocks[:1]))
    assert index.match(blocks) == {"a": 1}


def test_a_snapshot_may_come_in_parts_and_again() -> None:
    index = RadixIndex()
    blocks = prefix(1, 2, 3)
    index.apply("a", events(b"x", 3, stored=blocks[:2], snapshot=True))
    assert not index.apply("a", events(b"x", 4, stored=blocks[2:]))  # before its end
    index.apply("a", events(b"x", 3, stored=blocks[:2], snapshot=True))
    index.apply("a", events(b"x", 3, stored=blocks[2:], snapshot=True, snapshot_end=True))
    assert index.match(blocks) == {"a": 3}
    index.apply("a", snapshot(b"x", blocks[:1], sequence=9))  # replaces
    assert index.match(blocks) == {"a": 1}


def evictions() -> float:
    found = metrics.REGISTRY.get_sample_value("baton_index_evictions_total")
    assert found is not None
    return found


def test_capacity_is_bounded_and_evictions_are_counted() -> None:
    index, before = RadixIndex(capacity_blocks=3), evictions()
    blocks = prefix(*range(5))
    index.apply("a", snapshot(b"x", blocks))
    index.apply("b", snapshot(b"x", blocks))
    assert len(index) == 3 and evictions() - before == 4
    assert index.match(blocks) == {"a": 3, "b": 3}
    index.sweep()
    assert metrics.REGISTRY.get_sample_value("baton_index_blocks") == 3
    index.remove("a")
    index.remove("b")
    for _ in range(3):
        index.sweep()
    assert metrics.REGISTRY.get_sample_value("baton_index_blocks") == 0


def test_prefix_in_use_outlives_new_ones_beyond_the_capacity() -> None:
    index = RadixIndex(capacity_blocks=20)
    used, unused = prefix(1, 2, 3, 4), prefix(5, 6, 7, 8)
    index.apply("a", snapshot(b"x", used + unused))
    for sequence in range(1, 50):
        new = prefix(100 * sequence, 1, 2)
        index.apply("a", events(b"x", sequence, stored=new))
        assert index.match(used) == {"a": 4}
        assert index.match(new) == {"a": 3}
    assert index.match(unused) == {} and len(index) == 20


def test_prefix_loses_its_last_blocks_first() -> None:
    index = RadixIndex(capacity_blocks=10)
    blocks = prefix(*range(8))
    index.apply("a", snapshot(b"x", blocks))
    index.match(blocks)
    index.apply("a", events(b"x", 1, stored=prefix(99, 98, 97, 96, 95)))
    assert index.match(blocks) == {"a": 5}


def test_evicted_block_may_be_removed_and_stored_again() -> None:
    index = RadixIndex(capacity_blocks=2)
    old, new = prefix(1), prefix(2, 3)
    index.apply("a", snapshot(b"x", old))
    index.apply("a", events(b"x", 1, stored=new))
    assert index.match(old) == {}
    assert index.apply("a", events(b"x", 2, removed=old))
    assert index.apply("a", events(b"x", 3, stored=old))
    assert index.match(old) == {"a": 1} and len(index) == 2


def test_sweeping_frees_entries_and_bits() -> None:
    index = RadixIndex()
    for boot in range(50):  # more boots than would fit without reuse of bits
        index.apply("a", snapshot(bytes([boot]), prefix(*range(boot, boot + 40))))
        for _ in range(20):
            index.sweep(blocks=7)
    assert len(index) == 40
    assert widest_holders(index) <= 4


class AgainstSets(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex()
        self.sets: dict[str, set[bytes]] = {}
        self.sequences: dict[str, int] = {}
        self.blocks = prefix(*range(6))

    @rule(worker=st.sampled_from(WORKERS), chosen=st.sets(st.integers(0, 5)))
    def snapshot(self, worker: str, chosen: set[int]) -> None:
        stored = [self.blocks[index] for index in chosen]
        assert self.index.apply(worker, snapshot(b"x", stored))
        self.sets[worker], self.sequences[worker] = set(stored), 0

    @rule(worker=st.sampled_from(WORKERS), chosen=st.sets(st.integers(0, 5)), stored=st.booleans())
    def delta(self, worker: str, chosen: set[int], stored: bool) -> None:
        named = [self.blocks[index] for index in chosen]
        sequence = self.sequences.get(worker, 0) + 1
        fields = {"stored": named} if stored else {"removed": named}
        applied = self.index.apply(worker, events(b"x", sequence, **fields))
        assert applied == (worker in self.sets)
        if applied:
            self.sequences[worker] = sequence
            known = self.sets[worker]
            self.sets[worker] = known | set(named) if stored else known - set(named)

    @rule(worker=st.sampled_from(WORKERS))
    def remove(self, worker: str) -> None:
        self.index.remove(worker)
        self.sets.pop(worker, None)

    @rule(blocks=st.integers(1, 10))
    def sweep(self, blocks: int) -> None:
        self.index.sweep(blocks)

    @invariant()
    def same_answers(self) -> None:
        expected = {}
        for worker, known in self.sets.items():
            held = 0
            while held < len(self.blocks) and self.blocks[held] in known:
                held += 1
            if held:
                expected[worker] = held
        assert self.index.match(self.blocks) == expected


TestAgainstSets = AgainstSets.TestCase
TestAgainstSets.settings = settings(max_examples=60, deadline=None)


@given(junk=st.binary(max_size=50))
def test_a_ragged_message_is_harmless(junk: bytes) -> None:
    index = RadixIndex()
    index.apply("a", worker_pb2.BlockEvents(boot_id=b"x", snapshot=True, stored=junk))
    assert len(index) <= len(junk) // 16
