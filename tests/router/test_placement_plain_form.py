"""Placement gives what its plain form gives, which looks at all workers; itself at few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.fleet.placement import (
    LOCAL_COST,
    MAX_CANDIDATES,
    MOVE_COST,
    READ_COST,
    FleetView,
    Need,
    Placement,
    Source,
    open_groups,
)
from baton.router.fleet.placement import place as place_on
from baton.router.fleet.radix_index import Holders
from baton.router.fleet.roster import Roster
from baton.router.fleet.worker_order import CHUNK, WorkerOrder
from baton.router.fleet.worker_view import ROOM_COST, SEQUENCE_COST, TOKEN_COST, WorkerView
from baton.runtime.config import PlacementMode
from baton.runtime.errors import BatonError
from tests.support.placement_scene import NEED, SHAPE, Seen, place, placed, view


def plainly_placed(
    need: Need, workers: Sequence[Seen], mode: PlacementMode, local_tokens: int
) -> Placement | None:
    """The same by the rules, one worker after the other; None where there is none."""
    decoders = [e for e in workers if e.role == "decode" and not e.draining]
    if need.numerics is not None:
        decoders = [worker for worker in decoders if worker.numerics == need.numerics]
    decoders = [worker for worker in decoders if _holds(need, worker)]
    decoders = [e for e in _trusted(decoders) if e.waiting + e.placed_requests < 512]
    if not decoders:
        return None
    decode = min(
        decoders, key=lambda e: (e.boot_id in need.avoid, _decode_cost(need, e), e.worker_id)
    )
    prefills = [e for e in workers if e.role == "prefill" and not e.draining]
    prefills = [e for e in prefills if _hands_over(e, decode) and e.boot_id not in need.left]
    source = _source(decode, workers)
    ranked = sorted(
        _trusted([worker for worker in prefills if _computes(need, worker)]),
        key=lambda e: (
            e.boot_id in need.avoid,
            e.boot_id in decode.degraded,
            _computing(need, e, source) + (e.queued_tokens + e.placed_tokens) * TOKEN_COST,
            e.worker_id,
        ),
    )
    here = _uncached(need, decode)
    if mode == "local" or not ranked:
        return Placement(decode, (), local=True)
    there = _computing(need, ranked[0], source) + MOVE_COST * here
    if mode == "auto" and (here < local_tokens or LOCAL_COST * here < there):
        return Placement(decode, (), local=True)
    if _computing(need, ranked[0], source) == TOKEN_COST * _uncached(need, ranked[0]):
        source = None
    return Placement(decode, tuple(ranked[:MAX_CANDIDATES]), local=False, source=source)


def _hands_over(worker: Seen, decode: Seen) -> bool:
    """Whether both store the same KV, in blocks of which one size divides the other."""
    sizes = worker.block_size, decode.block_size
    return worker.numerics == decode.numerics and max(sizes) % min(sizes) == 0


def _source(decode: Seen, workers: Sequence[Seen]) -> Source | None:
    """The worker that holds the most: the decode worker, or the first in the order of the bits."""
    able = [e for e in workers if e.kv_format == decode.kv_format and e.held_blocks]
    able = [e for e in able if e is decode or not (e.draining or e.passed_over)]
    best = max(able, key=lambda e: (e.held_blocks, e is decode), default=None)
    return None if best is None else Source(best, best.held_blocks)


def _computing(need: Need, worker: Seen, source: Source | None) -> int:
    """The cost of a prefill there: all that it lacks computed, or the source's blocks READ."""
    lacks = _uncached(need, worker)
    if source is None or source.worker.boot_id in worker.degraded:
        return TOKEN_COST * lacks
    read = max(0, lacks - _uncached(need, cast(Seen, source.worker)))
    computed = TOKEN_COST * (lacks - read)
    return min(TOKEN_COST * lacks, computed + READ_COST + MOVE_COST * read)


def _trusted(workers: list[Seen]) -> list[Seen]:
    return [worker for worker in workers if not worker.passed_over] or workers


def _uncached(need: Need, worker: Seen) -> int:
    return need.tokens - min(worker.held_blocks * worker.block_size, need.tokens - 1)


def _decode_cost(need: Need, worker: Seen) -> int:
    sequences = worker.running + worker.waiting + worker.placed_requests
    room = (worker.free_blocks - worker.promised_blocks) * worker.block_size
    wanted = need.tokens + need.output_tokens * need.sequences + worker.placed_tokens
    return (
        _uncached(need, worker) * MOVE_COST
        + sequences * SEQUENCE_COST
        + max(0, wanted - room) * ROOM_COST
    )


def _holds(need: Need, worker: Seen) -> bool:
    size = worker.block_size
    grown = -(-(need.tokens + need.output_tokens) // size)
    credit = grown + (need.sequences - 1) * (grown - need.tokens // size)
    wanted = max(credit, -(-need.most_tokens // size))
    return wanted <= worker.total_blocks and need.most_tokens <= worker.max_context


def _computes(need: Need, worker: Seen) -> bool:
    blocks = -(-need.tokens // worker.block_size)
    return blocks <= worker.total_blocks and need.tokens <= worker.max_context


VIEWS = st.lists(
    st.builds(
        lambda role, number, **fields: view(f"{role}-{number}", **fields),
        st.sampled_from(["prefill", "decode"]),
        st.integers(0, 5),
        held_blocks=st.integers(0, 80),
        running=st.integers(0, 100),
        waiting=st.integers(0, 600),
        free_blocks=st.integers(0, 1000),
        queued_tokens=st.integers(0, 10_000),
        draining=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda worker: worker.worker_id,
)


@given(workers=VIEWS, mode=st.sampled_from(["auto", "disaggregated", "local"]))
def test_rules_that_always_hold(workers: list[Seen], mode: PlacementMode) -> None:
    found = place(NEED, workers, mode, 64)
    alive = [worker for worker in workers if not worker.draining]
    assert found == place(NEED, workers[::-1], mode, 64) or isinstance(found, BatonError)
    if isinstance(found, BatonError):
        assert not any(worker.role == "decode" and worker.waiting < 512 for worker in alive)
        return
    assert found.decode in alive and found.decode.role == "decode"
    assert all(worker in alive and worker.role == "prefill" for worker in found.candidates)
    assert found.local == (not found.candidates)
    if mode == "disaggregated":
        assert found.local == (not any(worker.role == "prefill" for worker in alive))


NO_BOOTS: frozenset[bytes] = frozenset()
EVEN_PREFILLS = frozenset(f"prefill-{number:02}".encode() for number in range(0, 100, 2))


def views(blocks: int, most: int) -> Any:
    """Workers of two shapes and three sizes, many of them alike."""
    shapes = st.sampled_from([SHAPE, SHAPE, SHAPE, ("g", "float32", 16), ("f", "float32", 4)])
    return st.lists(
        st.builds(
            lambda role, number, **fields: view(f"{role}-{number:02}", **fields),
            st.sampled_from(["prefill", "decode"]),
            st.integers(0, 99),
            kv_format=shapes,
            held_blocks=st.sampled_from([0, 0, 0, 3, 20, 40, 60]),
            running=st.integers(0, 4),
            waiting=st.sampled_from([0, 0, 1, 511, 512]),
            free_blocks=st.sampled_from([0, 5, 50, 70, 1000]),
            promised_blocks=st.integers(0, 60),
            total_blocks=st.sampled_from([blocks, blocks, 60]),
            max_context=st.sampled_from([1 << 24, 1 << 24, 1050]),
            queued_tokens=st.sampled_from([0, 0, 100, 300, 1000]),
            placed_tokens=st.sampled_from([0, 0, 100, 1000]),
            placed_requests=st.integers(0, 1),
            draining=st.sampled_from([False, False, False, True]),
            passed_over=st.sampled_from([False, False, False, True]),
            degraded=st.sampled_from([NO_BOOTS, NO_BOOTS, EVEN_PREFILLS]),
        ),
        max_size=most,
        unique_by=lambda worker: worker.worker_id,
    )


ROLES = st.sampled_from(["prefill", "decode"])


BOOTS = st.frozensets(
    st.builds(lambda role, n: f"{role}-{n:02}".encode(), ROLES, st.integers(0, 99)), max_size=12
)


@settings(max_examples=300, deadline=None)
@given(
    workers=views(1000, 40),
    mode=st.sampled_from(["auto", "disaggregated", "local"]),
    avoid=BOOTS,
    left=BOOTS,
    numerics=st.sampled_from([None, None, ("f", "float32"), ("g", "float32")]),
    sequences=st.integers(1, 3),
)
def test_placement_is_that_of_its_plain_form(
    workers: list[Seen],
    mode: PlacementMode,
    avoid: frozenset[bytes],
    left: frozenset[bytes],
    numerics: Any,
    sequences: int,
) -> None:
    need = replace(NEED, avoid=avoid, left=left, numerics=numerics, sequences=sequences)
    found = place(need, workers, mode, 64)
    plain = plainly_placed(need, workers, mode, 64)
    assert (None if isinstance(found, BatonError) else found) == plain


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), max_size=3 * CHUNK),
    st.integers(0),
)
def test_order_is_that_of_a_sorted_list(given_: list[tuple[int, int]], workers: int) -> None:
    order, plain = WorkerOrder(), {}
    for cost, number in given_:  # named again: removed
        bit = 1 << number if number % 3 else 0
        entry = plain.pop(number, None)
        if entry is not None:
            order.remove(entry)
        else:
            plain[number] = (cost, f"{number:03}", bit)
            order.insert(plain[number])
        listed = sorted(plain.values())
        assert [*order.among(0, True)] == listed
    for others in (False, True):
        found = [entry for entry in sorted(plain.values()) if (entry[2] & workers == 0) == others]
        assert [*order.among(workers, others)] == found


@pytest.mark.parametrize("others", [0, 1, 5])
def test_cheapest_worker_may_be_first_in_no_order(others: int) -> None:
    """Some are nearly idle and full, some have much room and many sequences."""
    full = [view(f"decode-{n:02}", free_blocks=0, running=n) for n in range(others + 1)]
    busy = [view(f"decode-{50 + n}", free_blocks=130 + n, running=90) for n in range(others + 1)]
    best = view("decode-99", free_blocks=75, running=20)
    workers = [*full, *busy, best]
    assert placed(place(NEED, workers, "local", 64)).decode is best
    assert plainly_placed(NEED, workers, "local", 64) == Placement(best, (), local=True)


def test_few_of_many_workers_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half hold the beginning of the prompt, and have that much more to do."""
    workers = [
        view(f"{role}-{number:03}", held_blocks=30 * (number % 2), queued_tokens=500 * (number % 2))
        for role in ("decode", "prefill")
        for number in range(500)
    ]
    looked: list[str] = []
    cost = WorkerView.batch_cost.fget  # type: ignore[attr-defined]

    def counted(worker: WorkerView) -> int:
        looked.append(worker.worker_id)
        return cost(worker)  # type: ignore[no-any-return]

    roster = Roster()
    for number, worker in enumerate(workers):
        roster.put(replace(worker, bit=1 << number))
    bits = sum(1 << number for number, worker in enumerate(workers) if worker.held_blocks)
    fleet, holders = FleetView(roster), Holders([(bits, 30)])
    kinds = open_groups(NEED, fleet)
    assert not isinstance(kinds, BatonError)
    monkeypatch.setattr(WorkerView, "batch_cost", property(counted))
    found = place_on(NEED, fleet, kinds, lambda shape: holders, "auto", 64)
    assert found.decode.worker_id == "decode-001" and 1 <= len(looked) < 10
    assert len(found.candidates) == MAX_CANDIDATES
