"""The timing of the linked workers, learned from their reports.

    load report: its last steps ─▶ the model of all workers of its KV format, and its own pace
    a request's timelines       ─▶ the handoffs of that format

    a worker's costs = (model, pace, its step's size); workers that are alike have the same object

Knows messages and time, no requests. What a worker reports is bounded before it is used. Owned by
the fleet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.planner.live_timing import LiveTiming, Pace, ReadSample
from baton.planner.timing_model import StepWork
from baton.proto import worker_pb2
from baton.router.fleet.worker_costs import WorkerCosts
from baton.router.fleet.worker_view import BlockFormat, KvFormat, kv_format_of
from baton.runtime.config import StepConfig
from baton.runtime.telemetry.timeline import MAX_OFFERS, covered

MAX_STEPS = 64  # of all workers of a format, between two fits
MAX_AMOUNT = 1 << 48  # of a step's work, or bytes of a fetch
# Without CONNECT: the first contact of a pair measures its READs, and would keep prompts local for
# minutes where nothing but first contacts has been reported.
_FIXED_PHASES = (worker_pb2.OPEN, worker_pb2.FIRST_TOKEN)
_CostsKey = tuple[str, float, int, int]  # role, pace, step and chunk tokens


@dataclass(slots=True)
class _Format:
    """The workers of one KV format."""

    timing: LiveTiming = field(default_factory=LiveTiming)
    steps: int = 0  # taken since the last fit
    costs: dict[_CostsKey, WorkerCosts] = field(default_factory=dict)  # of the present model


@dataclass(slots=True)
class _Worker:
    """`costs` are those that were last asked for, by this `hello`; None: there may be others."""

    boot_id: bytes
    pace: Pace = field(default_factory=Pace)
    chunk_step: int = 0  # numbers of the last steps that were taken
    decode_step: int = 0
    load: worker_pb2.Load | None = None  # the last report
    hello: worker_pb2.WorkerHello | None = None
    costs: WorkerCosts | None = None


class FleetTiming:
    """`step` has the sizes of steps for workers that state none, and the expected output; `itl_s`
    is the objective for the mean time between two tokens, 0 without one."""

    def __init__(self, step: StepConfig, itl_s: float = 0.0) -> None:
        self._step, self._itl_s = step, itl_s or math.inf
        self._formats: dict[BlockFormat, _Format] = {}
        self._workers: dict[str, _Worker] = {}

    # -- events ---------------------------------------------------------------------------------

    def record_load(
        self, worker_id: str, boot_id: bytes, hello: worker_pb2.WorkerHello, load: worker_pb2.Load
    ) -> None:
        """Take the steps of a load report, once. A prefill worker's pace is that of its chunks, a
        decode worker's that of steps without any."""
        known = self._workers.get(worker_id)
        if known is None or known.boot_id != boot_id:
            known = self._workers[worker_id] = _Worker(boot_id)
        if load is known.load:
            return
        known.load, known.costs = load, None
        kind = self._format(kv_format_of(hello))
        decodes = hello.role == "decode"
        if load.HasField("chunk_step") and load.chunk_step.number != known.chunk_step:
            known.chunk_step = load.chunk_step.number
            _take(kind, load.chunk_step, None if decodes else known.pace)
        if load.HasField("decode_step") and load.decode_step.number != known.decode_step:
            known.decode_step = load.decode_step.number
            _take(kind, load.decode_step, known.pace if decodes else None)

    def record_handoff(
        self, kv_format: KvFormat, timeline: worker_pb2.Timeline, now_s: float, distance: int = 0
    ) -> None:
        """Take what a timeline of a request says of a handoff, or of its fetch, between workers so
        far apart."""
        timing, fetch = self._format(kv_format).timing, timeline.fetch
        if timeline.peer and len(timeline.names) == len(timeline.micros):
            phases = zip(timeline.names, timeline.micros, strict=True)
            fixed_us = sum(us for name, us in phases if name in _FIXED_PHASES)
            timing.add_handoff(fixed_us / 1e6, now_s)
        counts = {len(fetch.begin_us), len(fetch.landed_us), len(fetch.blocks)}
        if len(counts) == 1 and max(counts) <= MAX_OFFERS and fetch.bytes <= MAX_AMOUNT:
            reads = zip(fetch.begin_us, fetch.landed_us, strict=True)
            tokens = sum(fetch.blocks) * kv_format[2]
            seconds = covered(reads) / 1e6
            timing.add_read(ReadSample(tokens, fetch.bytes, seconds, distance), now_s)

    def forget(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    def refit(self, now_s: float) -> None:
        """Bring the models up to date; call this from time to time. After a change, `costs` are new
        objects."""
        for kind in self._formats.values():
            before = kind.timing.model
            kind.timing.refit(now_s)
            if kind.timing.model is not before:
                kind.steps = 0
                kind.costs.clear()
                for worker in self._workers.values():
                    worker.costs = None

    # -- results --------------------------------------------------------------------------------

    def costs_of(self, worker_id: str, hello: worker_pb2.WorkerHello) -> WorkerCosts:
        """Return the costs of work on a linked worker."""
        known = self._workers.get(worker_id)
        if known is None:
            return self._find_costs(hello, 1.0)
        if known.costs is None or known.hello is not hello:
            known.hello, known.costs = hello, self._find_costs(hello, known.pace.factor)
        return known.costs

    def _find_costs(self, hello: worker_pb2.WorkerHello, pace: float) -> WorkerCosts:
        """Return the costs of all workers of this role, format, pace and size of a step."""
        step, decodes = self._step, hello.role == "decode"
        own = step.local_prefill_tokens
        sizes = (own, own) if decodes else (step.prefill_tokens, step.chunk_tokens)
        step_tokens = hello.step_tokens or sizes[0]
        chunk_tokens = hello.chunk_tokens or sizes[1]
        kind = self._format(kv_format_of(hello))
        key = hello.role, pace, step_tokens, chunk_tokens
        found = kind.costs.get(key)
        if found is None:
            model, growth = kind.timing.model, step.expected_growth_tokens
            byte_s = kind.timing.byte_s
            found = WorkerCosts(model, pace, step_tokens, chunk_tokens, growth, byte_s, self._itl_s)
            kind.costs[key] = found
        return found

    def _format(self, kv_format: KvFormat) -> _Format:
        return self._formats.setdefault(kv_format.of_blocks, _Format())


def _take(kind: _Format, step: worker_pb2.StepTime, pace: Pace | None) -> None:
    if max(step.pairs, step.context_tokens) > MAX_AMOUNT:
        return
    work = StepWork(step.prompt_tokens, step.pairs, step.sequences, step.context_tokens)
    seconds = step.micros / 1e6
    if pace is not None and kind.timing.measured and (work.prompt_tokens or work.sequences):
        pace.add(work, seconds, kind.timing.model)
    if kind.steps < MAX_STEPS:
        kind.steps += 1
        kind.timing.add_step(work, seconds)
