"""The costs of one request on one worker, in parts, all in microseconds. Pure; see placement.py."""

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
# would gain: one whose delay adds up to more, with the queue before it, costs ten minutes.
LONGEST_DELAY_US = 1_000_000
HELD_UP_US = 600_000_000


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
        held_up = worker.queue_us + self.delay_us > LONGEST_DELAY_US
        return self.own_us + round(delays_us) + held_up * HELD_UP_US

    def total_us(self, worker: WorkerView, wait_us: int = 0) -> int:
        """Return the cost with the wait for the prompts before it."""
        return worker.queue_us + self.cost_us(worker, wait_us)


@lru_cache(maxsize=256)  # one placement asks for it once for each worker
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

    def parts(self, worker: WorkerView, uncached: int) -> PrefillParts:
        """Return the cost on a worker that lacks this many tokens."""
        compute_us, read_us = self._work_us(worker, uncached)
        converts = worker.kv_format[1] != self.decode[1]
        gb_per_s = self.slow.get(worker.boot_id)
        slow_us = 0
        if gb_per_s is not None:
            slow_us = self._slower_us(worker, compute_us, gb_per_s)
        return PrefillParts(
            queue_us=worker.queue_us,
            compute_us=compute_us,
            read_us=read_us,
            convert_us=worker.costs.read_us(self.need.tokens) if converts else 0,
            slow_pair_us=slow_us,
            far_us=self._far_us(worker, compute_us),
            slow_start_us=slow_start_us(worker, self.deferred),
        )

    def remote(self, worker: WorkerView, uncached: int) -> RemotePrefill:
        """Return the prefill there. Prompts share its steps, so one waits no longer for the queue
        than each of the queued prompts would for it."""
        parts = self.parts(worker, uncached)
        shared_us = (worker.running + worker.queued_requests) * parts.compute_us
        wait_us = min(parts.queue_us, shared_us + worker.costs.step_us)
        work_us = sum(parts) - parts.queue_us - parts.far_us  # the move is that of the pair
        return RemotePrefill(
            worker.costs, wait_us, work_us, parts.compute_us, self._pair_of(worker)
        )

    def least_us(self, costs: WorkerCosts, uncached: int) -> int:
        """Return the cost on any idle worker with these costs that lacks this many tokens."""
        reading_us = sum(self._read_us(costs, uncached, NEAREST_PAIR))
        return min(self._computed_us(costs, uncached), reading_us)

    def reads(self, worker: WorkerView, uncached: int) -> bool:
        """Return whether the worker should READ what it lacks of the source's blocks."""
        return self._work_us(worker, uncached)[1] > 0

    def _work_us(self, worker: WorkerView, uncached: int) -> tuple[int, int]:
        """Return the times to compute and to READ in the way that takes less."""
        computed_us = self._computed_us(worker.costs, uncached)
        if self.source is None:
            return computed_us, 0
        peer = self.source.worker
        pair = Pair(
            worker.degraded.get(peer.boot_id, 0.0), distance(worker.topology, peer.topology)
        )
        computing_us, reading_us = self._read_us(worker.costs, uncached, pair)
        if not reading_us or computing_us + reading_us >= computed_us:
            return computed_us, 0
        return computing_us, reading_us

    def _computed_us(self, costs: WorkerCosts, uncached: int) -> int:
        return costs.compute_us(self.need.tokens - uncached, self.need.tokens)

    def _read_us(self, costs: WorkerCosts, uncached: int, pair: Pair) -> tuple[int, int]:
        """Return the time to compute what the source does not hold, and to READ what it does. No
        time to READ: it holds nothing more."""
        left = self.need.tokens
        if self.source is not None:
            held, worker = self.source.blocks, self.source.worker
            left = uncached_tokens(self.need, held, worker.capacity)
        if uncached <= left:
            return self._computed_us(costs, uncached), 0
        reading_us = costs.handoff_us + costs.read_us(uncached - left, pair)
        return self._computed_us(costs, left), reading_us

    def _slower_us(self, worker: WorkerView, compute_us: int, gb_per_s: float) -> int:
        """Return what a slow pair adds to the move of the whole prompt. What was measured between
        all workers may be of such pairs alone: it is not taken off where it is hardly less."""
        tokens, costs = self.need.tokens, worker.costs
        slow_us = costs.move_us(tokens, compute_us, Pair(gb_per_s))
        usual_us = costs.move_us(tokens, compute_us)
        return slow_us - usual_us if 2 * usual_us < slow_us else slow_us

    def _pair_of(self, worker: WorkerView) -> Pair:
        """Return the pair of the decode worker and this one. What a slow one adds stands for
        itself."""
        if not self.topology or worker.boot_id in self.slow:
            return ANY_PAIR
        return Pair(distance=distance(self.topology, worker.topology))

    def _far_us(self, worker: WorkerView, compute_us: int) -> int:
        """Return how much longer the whole prompt takes to move than from the nearest workers."""
        pair = self._pair_of(worker)
        if not pair.distance:
            return 0
        tokens, costs = self.need.tokens, worker.costs
        near_us = costs.move_us(tokens, compute_us, NEAREST_PAIR)
        return costs.move_us(tokens, compute_us, pair) - near_us


def slow_start_us(worker: WorkerView, deferred: frozenset[bytes]) -> int:
    """Return what a worker's slow start adds to its cost."""
    return SLOW_START_US if worker.boot_id in deferred else 0
