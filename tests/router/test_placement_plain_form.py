"""Placement gives what its plain form gives, which looks at all workers; itself at few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.planner.live_timing import PRIOR
from baton.router.fleet.placement import (
    MAX_CANDIDATES,
    FleetView,
    Placement,
    PlacementInput,
    open_groups,
)
from baton.router.fleet.placement import place as place_on
from baton.router.fleet.placement_costs import DecodeCosts
from baton.router.fleet.radix_index import Holders
from baton.router.fleet.request_need import Need, Source
from baton.router.fleet.roster import Roster
from baton.router.fleet.topology import distance
from baton.router.fleet.worker_costs import ANY_PAIR, PRIOR_COSTS, Pair, WorkerCosts
from baton.router.fleet.worker_order import CHUNK, WorkerOrder
from baton.router.fleet.worker_view import KvFormat, NumericsId, WorkerView
from baton.runtime.config import PlacementMode
from baton.runtime.errors import BatonError
from tests.support.placement_scene import NEED, SHAPE, Seen, place, view


def plainly_placed(need: Need, workers: Sequence[Seen], mode: PlacementMode) -> Placement | None:
    """The same by the rules, one worker after the other; None where there is none."""
    decoders = [e for e in workers if e.role == "decode" and not e.draining]
    if need.numerics is not None:
        decoders = [worker for worker in decoders if worker.numerics == need.numerics]
    decoders = [worker for worker in decoders if _holds(need, worker)]
    decoders = [e for e in _trusted(decoders) if e.waiting + e.placed_requests < 512]
    if not decoders:
        return None

    def decode_cost(worker: Seen) -> tuple[bool, int, str]:
        ranked, source = _prefills(need, workers, worker, None, mode)
        there = None if not ranked else _there(need, ranked[0], worker, source)
        here = _here(need, worker, _wait(need, ranked, source))
        prefill = here if there is None else there if mode == "disaggregated" else min(here, there)
        busy = worker.batch_us + worker.queue_us
        cost = busy + _lacking(need, worker) * worker.credit_us + prefill
        return worker.boot_id in need.avoid, cost, worker.worker_id

    decode = min(decoders, key=decode_cost)
    ranked, source = _prefills(need, workers, decode, decode, mode)
    if not ranked:
        return Placement(decode, (), local=True)
    here = decode.queue_us + _here(need, decode, _wait(need, ranked, source))
    if mode == "auto" and here < _there(need, ranked[0], decode, source, decode):
        return Placement(decode, (), local=True)
    if not _computing(need, ranked[0], source)[1]:
        source = None
    return Placement(decode, tuple(ranked[:MAX_CANDIDATES]), local=False, source=source)


def _hands_over(worker: Seen, decode: Seen) -> bool:
    """Whether both store the same KV, in blocks of which one size divides the other."""
    sizes = worker.block_size, decode.block_size
    return worker.numerics == decode.numerics and max(sizes) % min(sizes) == 0


def _prefills(
    need: Need, workers: Sequence[Seen], decode: Seen, reader: Seen | None, mode: str
) -> tuple[list[Seen], Source | None]:
    """The prefill workers, the quickest first, for any decode worker like `decode`, or for this
    `reader` and its slow pairs; and the source of the prompt."""
    found = [e for e in workers if e.role == "prefill" and not e.draining]
    found = [e for e in found if _hands_over(e, decode) and e.boot_id not in need.left]
    source = _source(decode, reader, workers)
    if mode == "local":
        return [], source

    def cost(worker: Seen) -> tuple[bool, int, str]:
        computing, reading = _computing(need, worker, source)
        total = worker.queue_us + computing + reading
        total += 0 if reader is None else _added(need, worker, computing, reader)
        total += 0 if reader is None else _farther(need, worker, computing, reader)
        return worker.boot_id in need.avoid, total, worker.worker_id

    return sorted(_trusted([w for w in found if _computes(need, w)]), key=cost), source


def _wait(need: Need, ranked: Sequence[Seen], source: Source | None) -> int:
    """The wait before the quickest prefill worker, which may be shorter than its queue."""
    if not ranked:
        return 0
    worker, (computing, _) = ranked[0], _computing(need, ranked[0], source)
    prompts = worker.running + worker.waiting + worker.placed_requests
    return min(worker.queue_us, prompts * computing + worker.costs.step_us)


def _here(need: Need, decode: Seen, wait: int) -> int:
    """The prefill on the decode worker after its queue, and what it delays each stream, or one that
    comes. Those that are to come do so evenly during the wait for a prefill worker."""
    lacks, costs = _uncached(need, decode), decode.costs
    span = need.tokens - lacks, need.tokens
    begun = max(decode.running, decode.active_requests)
    streams = begun + decode.waiting + decode.placed_requests
    lasts, delayed = decode.queue_us + costs.compute_us(*span), float(streams)
    if wait:
        delayed = decode.running + min(1.0, lasts / (2 * wait)) * (streams - decode.running)
    delay, blocks = costs.delay_us(*span), decode.total_blocks - decode.free_blocks
    longest = delay * min(lacks, costs.chunk_tokens) // lacks
    held = blocks * decode.block_size + decode.placed_tokens
    missed = costs.miss_us(delay, longest, streams, held)
    borne = costs.itl_s < math.inf and costs.miss_us(delay, longest, streams, held) == 0
    long = decode.queue_us + delay > 1_000_000
    ten_minutes = 600_000_000 if streams and long and not borne else 0
    delays = round(max(1.0, delayed) * delay + delayed * missed)
    return costs.compute_us(*span) + delays + ten_minutes


def _there(
    need: Need, worker: Seen, decode: Seen, source: Source | None, reader: Seen | None = None
) -> int:
    """The prefill on a prefill worker and the move from there."""
    computing, reading = _computing(need, worker, source)
    wait = _wait(need, [worker], source)
    added = 0 if reader is None else _added(need, worker, computing, reader)
    pair = ANY_PAIR if reader is None else _pair(worker, reader)
    move = worker.costs.move_us(_uncached(need, decode), computing, pair)
    return wait + computing + reading + added + worker.costs.handoff_us + move


def _added(need: Need, worker: Seen, computing: int, reader: Seen) -> int:
    """What a slow pair adds."""
    moves, slow = worker.costs.move_us, reader.degraded.get(worker.boot_id)
    if slow is None:
        return 0
    taken, usual = moves(need.tokens, computing, Pair(slow)), moves(need.tokens, computing)
    return taken - usual if 2 * usual < taken else taken


def _pair(worker: Seen, reader: Seen) -> Pair:
    if not reader.topology or worker.boot_id in reader.degraded:
        return ANY_PAIR
    return Pair(distance=distance(worker.topology, reader.topology))


def _farther(need: Need, worker: Seen, computing: int, reader: Seen) -> int:
    """What the move takes longer than from the reader's own host."""
    pair = _pair(worker, reader)
    if pair.distance is None:
        return 0
    near, moves = Pair(distance=0), worker.costs.move_us
    return moves(need.tokens, computing, pair) - moves(need.tokens, computing, near)


def _lacking(need: Need, worker: Seen) -> int:
    blocks = worker.free_blocks - worker.promised_blocks - worker.waiting_blocks
    wanted = need.tokens + need.output_tokens * need.sequences + worker.placed_tokens
    return max(0, wanted - blocks * worker.block_size)


def _source(decode: Seen, reader: Seen | None, workers: Sequence[Seen]) -> Source | None:
    """The worker that holds the most: the reader, or the first in the order of the bits."""
    able = [e for e in workers if e.kv_format == decode.kv_format and e.held_blocks]
    able = [e for e in able if e is reader or not (e.draining or e.passed_over)]
    best = max(able, key=lambda e: (e.held_blocks, e is reader), default=None)
    return None if best is None else Source(best, best.held_blocks)


def _computing(need: Need, worker: Seen, source: Source | None) -> tuple[int, int]:
    """The prefill there: the time to compute, and to READ what the source holds."""
    lacks, costs = _uncached(need, worker), worker.costs
    whole = costs.compute_us(need.tokens - lacks, need.tokens)
    if source is None:
        return whole, 0
    peer = cast(Seen, source.worker)
    left = _uncached(need, peer)
    if lacks <= left:
        return whole, 0
    slow = worker.degraded.get(peer.boot_id, 0.0)
    pair = Pair(slow, distance(worker.topology, peer.topology))
    reading = costs.handoff_us + costs.read_us(lacks - left, pair)
    computing = costs.compute_us(need.tokens - left, need.tokens)
    return (computing, reading) if computing + reading < whole else (whole, 0)


def _trusted(workers: list[Seen]) -> list[Seen]:
    return [worker for worker in workers if not worker.passed_over] or workers


def _uncached(need: Need, worker: Seen) -> int:
    return need.tokens - min(worker.held_blocks * worker.block_size, need.tokens - 1)


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
    alive = [worker for worker in workers if not worker.draining]
    if not any(worker.role == "decode" and worker.waiting < 512 for worker in alive):
        with pytest.raises(BatonError):
            place(NEED, workers, mode)
        return
    found = place(NEED, workers, mode)
    assert found == place(NEED, workers[::-1], mode)
    assert found.decode in alive and found.decode.role == "decode"
    assert all(worker in alive and worker.role == "prefill" for worker in found.candidates)
    assert found.local == (not found.candidates)
    if mode == "disaggregated":
        assert found.local == (not any(worker.role == "prefill" for worker in alive))


NO_BOOTS: dict[bytes, float] = {}
EVEN_PREFILLS = {f"prefill-{number:02}".encode(): 0.01 + number for number in range(0, 100, 2)}
SLOWER = WorkerCosts(PRIOR, pace=2.0)
STRICT = WorkerCosts(PRIOR, itl_s=0.007)
PATIENT = WorkerCosts(PRIOR, itl_s=0.05)
APART = WorkerCosts(PRIOR, byte_s=(1e-11, 5e-11, 2e-10, 2e-8, 1e-6))
PLACES = ["", "a/r1/h1", "a/r1/h1", "a/r1/h2", "a/r2/h3", "b/r3/h4"]


def views(blocks: int, most: int) -> st.SearchStrategy[list[Seen]]:
    """Workers of two shapes and three sizes, many of them alike."""
    shapes = st.sampled_from(
        [SHAPE, SHAPE, SHAPE, KvFormat("g", "float32", 16), KvFormat("f", "float32", 4)]
    )
    return st.lists(
        st.builds(
            lambda role, number, **fields: view(f"{role}-{number:02}", **fields),
            st.sampled_from(["prefill", "decode"]),
            st.integers(0, 99),
            kv_format=shapes,
            held_blocks=st.sampled_from([0, 0, 0, 3, 20, 40, 60]),
            running=st.integers(0, 4),
            active_requests=st.integers(0, 6),
            waiting=st.sampled_from([0, 0, 1, 511, 512]),
            free_blocks=st.sampled_from([0, 5, 50, 70, 1000]),
            promised_blocks=st.integers(0, 60),
            total_blocks=st.sampled_from([blocks, blocks, 60]),
            max_context=st.sampled_from([1 << 24, 1 << 24, 1050]),
            queued_tokens=st.sampled_from([0, 0, 100, 300, 1000]),
            placed_tokens=st.sampled_from([0, 0, 100, 1000]),
            placed_requests=st.integers(0, 1),
            placed_us=st.sampled_from([0, 0, 5_000, 70_000]),
            waiting_blocks=st.sampled_from([0, 0, 30]),
            costs=st.sampled_from([PRIOR_COSTS, SLOWER, STRICT, PATIENT, APART, APART]),
            topology=st.sampled_from(PLACES),
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
    numerics: NumericsId | None,
    sequences: int,
) -> None:
    need = replace(NEED, avoid=avoid, left=left, numerics=numerics, sequences=sequences)
    plain = plainly_placed(need, workers, mode)
    with pytest.raises(BatonError) if plain is None else nullcontext():
        assert place(need, workers, mode) == plain


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
    full = [
        view(f"decode-{n:02}", free_blocks=0, promised_blocks=3000, running=n)
        for n in range(others + 1)
    ]
    busy = [view(f"decode-{50 + n}", free_blocks=130 + n, running=90) for n in range(others + 1)]
    best = view("decode-99", free_blocks=75, running=20)
    workers = [*full, *busy, best]
    assert place(NEED, workers, "local").decode is best
    assert plainly_placed(NEED, workers, "local") == Placement(best, (), local=True)


def test_few_of_many_workers_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half hold the beginning of the prompt, and have that much more to do."""
    workers = [
        view(
            f"{role}-{number:03}",
            held_blocks=30 * (number % 2),
            queued_tokens=500 * (number % 2) * (role == "prefill"),
        )
        for role in ("decode", "prefill")
        for number in range(500)
    ]
    looked: list[str] = []
    price_us = DecodeCosts.price_us

    def counted(costs: DecodeCosts, worker: WorkerView) -> int:
        looked.append(worker.worker_id)
        return price_us(costs, worker)

    roster = Roster()
    for number, worker in enumerate(workers):
        roster.put(replace(worker, bit=1 << number))
    bits = sum(1 << number for number, worker in enumerate(workers) if worker.held_blocks)
    fleet, holders = FleetView(roster), Holders([(bits, 30)])
    kinds = open_groups(NEED, fleet)
    monkeypatch.setattr(DecodeCosts, "price_us", counted)
    found = place_on(PlacementInput(NEED, fleet, kinds, lambda shape: holders, "auto"))
    assert found.decode.worker_id == "decode-001" and 1 <= len(looked) < 10
    assert len(found.candidates) == MAX_CANDIDATES
