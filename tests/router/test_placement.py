"""Placement: which worker is chosen, which never is, and what is said when no one can be; and the
same by its plain form, which looks at all workers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from baton.planner.live_timing import PRIOR
from baton.router.fleet.request_need import Need, Source
from baton.router.fleet.worker_costs import WorkerCosts
from baton.router.fleet.worker_view import KvFormat
from baton.runtime.config import PlacementMode
from baton.runtime.errors import Overloaded, Unavailable
from tests.support.placement_scene import NEED, SHAPE, Seen, changed, place, view

SLOW = 0.02  # GB/s
D0, D1, P0, P1 = view("decode-0"), view("decode-1"), view("prefill-0"), view("prefill-1")


def test_a_degraded_pair_costs_what_its_reads_take() -> None:
    """The mark is of the pair: another decode worker's order is as before."""
    marked = replace(D0, degraded={b"prefill-0": SLOW})
    found = place(NEED, [marked, P0, P1], "disaggregated")
    assert [worker.worker_id for worker in found.candidates] == ["prefill-1", "prefill-0"]
    holder = replace(P0, held_blocks=60)
    found = place(NEED, [replace(marked, running=99), D1, holder, P1], "auto")
    assert found.decode.worker_id == "decode-1"
    assert [worker.worker_id for worker in found.candidates] == ["prefill-0", "prefill-1"]
    found = place(NEED, [marked, P0], "disaggregated")
    assert found.candidates == (P0,) and not found.local
    assert place(NEED, [marked, P0], "auto").local  # here it takes less


@pytest.mark.parametrize(("gb_per_s", "first"), [(SLOW, "prefill-1"), (5 * SLOW, "prefill-0")])
def test_an_idle_degraded_pair_is_preferred_to_a_long_queue(gb_per_s: float, first: str) -> None:
    """READs of 6.6 or 1.3 s, or a queue of 2 s."""
    marked = replace(D0, degraded={b"prefill-0": gb_per_s})
    queued = replace(P1, queued_tokens=40_000, running=8)
    found = place(NEED, [marked, P0, queued], "disaggregated")
    assert found.candidates[0].worker_id == first


def test_a_degraded_pair_comes_before_one_that_failed() -> None:
    marked = replace(D0, degraded={b"prefill-0": SLOW})
    need = replace(NEED, avoid=frozenset({b"prefill-1"}))
    found = place(need, [marked, P0, P1], "disaggregated")
    assert [worker.worker_id for worker in found.candidates] == ["prefill-0", "prefill-1"]


def test_the_holder_of_the_prefix_is_preferred() -> None:
    found = place(NEED, [D0, replace(D1, held_blocks=40), P0], "auto")
    assert found.decode.worker_id == "decode-1" and not found.local
    ranked = place(NEED, [D0, P0, replace(P1, held_blocks=20)], "auto").candidates
    assert [worker.worker_id for worker in ranked] == ["prefill-1", "prefill-0"]


def test_an_answer_goes_on_only_where_its_numbers_are_computed() -> None:
    begun = replace(NEED, numerics=("g", "float32"))
    near, own = replace(D0, held_blocks=50), replace(D1, kv_format=KvFormat("g", "float32", 32))
    assert place(NEED, [near, own], "auto").decode is near
    assert place(begun, [near, own], "auto").decode is own  # whatever its blocks' size
    with pytest.raises(Unavailable, match="fingerprint g, KV in float32"):
        place(begun, [near, replace(own, draining=True)], "auto")
    other_kind = replace(own, kv_format=KvFormat("g", "bfloat16", 16))
    with pytest.raises(Unavailable):
        place(begun, [near, other_kind], "auto")


def test_a_departed_worker_is_no_candidate_however_idle() -> None:
    need = replace(NEED, left=frozenset({P0.boot_id}))
    assert place(need, [D0, P0, P1], "disaggregated").candidates == (P1,)
    alone = place(need, [D0, P0], "disaggregated")
    assert alone.local and alone.candidates == ()


def test_load_outweighs_a_small_prefix() -> None:
    busy = replace(D1, held_blocks=3, running=40)
    assert place(NEED, [D0, busy], "auto").decode is D0
    queued = replace(P0, held_blocks=3, queued_tokens=5000)
    found = place(NEED, [D0, queued, P1], "auto")
    assert found.candidates[0] is P1


def test_what_was_just_placed_counts() -> None:
    just = replace(D0, placed_requests=3, placed_tokens=3000)
    assert place(NEED, [just, D1], "auto").decode is D1


def test_room_matters() -> None:
    full = replace(D0, free_blocks=200, promised_blocks=190, held_blocks=10)
    assert place(NEED, [full, D1], "auto").decode is D1


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
def test_modes(mode: PlacementMode, held: int, prefill: bool, local: bool) -> None:
    workers = [replace(D0, held_blocks=held), *([P0] if prefill else [])]
    found = place(NEED, workers, mode)
    assert found.local == local and bool(found.candidates) != local


LONG = Need(tokens=8200, output_tokens=100, most_tokens=8300)


@pytest.mark.parametrize(
    ("here", "there", "local"),
    [  # blocks of 16 that the decode worker holds, and the prefill worker
        (508, 0, True),  # 72 tokens here, or all 8,200 there
        (508, 512, False),  # 72 here, or 8 there
        (508, 494, True),  # 72 here, or 296 there
        (0, 0, False),
        (128, 0, False),  # three quarters of them here: the batch would wait too long
        (400, 0, True),  # less than a quarter
        (400, 400, False),
        (511, 512, True),  # 24 here, or a handoff for 8
    ],
)
def test_prompt_is_computed_where_that_costs_less(here: int, there: int, local: bool) -> None:
    decode, prefill = replace(D0, held_blocks=here), replace(P0, held_blocks=there)
    found = place(LONG, [decode, prefill], "auto", read_cached=False)
    assert found.local == local and found.source is None
    assert not place(LONG, [decode, prefill], "disaggregated").local


def test_costs_are_compared_with_the_best_candidate() -> None:
    decode, holder = replace(D0, held_blocks=508), replace(P1, held_blocks=512)
    found = place(LONG, [decode, P0, holder], "auto")
    assert found.candidates == (holder, P0)


@pytest.mark.parametrize(
    ("streams", "local"),
    [
        ({}, True),
        ({"running": 40}, False),
        ({"active_requests": 40}, False),  # their prompts are being computed or fetched
        ({"waiting": 40}, False),
        ({"placed_requests": 40}, False),  # not reported yet
        ({"hinted": (40, 0)}, False),  # by other routers
    ],
)
def test_a_queue_counts_beside_the_delay_of_streams(streams: dict[str, int], local: bool) -> None:
    """A wait of 0.6 s there, or so many streams that wait for it here."""
    queued = replace(P0, queued_tokens=10_000, running=8)
    found = place(LONG, [changed(D0, **streams), queued], "auto")
    assert (found.local, found.reason) == (local, "cheaper")


@pytest.mark.parametrize(("running", "local"), [(8, False), (0, True)])
def test_streams_that_come_later_are_not_delayed(running: int, local: bool) -> None:
    """Eight prompts are before this one there, which takes 0.5 s here: one of them ends by then."""
    queued = replace(P0, queued_tokens=8 * 4100, running=8)
    decode = replace(D0, running=running, active_requests=8)
    assert place(LONG, [decode, queued], "auto").local == local


@pytest.mark.parametrize(("queued_tokens", "chosen"), [(600, "decode-0"), (800, "decode-1")])
def test_a_queue_of_a_decode_worker_counts_once(queued_tokens: int, chosen: str) -> None:
    """49 or 67 ms, where the cached half of the prompt saves 53."""
    queued = replace(D0, held_blocks=30, queued_tokens=queued_tokens)
    assert place(NEED, [queued, D1], "local").decode.worker_id == chosen


@pytest.mark.parametrize(
    ("itl_s", "running", "local"),
    [
        (math.inf, 2, True),
        (0.017, 2, True),  # a step with a chunk takes less
        (0.007, 2, False),
        (0.007, 0, True),  # no stream is there to miss it
    ],
)
def test_streams_that_would_miss_their_objective_cost_more(
    itl_s: float, running: int, local: bool
) -> None:
    """1.2 s here, the delay of two streams included, or 1.8 s there."""
    decode = replace(D0, running=running, costs=WorkerCosts(PRIOR, itl_s=itl_s))
    queued = replace(P0, queued_tokens=22_000, running=8)
    assert place(LONG, [decode, queued], "auto").local == local


@pytest.mark.parametrize(
    ("itl_s", "local"),
    [
        (math.inf, False),  # its steps would delay the stream by over a second
        (0.1, True),  # each of these steps meets the objective
        (0.012, False),
    ],
)
def test_streams_are_held_up_as_far_as_their_objective_bears(itl_s: float, local: bool) -> None:
    """4 s here, the delay of the stream included, or 6 s there."""
    prompt = replace(LONG, tokens=15_000, most_tokens=15_100)
    costs = WorkerCosts(PRIOR, pace=2.0, itl_s=itl_s)
    decode = replace(D0, running=1, costs=costs)
    queued = replace(P0, queued_tokens=80_000, running=8)
    assert place(prompt, [decode, queued], "auto").local == local


def test_few_long_prompts_delay_a_short_one_little() -> None:
    """They share steps: few long prompts delay a short one little."""
    long = replace(P0, queued_tokens=1 << 20, queued_pairs=1 << 39, running=1)
    short = replace(NEED, tokens=300)
    assert not place(short, [replace(D0, running=9), long], "auto").local


def test_slower_workers_cost_as_much_more() -> None:
    slow = WorkerCosts(PRIOR, pace=3.0)
    found = place(NEED, [D0, replace(P0, costs=slow), P1], "disaggregated")
    assert [worker.worker_id for worker in found.candidates] == ["prefill-1", "prefill-0"]
    queued = replace(P1, queued_tokens=4000)
    found = place(NEED, [D0, replace(P0, costs=slow), queued], "disaggregated")
    assert found.candidates[0].worker_id == "prefill-0"


HERE, RACK, ZONE = "a/r1/h1", "a/r1/h2", "a/r2/h3"
APART = WorkerCosts(PRIOR, byte_s=(1e-11, 1e-10, 2e-9, 2e-9, 2e-9))


def at(worker: Seen, topology: str, **fields: object) -> Seen:
    return changed(worker, topology=topology, costs=APART, **fields)


def test_nearer_prefill_workers_come_first() -> None:
    """They are near to the decode worker that is chosen, whichever has the lower id."""
    far, near, own = at(P0, ZONE), at(P1, RACK), at(view("prefill-2"), HERE)
    found = place(NEED, [at(D0, HERE), far, near, own], "disaggregated")
    assert found.candidates == (own, near, far)
    unknown = place(NEED, [D0, far, near, own], "disaggregated")
    assert unknown.candidates == (far, near, own)


def test_distance_is_weighed_against_a_queue() -> None:
    """READs of 131 MB take 13 ms from the same rack, and 262 ms from another one."""
    busy = at(P0, RACK, queued_tokens=2000, running=8)  # 120 ms
    found = place(NEED, [at(D0, HERE), busy, at(P1, ZONE)], "disaggregated")
    assert found.candidates[0].worker_id == "prefill-0"
    busier = at(P0, RACK, queued_tokens=9000, running=8)
    found = place(NEED, [at(D0, HERE), busier, at(P1, ZONE)], "disaggregated")
    assert found.candidates[0].worker_id == "prefill-1"


def test_a_prompt_stays_local_where_its_move_takes_longer() -> None:
    """The same workers and loads: nothing but the time of the READs decides."""
    assert not place(NEED, [at(D0, HERE), at(P0, RACK)], "auto").local
    assert place(NEED, [at(D0, HERE), at(P0, ZONE)], "auto").local


def test_a_far_source_is_not_read() -> None:
    holder = at(P1, HERE, held_blocks=60, queued_tokens=1 << 20, running=40)
    near = place(NEED, [at(D0, HERE), at(P0, HERE), holder], "disaggregated")
    assert near.candidates[0].worker_id == "prefill-0" and near.source is not None
    far = at(P0, ZONE)
    found = place(NEED, [at(D0, HERE), far, holder], "disaggregated")
    assert found.candidates[0].worker_id == "prefill-0" and found.source is None


def test_workers_that_are_alike_are_drawn() -> None:
    """Two are drawn, and the quicker one comes first: the slowest never does."""
    prefill = [replace(view(f"prefill-{n}"), placed_us=100 * n) for n in range(4)]
    far = replace(view("prefill-9"), queued_tokens=10_000)
    draws = Random(1)
    firsts = Counter(
        place(NEED, [D0, D1, *prefill, far], "disaggregated", draws=draws).candidates[0].worker_id
        for _ in range(300)
    )
    assert set(firsts) == {"prefill-0", "prefill-1", "prefill-2"}
    assert firsts["prefill-0"] > firsts["prefill-1"] > firsts["prefill-2"] > 20


def test_equal_workers_are_drawn_alike() -> None:
    """Two routers that see two idle workers should not both choose the first."""
    draws = Random(1)
    decodes = Counter(
        place(NEED, [D0, D1, P0], "auto", draws=draws).decode.worker_id for _ in range(200)
    )
    assert set(decodes) == {"decode-0", "decode-1"} and min(decodes.values()) > 70


def test_a_prefill_worker_of_another_shape_is_no_candidate() -> None:
    other = replace(P0, kv_format=KvFormat("g", "float32", 16))
    assert place(NEED, [D0, other], "disaggregated").local


def test_failed_workers_are_a_last_resort() -> None:
    need = replace(NEED, avoid=frozenset({D0.boot_id, P0.boot_id}))
    found = place(need, [D0, D1, P0, P1], "auto")
    assert found.decode is D1
    assert [worker.worker_id for worker in found.candidates] == ["prefill-1", "prefill-0"]
    assert place(need, [D0], "auto").decode is D0


def test_a_passed_over_worker_is_asked_only_without_another() -> None:
    bad, bad_prefill = replace(D0, passed_over=True), replace(P0, passed_over=True)
    busy = replace(D1, running=500)
    found = place(NEED, [bad, busy, bad_prefill, P1], "auto")
    assert found.decode is busy and found.candidates == (P1,)
    alone = place(NEED, [bad, bad_prefill], "auto")
    assert alone.decode is bad and alone.candidates == (bad_prefill,)
    full = replace(D1, waiting=512)  # no reason to ask who fails
    with pytest.raises(Overloaded):
        place(NEED, [bad, full], "auto")


def test_a_pool_that_is_too_small_is_passed_by() -> None:
    small = replace(D0, total_blocks=10, free_blocks=10)
    assert place(NEED, [small, D1], "auto").decode is D1


ANSWERED = replace(D0, held_blocks=60)  # of a prompt of 62 blocks and 8 tokens


def test_the_source_is_the_decode_worker_that_holds_the_history() -> None:
    found = place(NEED, [ANSWERED, replace(P0, held_blocks=40)], "disaggregated")
    assert found.source == Source(ANSWERED, 60)
    other = replace(D1, held_blocks=62)  # holds more, and has no room for one more request
    busy = replace(other, running=99)
    found = place(NEED, [ANSWERED, busy, P0], "disaggregated")
    assert found.decode is ANSWERED and found.source == Source(busy, 62)


def test_a_prefill_worker_may_be_the_source_of_another() -> None:
    holder = replace(P0, held_blocks=60, queued_tokens=2000)
    found = place(NEED, [D0, holder, P1], "auto")
    assert found.candidates[0] is P1 and found.source == Source(holder, 60)


@pytest.mark.parametrize(
    "unfit",
    [{"draining": True}, {"passed_over": True}, {"kv_format": KvFormat("g", "float32", 16)}],
)
def test_a_worker_that_cannot_be_read_is_no_source(unfit: dict[str, bool]) -> None:
    holder = changed(D1, held_blocks=60, running=99, **unfit)
    assert place(NEED, [D0, holder, P0], "disaggregated").source is None


def test_nothing_is_read_from_a_source_that_is_read_slowly() -> None:
    slow = replace(P0, degraded={ANSWERED.boot_id: SLOW})
    assert place(NEED, [ANSWERED, slow], "disaggregated").source is None
    found = place(NEED, [ANSWERED, slow, P1], "disaggregated")
    assert found.candidates[0] is P1 and found.source is not None


@pytest.mark.parametrize(("lacks", "reads"), [(0, False), (4, False), (5, True), (60, True)])
def test_few_blocks_are_computed_rather_than_read(lacks: int, reads: bool) -> None:
    near = replace(P0, held_blocks=60 - lacks)
    found = place(NEED, [ANSWERED, near], "disaggregated")
    assert (found.source is not None) == reads


def test_sources_are_off_by_configuration() -> None:
    found = place(NEED, [ANSWERED, P0], "disaggregated", read_cached=False)
    assert found.source is None


NARROW = KvFormat("f", "int8 of float32", 16)


def test_a_prefill_worker_of_a_bridged_dtype_is_a_candidate() -> None:
    pool = {"kv_format": NARROW, "total_blocks": 3000, "free_blocks": 3000}
    decode, narrow = changed(D0, **pool), changed(P1, **pool)
    plain = replace(P0, total_blocks=3000)
    found = place(LONG, [decode, plain], "auto")
    assert found.candidates == (plain,) and not found.local
    both = place(LONG, [decode, plain, narrow], "auto")
    assert both.candidates == (narrow, plain)  # it converts nothing


@pytest.mark.parametrize(("reader", "granter"), [(NARROW, SHAPE), (SHAPE, NARROW)])
def test_room_to_convert_decides_too(reader: KvFormat, granter: KvFormat) -> None:
    decode, blocks = replace(D0, kv_format=reader), -(-NEED.tokens // 16)
    each = 1 if reader == NARROW else 4
    large = replace(P0, kv_format=granter, total_blocks=(1 + each) * blocks)
    assert place(NEED, [decode, large], "disaggregated").candidates == (large,)
    small = replace(large, total_blocks=large.total_blocks - 1)
    found = place(NEED, [decode, small], "disaggregated")
    assert found.local and found.reason == "too_large"
