"""The costs of one request on one worker, in parts, all in microseconds. Pure; see placement.py.

    DecodeCosts    the request on decode workers that are alike and lack the same of its prompt
    PrefillCosts   its prompt on prefill workers, for decode workers of one format
    AlikePrefill   the same, on those that are alike and lack the same of it

A placement compares many workers by `price_us`, which is the sum of their `parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from baton.router.fleet.request_need import Need, Source, uncached_tokens
from baton.router.fleet.topology import distance
from baton.router.fleet.worker_costs import ANY_PAIR, NEAREST_PAIR, Pair, WorkerCosts
from baton.router.fleet.worker_view import KvFormat, WorkerView

# A new worker that has had its share for now costs ten minutes more: it gets the request if all
# others would take longer by that, or may not.
SLOW_START_US = 600_000_000
# A decode worker that computes a prompt delays one stream at least: one may come during its steps.
LEAST_STREAMS = 1
# Prompts that a decode worker computes hold up its streams for no longer than this, whatever they
# would gain: one whose delay adds up to more, with the queue before it, costs ten minutes. Where no
# stream runs or is to come, there is none to hold up; and where the operator has set an objective
# that each of its steps meets, the streams are as quick as was asked for.
LONGEST_DELAY_US = 1_000_000
HELD_UP_US = 600_000_000
NEVER_US = 1 << 62  # the prefill on a prefill worker where there is none


class DecodeParts(NamedTuple):
    """The cost of a request on a decode worker."""

    batch_us: int
    queue_us: int
    credit_us: int
    prefill_us: int
    slow_start_us: int


class PrefillParts(NamedTuple):
    """The cost of a prompt on a prefill worker."""

    queue_us: int
    compute_us: int
    read_us: int  # from the source
    convert_us: int
    slow_pair_us: int
    far_us: int  # that the move takes longer than from the nearest worker
    slow_start_us: int


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """A prompt's prefill on decode workers that are alike: its steps take `own_us`, and delay each
    stream by `delay_us`, a whole chunk by `longest_us`."""

    costs: WorkerCosts
    own_us: int
    delay_us: int
    longest_us: int

    @classmethod
    def of(cls, costs: WorkerCosts, need: Need, uncached: int) -> LocalPrefill:
        """Return that of a prompt of which `uncached` tokens are to be computed."""
        return _local_prefill(costs, need.tokens, uncached)

    def least_us(self, running: int) -> int:
        """Return the least cost on a worker where so many sequences run."""
        return self.own_us + max(LEAST_STREAMS, running) * self.delay_us

    def cost_us(self, worker: WorkerView, wait_us: int = 0) -> int:
        """Return the cost on a worker from when it begins: its own time, and for each stream there
        its delay and what that takes of its objective. Streams that are to come are delayed as far
        as they come before its end: their prompts end one after the other over the `wait_us` that
        this one would wait on a prefill worker."""
        streams, until_us = worker.streams, worker.queue_us + self.own_us
        share = min(1.0, until_us / (2 * wait_us)) if wait_us else 1.0
        delayed = worker.running + share * (streams - worker.running)
        held = worker.held_tokens
        miss_us = self.costs.miss_us(self.delay_us, self.longest_us, streams, held)
        delays_us = max(LEAST_STREAMS, delayed) * self.delay_us + delayed * miss_us
        held_up = (
            streams > 0
            and worker.queue_us + self.delay_us > LONGEST_DELAY_US
            and not self.costs.bears(self.longest_us, streams, held)
        )
        return self.own_us + round(delays_us) + held_up * HELD_UP_US

    def total_us(self, worker: WorkerView, wait_us: int = 0) -> int:
        """Return the cost with the wait for the prompts before it."""
        return worker.queue_us + self.cost_us(worker, wait_us)


@lru_cache(maxsize=256)  # one placement asks for it several times
def _local_prefill(costs: WorkerCosts, tokens: int, uncached: int) -> LocalPrefill:
    span = tokens - uncached, tokens
    delay_us = costs.delay_us(*span)
    longest_us = delay_us * min(uncached, costs.chunk_tokens) // uncached
    return LocalPrefill(costs, costs.compute_us(*span), delay_us, longest_us)


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """A prompt's prefill on one prefill worker: `wait_us` until it begins, `work_us` until it ends,
    of which the READs of the prompt's KV by this `pair` may be hidden behind `compute_us`."""

    costs: WorkerCosts
    wait_us: int
    work_us: int
    compute_us: int
    pair: Pair = ANY_PAIR

    def total_us(self, moved: int) -> int:
        """Return the time until a decode worker has the `moved` tokens that it lacks."""
        move_us = self.costs.move_us(moved, self.compute_us, self.pair)
        return self.wait_us + self.work_us + self.costs.handoff_us + move_us


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """The costs of a request on decode workers that are alike. The quicker prefill counts: the one
    on the worker itself, None where that is not considered, or the one on a prefill worker, which
    takes `moved_us` with its wait and its move. `wanted` are the tokens for which a worker should
    have room."""

    local: LocalPrefill | None
    moved_us: int
    wait_us: int
    wanted: int
    deferred: frozenset[bytes]

    @classmethod
    def of(
        cls,
        need: Need,
        costs: WorkerCosts,
        uncached: int,
        there: RemotePrefill | None,
        *,
        auto: bool,
        deferred: frozenset[bytes],
    ) -> DecodeCosts:
        """Return those on workers that lack `uncached` tokens of the prompt. Its prefill is the one
        `there`, or without one its own; if `auto`, the quicker of both."""
        local = LocalPrefill.of(costs, need, uncached) if there is None or auto else None
        moved_us, wait_us = NEVER_US, 0
        if there is not None:
            moved_us, wait_us = there.total_us(uncached), there.wait_us
        return cls(local, moved_us, wait_us, wanted_tokens(need), deferred)

    def price_us(self, worker: WorkerView) -> int:
        """Return the cost on a worker."""
        price_us = worker.busy_us + self._prefill_us(worker) + self._credit_us(worker)
        return price_us + slow_start_us(worker, self.deferred)

    def parts(self, worker: WorkerView) -> DecodeParts:
        """Return the parts of `price_us`. The queue delays the request wherever its prompt is
        computed, so it counts once."""
        return DecodeParts(
            batch_us=worker.batch_us,
            queue_us=worker.queue_us,
            credit_us=self._credit_us(worker),
            prefill_us=self._prefill_us(worker),
            slow_start_us=slow_start_us(worker, self.deferred),
        )

    def least_us(self, running: int) -> int:
        """Return the least cost on a worker with room where so many sequences run, beyond its
        `busy_us`."""
        if self.local is None:
            return self.moved_us
        return min(self.local.least_us(running), self.moved_us)

    def _prefill_us(self, worker: WorkerView) -> int:
        local = self.local
        if local is None or local.least_us(worker.running) >= self.moved_us:
            return self.moved_us
        return min(local.cost_us(worker, self.wait_us), self.moved_us)

    def _credit_us(self, worker: WorkerView) -> int:
        lacking = self.wanted - worker.room_tokens
        return lacking * worker.credit_us if lacking > 0 else 0


def wanted_tokens(need: Need) -> int:
    """Return the tokens for which a decode worker should have room."""
    return need.tokens + need.output_tokens * need.sequences


_AlikeKey = tuple[WorkerCosts, str, int]  # with the KV dtype, and the tokens that are lacked


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """The costs of a prompt's prefill on prefill workers, which may READ from its `source`, and
    convert what the decode worker of format `decode` stores in another KV dtype. `slow` are the
    GB/s of peers that this decode worker reads slowly, `topology` is where it is; empty for any
    decode worker of the format."""

    need: Need
    deferred: frozenset[bytes]
    decode: KvFormat
    source: Source | None = None
    slow: Mapping[bytes, float] = field(default_factory=dict)
    topology: str = ""
    _alike: dict[_AlikeKey, AlikePrefill] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def alike(self, costs: WorkerCosts, kv_dtype: str, uncached: int) -> AlikePrefill:
        """Return the costs on workers with these costs that lack this many tokens."""
        key = costs, kv_dtype, uncached
        found = self._alike.get(key)
        if found is None:
            found = self._alike[key] = AlikePrefill(self, costs, kv_dtype, uncached)
        return found

    def parts(self, worker: WorkerView, uncached: int) -> PrefillParts:
        """Return the cost on a worker that lacks this many tokens."""
        return self.alike(worker.costs, worker.kv_format[1], uncached).parts(worker)

    def remote(self, worker: WorkerView, uncached: int) -> RemotePrefill:
        """Return the prefill there. Prompts share its steps, so one waits no longer for the queue
        than each of the queued prompts would for it."""
        parts = self.parts(worker, uncached)
        shared_us = (worker.running + worker.queued_requests) * parts.compute_us
        wait_us = min(parts.queue_us, shared_us + worker.costs.step_us)
        # The move is that of the pair, and slow start chooses among prefill workers alone.
        work_us = sum(parts) - parts.queue_us - parts.far_us - parts.slow_start_us
        return RemotePrefill(worker.costs, wait_us, work_us, parts.compute_us, self.pair_of(worker))

    def reads(self, worker: WorkerView, uncached: int) -> bool:
        """Return whether the worker should READ what it lacks of the source's blocks."""
        return self.parts(worker, uncached).read_us > 0

    def pair_of(self, worker: WorkerView) -> Pair:
        """Return the pair of the decode worker and this one. What a slow one adds stands for
        itself."""
        if not self.topology or worker.boot_id in self.slow:
            return ANY_PAIR
        return Pair(distance=distance(self.topology, worker.topology))


class AlikePrefill:
    """The costs of one prompt on prefill workers that are alike, `costs`, and lack `uncached` of
    its tokens. Workers differ in their queue and in how far they are; what belongs to a distance
    is computed once."""

    def __init__(
        self, prefill: PrefillCosts, costs: WorkerCosts, kv_dtype: str, uncached: int
    ) -> None:
        self._prefill = prefill
        self._costs = costs
        self._tokens = prefill.need.tokens
        self._computed_us = costs.compute_us(self._tokens - uncached, self._tokens)
        converts = kv_dtype != prefill.decode[1]
        self._convert_us = costs.read_us(self._tokens) if converts else 0
        self._readable, self._left_us = 0, 0  # tokens that the source holds; to compute the rest
        self._works: dict[Pair, tuple[int, int]] = {}
        self._far: dict[tuple[int, int], int] = {}  # by the time to compute, and the distance
        nearest_us = self._computed_us
        if prefill.source is not None:
            held, source = prefill.source.blocks, prefill.source.worker
            left = uncached_tokens(prefill.need, held, source.capacity)
            if left < uncached:
                self._readable = uncached - left
                self._left_us = costs.compute_us(self._tokens - left, self._tokens)
                nearest_us = sum(self._work_us(NEAREST_PAIR))
                if nearest_us >= self._computed_us:
                    self._readable = 0  # a READ takes too long from anywhere
        self.least_us = nearest_us + self._convert_us  # on an idle worker

    def price_us(self, worker: WorkerView) -> int:
        """Return the cost on a worker."""
        compute_us, read_us = self._worker_work_us(worker)
        price_us = worker.queue_us + compute_us + read_us + self._convert_us
        if self._prefill.slow:
            price_us += self._slower_us(worker, compute_us)
        if self._prefill.topology:
            price_us += self._far_us(worker, compute_us)
        return price_us + slow_start_us(worker, self._prefill.deferred)

    def parts(self, worker: WorkerView) -> PrefillParts:
        """Return the parts of `price_us`."""
        compute_us, read_us = self._worker_work_us(worker)
        return PrefillParts(
            queue_us=worker.queue_us,
            compute_us=compute_us,
            read_us=read_us,
            convert_us=self._convert_us,
            slow_pair_us=self._slower_us(worker, compute_us),
            far_us=self._far_us(worker, compute_us),
            slow_start_us=slow_start_us(worker, self._prefill.deferred),
        )

    def _worker_work_us(self, worker: WorkerView) -> tuple[int, int]:
        source = self._prefill.source
        if not self._readable or source is None:
            return self._computed_us, 0
        gb_per_s = worker.degraded.get(source.worker.boot_id, 0.0)
        return self._work_us(Pair(gb_per_s, distance(worker.topology, source.worker.topology)))

    def _work_us(self, pair: Pair) -> tuple[int, int]:
        """Return the times to compute and to READ in the way that takes less."""
        found = self._works.get(pair)
        if found is None:
            reading_us = self._costs.handoff_us + self._costs.read_us(self._readable, pair)
            found = self._left_us, reading_us
            if not reading_us or sum(found) >= self._computed_us:
                found = self._computed_us, 0
            self._works[pair] = found
        return found

    def _slower_us(self, worker: WorkerView, compute_us: int) -> int:
        """Return what a slow pair adds to the move of the whole prompt. What was measured between
        all workers may be of such pairs alone: it is not taken off where it is hardly less."""
        gb_per_s = self._prefill.slow.get(worker.boot_id)
        if gb_per_s is None:
            return 0
        tokens, costs = self._tokens, self._costs
        slow_us = costs.move_us(tokens, compute_us, Pair(gb_per_s))
        usual_us = costs.move_us(tokens, compute_us)
        return slow_us - usual_us if 2 * usual_us < slow_us else slow_us

    def _far_us(self, worker: WorkerView, compute_us: int) -> int:
        """Return how much longer the whole prompt takes to move than from the nearest workers."""
        prefill = self._prefill
        if not prefill.topology or worker.boot_id in prefill.slow:
            return 0  # as `pair_of`
        apart = distance(prefill.topology, worker.topology)
        if not apart:
            return 0
        key = compute_us, apart
        found = self._far.get(key)
        if found is None:
            tokens, costs = self._tokens, self._costs
            near_us = costs.move_us(tokens, compute_us, NEAREST_PAIR)
            far_us = costs.move_us(tokens, compute_us, Pair(distance=apart))
            found = self._far[key] = far_us - near_us
        return found


def slow_start_us(worker: WorkerView, deferred: frozenset[bytes]) -> int:
    """Return what a worker's slow start adds to its cost."""
    return SLOW_START_US if worker.boot_id in deferred else 0
