"""Placement: who is chosen, who never is, and what is said when no one can be; and the same by its
plain form, which looks at all workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.fleet.placement import (
    LOCAL_COST,
    MAX_CANDIDATES,
    MOVE_COST,
    TOKEN_COST,
    FleetView,
    Need,
    Placement,
    open_groups,
)
from baton.router.fleet.placement import place as place_on
from baton.router.fleet.radix_index import Holders
from baton.router.fleet.roster import Roster
from baton.router.fleet.worker_order import CHUNK, WorkerOrder
from baton.router.fleet.worker_view import ROOM_COST, SEQUENCE_COST, WorkerView
from baton.runtime.errors import BatonError, InvalidRequest, Overloaded, Unavailable

SHAPE = ("f", "float32", 16)


@dataclass(frozen=True, slots=True)
class Seen(WorkerView):
    """A worker with what placement knows of it beside its view."""

    held_blocks: int = 0
    passed_over: bool = False


def view(name: str, **fields: Any) -> Seen:
    made = Seen(name, name.encode(), name.split("-")[0], "h:1", SHAPE)
    return replace(made, **{"free_blocks": 1000, "total_blocks": 1000, **fields})


def place(
    need: Need, workers: Sequence[Seen], mode: Any, local_tokens: int
) -> Placement | BatonError:
    """The placement, with the workers as the test has them."""
    roster = Roster()
    groups: dict[int, int] = {}
    for number, worker in enumerate(workers):
        bit = 1 << number if worker.held_blocks or number % 2 else 0
        roster.put(replace(worker, waiting=worker.waiting + 1, bit=bit))  # then as it is
        roster.put(replace(worker, bit=bit))
        if worker.held_blocks:
            groups[worker.held_blocks] = groups.get(worker.held_blocks, 0) | bit
    fleet = FleetView(roster, frozenset(e.boot_id for e in workers if e.passed_over))
    kinds = open_groups(need, fleet)
    if isinstance(kinds, BatonError):
        return kinds
    holders = Holders([(groups[blocks], blocks) for blocks in sorted(groups, reverse=True)])
    found = place_on(need, fleet, kinds, lambda shape: holders, mode, local_tokens)
    own = {worker.worker_id: worker for worker in workers}
    candidates = tuple(own[worker.worker_id] for worker in found.candidates)
    return Placement(own[found.decode.worker_id], candidates, found.local)


def plainly_placed(
    need: Need, workers: Sequence[Seen], mode: Any, local_tokens: int
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
    prefills = [
        e for e in prefills if e.kv_format == decode.kv_format and e.boot_id not in need.left
    ]
    ranked = sorted(
        _trusted([worker for worker in prefills if _computes(need, worker)]),
        key=lambda e: (
            e.boot_id in need.avoid,
            e.boot_id in decode.degraded,
            _uncached(need, e) + e.queued_tokens + e.placed_tokens,
            e.worker_id,
        ),
    )
    here = _uncached(need, decode)
    if mode == "local" or not ranked:
        return Placement(decode, (), local=True)
    there = TOKEN_COST * _uncached(need, ranked[0]) + MOVE_COST * here
    if mode == "auto" and (here < local_tokens or LOCAL_COST * here < there):
        return Placement(decode, (), local=True)
    return Placement(decode, tuple(ranked[:MAX_CANDIDATES]), local=False)


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


def placed(found: Placement | BatonError) -> Placement:
    assert isinstance(found, Placement), found
    return found


NEED = Need(tokens=1000, output_tokens=100, most_tokens=1100)
D0, D1, P0, P1 = view("decode-0"), view("decode-1"), view("prefill-0"), view("prefill-1")


def test_a_degraded_pair_comes_last_and_is_still_used() -> None:
    """The mark is of the pair: another decode worker's order is as before."""
    marked = replace(D0, degraded=frozenset({b"prefill-0"}))
    holder = replace(P0, held_blocks=60)
    found = placed(place(NEED, [marked, holder, P1], "auto", 64))
    assert [worker.worker_id for worker in found.candidates] == ["prefill-1", "prefill-0"]
    busy = replace(marked, running=9)
    found = placed(place(NEED, [busy, D1, holder, P1], "auto", 64))
    assert found.decode.worker_id == "decode-1"
    assert [worker.worker_id for worker in found.candidates] == ["prefill-0", "prefill-1"]
    found = placed(place(NEED, [marked, P0], "disaggregated", 64))
    assert found.candidates == (P0,) and not found.local


def test_a_degraded_pair_comes_before_one_that_failed() -> None:
    marked = replace(D0, degraded=frozenset({b"prefill-0"}))
    need = replace(NEED, avoid=frozenset({b"prefill-1"}))
    found = placed(place(need, [marked, P0, P1], "auto", 64))
    assert [worker.worker_id for worker in found.candidates] == ["prefill-0", "prefill-1"]


def test_the_holder_of_the_prefix_is_preferred() -> None:
    found = placed(place(NEED, [D0, replace(D1, held_blocks=40), P0], "auto", 64))
    assert found.decode.worker_id == "decode-1" and not found.local
    ranked = placed(place(NEED, [D0, P0, replace(P1, held_blocks=20)], "auto", 64)).candidates
    assert [worker.worker_id for worker in ranked] == ["prefill-1", "prefill-0"]


def test_an_answer_goes_on_only_where_its_numbers_are_computed() -> None:
    begun = replace(NEED, numerics=("g", "float32"))
    near, own = replace(D0, held_blocks=50), replace(D1, kv_format=("g", "float32", 32))
    assert placed(place(NEED, [near, own], "auto", 64)).decode is near
    assert placed(place(begun, [near, own], "auto", 64)).decode is own  # whatever its blocks' size
    found = place(begun, [near, replace(own, draining=True)], "auto", 64)
    assert isinstance(found, Unavailable) and "fingerprint g, KV in float32" in str(found)
    other_kind = replace(own, kv_format=("g", "bfloat16", 16))
    assert isinstance(place(begun, [near, other_kind], "auto", 64), Unavailable)


def test_who_was_not_there_any_more_is_no_candidate_however_idle() -> None:
    need = replace(NEED, left=frozenset({P0.boot_id}))
    assert placed(place(need, [D0, P0, P1], "disaggregated", 64)).candidates == (P1,)
    alone = placed(place(need, [D0, P0], "disaggregated", 64))
    assert alone.local and alone.candidates == ()


def test_load_outweighs_a_small_prefix() -> None:
    busy = replace(D1, held_blocks=3, running=40)
    assert placed(place(NEED, [D0, busy], "auto", 64)).decode is D0
    queued = replace(P0, held_blocks=3, queued_tokens=5000)
    found = placed(place(NEED, [D0, queued, P1], "auto", 64))
    assert found.candidates[0] is P1


def test_what_was_just_placed_counts() -> None:
    just = replace(D0, placed_requests=3, placed_tokens=3000)
    assert placed(place(NEED, [just, D1], "auto", 64)).decode is D1


def test_room_matters() -> None:
    full = replace(D0, free_blocks=200, promised_blocks=190, held_blocks=10)
    assert placed(place(NEED, [full, D1], "auto", 64)).decode is D1


@pytest.mark.parametrize(
    ("mode", "held", "prefill", "local"),
    [
        ("auto", 0, True, False),
        ("auto", 62, True, True),  # 8 tokens are missing
        ("auto", 0, False, True),
        ("local", 0, True, True),
        ("disaggregated", 62, True, False),
        ("disaggregated", 0, False, True),
    ],
)
def test_modes(mode: Any, held: int, prefill: bool, local: bool) -> None:
    workers = [replace(D0, held_blocks=held), *([P0] if prefill else [])]
    found = placed(place(NEED, workers, mode, 64))
    assert found.local == local and bool(found.candidates) != local


LONG = Need(tokens=8200, output_tokens=100, most_tokens=8300)


@pytest.mark.parametrize(
    ("here", "there", "local"),
    [  # blocks of 16 that the decode worker holds, and the prefill worker
        (508, 0, True),  # 72 tokens here, or all 8,200 there
        (508, 512, False),  # 72 here, or 8 there
        (508, 494, True),  # 72 * 4 here, or 296 and the transfer there
        (508, 495, False),  # ... or 280
        (0, 0, False),
        (256, 0, False),  # half of them here: the batch would wait too long
        (400, 0, True),  # less than a quarter
        (400, 400, False),
        (509, 512, True),  # 56 tokens: below the limit, whatever it costs elsewhere
    ],
)
def test_prompt_is_computed_where_that_costs_less(here: int, there: int, local: bool) -> None:
    decode, prefill = replace(D0, held_blocks=here), replace(P0, held_blocks=there)
    assert placed(place(LONG, [decode, prefill], "auto", 64)).local == local
    assert not placed(place(LONG, [decode, prefill], "disaggregated", 64)).local


def test_costs_are_compared_with_the_best_candidate() -> None:
    decode, holder = replace(D0, held_blocks=508), replace(P1, held_blocks=512)
    found = placed(place(LONG, [decode, P0, holder], "auto", 64))
    assert found.candidates == (holder, P0)


def test_queue_of_prefill_workers_keeps_no_prompt_local() -> None:
    found = placed(place(LONG, [D0, replace(P0, queued_tokens=1 << 20)], "auto", 64))
    assert not found.local


def test_a_prefill_worker_of_another_shape_is_no_candidate() -> None:
    other = replace(P0, kv_format=("g", "float32", 16))
    assert placed(place(NEED, [D0, other], "disaggregated", 64)).local


def test_failed_workers_are_a_last_resort() -> None:
    need = replace(NEED, avoid=frozenset({D0.boot_id, P0.boot_id}))
    found = placed(place(need, [D0, D1, P0, P1], "auto", 64))
    assert found.decode is D1
    assert [worker.worker_id for worker in found.candidates] == ["prefill-1", "prefill-0"]
    assert placed(place(need, [D0], "auto", 64)).decode is D0


def test_who_is_passed_over_is_asked_only_where_nobody_else_is() -> None:
    bad, bad_prefill = replace(D0, passed_over=True), replace(P0, passed_over=True)
    busy = replace(D1, running=500)
    found = placed(place(NEED, [bad, busy, bad_prefill, P1], "auto", 64))
    assert found.decode is busy and found.candidates == (P1,)
    alone = placed(place(NEED, [bad, bad_prefill], "auto", 64))
    assert alone.decode is bad and alone.candidates == (bad_prefill,)
    full = replace(D1, waiting=512)  # no reason to ask who fails
    assert isinstance(place(NEED, [bad, full], "auto", 64), Overloaded)


def test_errors_are_values() -> None:
    assert isinstance(place(NEED, [P0], "auto", 64), Unavailable)
    assert isinstance(place(NEED, [replace(D0, draining=True)], "auto", 64), Unavailable)
    assert isinstance(place(NEED, [replace(D0, waiting=512)], "auto", 64), Overloaded)
    small = replace(D0, total_blocks=10, free_blocks=10)
    refused = place(NEED, [small], "auto", 64)
    assert isinstance(refused, InvalidRequest) and "160 tokens" in str(refused)
    assert placed(place(NEED, [small, D1], "auto", 64)).decode is D1


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
def test_rules_that_always_hold(workers: list[Seen], mode: Any) -> None:
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
    mode: Any,
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
