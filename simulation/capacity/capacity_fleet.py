"""A fleet on virtual time: production's placement, index, schedulers and pools, without messages.

    arrival ─ host ─▶ place ─▶ decode worker: credit ─▶ handoff ─▶ prefill worker: chunks
                                    ▲                      │  offers, one READ after the other
                                    └───── all is here ◀───┘

What is simplified: the router knows each worker's load at once, and not some 100 ms later; a READ
has the whole link of both its workers; a worker plans its next step after a step, not beside it.
No worker fails, so no lease ends: the fault lab simulates those.
"""

from __future__ import annotations

from asyncio import QueueEmpty
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from opentelemetry.context import Context

from baton.decode_worker.sequences import Group, Phase, Request
from baton.decode_worker.sequences import Sequence as TokenSequence
from baton.kv_transfer.granter import Computed
from baton.planner.timing_model import TimingModel
from baton.planner.traces import BLOCK_TOKENS, TraceRequest
from baton.prefill_worker.prompts import Prompt
from baton.proto import handoff_pb2, worker_pb2
from baton.router.fleet.placement import FleetView, Need, Placement, open_groups, place
from baton.router.fleet.radix_index import Holders, RadixIndex
from baton.router.fleet.roster import Roster
from baton.router.fleet.worker_view import KvFormat, WorkerView
from baton.runtime.config import RouterConfig
from baton.runtime.errors import BatonError, Overloaded
from baton.runtime.identity import NO_TENANT
from baton.runtime.sampling import SamplingParams
from baton.simulation.capacity.decode_stage import DecodeStage
from baton.simulation.capacity.layout import CapacityScenario
from baton.simulation.capacity.prefill_stage import PrefillStage
from baton.simulation.capacity.request_record import GapLog, RequestRecord
from baton.simulation.capacity.timeline import Timeline
from baton.simulation.capacity.trace_tokens import BlockTokens, block_names

KV_FORMAT: KvFormat = ("simulated", "simulated", BLOCK_TOKENS)
ROOT = bytes(16)
BUSY_PAUSE_S = 0.05  # before refused handoffs are tried again
GREEDY = SamplingParams(temperature=0.0)
WIRE_SAMPLING = worker_pb2.Sampling()
NO_TRACE = Context()


@dataclass(slots=True, eq=False)
class _Handoff:
    group: Group
    reader: DecodeStage
    candidates: tuple[str, ...]  # prefill workers, best first
    granter: PrefillStage | None = None
    prompt: Prompt | None = None
    read_s: float = 0.0  # all that was offered is read then
    over: bool = False


class CapacityFleet:
    """Implements `DecodeOwner`. `records` are in the order of the trace."""

    def __init__(
        self,
        timeline: Timeline,
        timing: TimingModel,
        scenario: CapacityScenario,
        trace: list[TraceRequest],
    ) -> None:
        layout, config = scenario.layout, RouterConfig()
        self.records = [RequestRecord(each) for each in trace]
        self.gaps = GapLog()
        self.finished = 0
        self._timeline = timeline
        self._timing = timing
        self._config = config
        self._mode = config.placement if layout.prefill else "local"
        self._growth = layout.steps().expected_growth_tokens
        self._index = RadixIndex()
        self._roster = Roster(config.max_waiting)
        self._changed: dict[str, DecodeStage | PrefillStage] = {}
        self._handoffs: dict[Group, _Handoff] = {}
        self._by_prompt: dict[Prompt, _Handoff] = {}
        self._placed: dict[str, tuple[str, ...]] = {}  # candidates, by request id
        self.prefill = {
            name: PrefillStage(
                name,
                timeline,
                timing,
                layout.steps(),
                layout.blocks,
                offered=self._offered,
                changed=self.changed,
            )
            for name in (f"p{number:05}" for number in range(layout.prefill))
        }
        self.decode = {
            name: DecodeStage(
                name,
                timeline,
                timing,
                layout.steps(),
                layout.blocks,
                self,
                every_token=scenario.every_token,
            )
            for name in (f"d{number:05}" for number in range(layout.decode + layout.colocated))
        }
        for stage in self.stages():
            self._index.add(stage.worker_id)
            self.changed(stage)
        for number, each in enumerate(trace):
            placed_s = each.arrived_s + timing.host_s(each.prompt_tokens)
            timeline.at(placed_s, partial(self._arrive, number))

    def stages(self) -> list[DecodeStage | PrefillStage]:
        """Return all workers, prefill workers first."""
        return [*self.prefill.values(), *self.decode.values()]

    # -- the router ---------------------------------------------------------------------------

    def changed(self, stage: DecodeStage | PrefillStage) -> None:
        self._changed[stage.worker_id] = stage

    def _arrive(self, number: int) -> None:
        record = self.records[number]
        asked = record.request
        names = block_names(asked, number)
        need = Need(
            asked.prompt_tokens,
            min(self._growth, asked.output_tokens),
            asked.prompt_tokens + asked.output_tokens,
        )
        try:
            placement = self._place(need, names[: asked.prompt_tokens // BLOCK_TOKENS])
            request = _request(number, asked, names, self._timeline.now_s, local=placement.local)
            self._placed[request.request_id] = tuple(e.worker_id for e in placement.candidates)
            self.decode[placement.decode.worker_id].submit(request)
        except BatonError as error:
            record.refused = error.code
            record.end_s = self._timeline.now_s
            self.finished += 1

    def _place(self, need: Need, names: Sequence[bytes]) -> Placement:
        for stage in self._changed.values():
            stored, removed = stage.pool.drain_events()
            if stored or removed:
                self._index.record(stage.worker_id, b"".join(stored), b"".join(removed))
            bit = self._index.bit(stage.worker_id)
            self._roster.put(_view(stage, bit))
        self._changed.clear()
        fleet = FleetView(self._roster)
        groups = open_groups(need, fleet)
        if isinstance(groups, BatonError):
            raise groups
        held = _held(self._index.holders(names))
        local_tokens = self._config.local_prefill_tokens
        return place(need, fleet, groups, held, self._mode, local_tokens, read_cached=False)

    # -- handoffs -----------------------------------------------------------------------------

    def granted(self, stage: DecodeStage, group: Group) -> None:
        if group.phase is not Phase.FETCHING:
            self._record(group.request).cached_tokens = group.held * BLOCK_TOKENS
            return
        candidates = self._placed[group.request.request_id]
        handoff = self._handoffs[group] = _Handoff(group, stage, candidates)
        # the decode worker goes on first: its scheduler is in the middle of a grant
        self._timeline.at(self._timeline.now_s, lambda: self._open(handoff))

    def _open(self, handoff: _Handoff) -> None:
        if handoff.over:
            return
        for name in handoff.candidates:
            granter = self.prefill[name]
            prompt = handoff.prompt = _prompt(handoff.group)
            handoff.granter = granter
            self._by_prompt[prompt] = handoff
            try:
                granter.submit(prompt)
            except Overloaded:
                del self._by_prompt[prompt]
                handoff.granter = handoff.prompt = None
                continue
            return
        self._timeline.at(self._timeline.now_s + BUSY_PAUSE_S, lambda: self._open(handoff))

    def _offered(self, prompt: Prompt) -> None:
        """Begin the READs of what a prefill worker has offered since the last call."""
        handoff = self._by_prompt.get(prompt)
        while handoff is not None and not handoff.over:
            try:
                event = prompt.events.get_nowait()
            except QueueEmpty:
                return
            if isinstance(event, Computed):
                self._read(handoff, event.partial_tokens or len(event.blocks) * BLOCK_TOKENS)
            elif isinstance(event, handoff_pb2.FirstTokens):
                self._first(handoff, event)
            elif event is None:
                self._timeline.at(handoff.read_s, lambda: self._fetched(handoff))
            else:
                raise event

    def _read(self, handoff: _Handoff, tokens: int) -> None:
        reader, granter = handoff.reader, handoff.granter
        assert granter is not None
        start_s = max(self._timeline.now_s, reader.link_free_s, granter.link_free_s)
        handoff.read_s = start_s + self._timing.transfer_s(tokens)
        reader.link_free_s = granter.link_free_s = handoff.read_s

    def _first(self, handoff: _Handoff, first: handoff_pb2.FirstTokens) -> None:
        for sequence in handoff.group.undrawn():
            record = self._record(sequence.request)
            record.cached_tokens = first.cached_tokens
            sequence.output.append(int(sequence.request.request_id))
            self.drew(sequence, 1, 0.0)
            if not sequence.growth_left:
                handoff.reader.scheduler.end(sequence)
        if not handoff.group.live:  # not before the prefill worker has ended its turn
            self._timeline.at(self._timeline.now_s, lambda: self._leave(handoff))

    def _leave(self, handoff: _Handoff) -> None:
        """Close the handoff of a request that ended with its first token."""
        if not handoff.over:
            self._close(handoff)
            handoff.reader.taken_back(handoff.group)

    def _fetched(self, handoff: _Handoff) -> None:
        if not handoff.over:
            self._close(handoff)
            handoff.reader.fetched(handoff.group)

    def cancel(self, group: Group) -> None:
        self._close(self._handoffs[group])

    def _close(self, handoff: _Handoff) -> None:
        handoff.over = True
        del self._handoffs[handoff.group]
        if handoff.prompt is not None and handoff.granter is not None:
            del self._by_prompt[handoff.prompt]
            handoff.granter.end(handoff.prompt)

    # -- tokens -------------------------------------------------------------------------------

    def drew(self, sequence: TokenSequence, steps: int, gap_s: float) -> None:
        record = self._record(sequence.request)
        self.gaps.token(record, self._timeline.now_s, gap_s, steps - 1)
        if not sequence.growth_left:
            record.end_s = self._timeline.now_s
            self.finished += 1
            del self._placed[sequence.request.request_id]

    def _record(self, request: Request) -> RequestRecord:
        return self.records[int(request.request_id)]

    def check(self) -> None:
        """Raise RuntimeError if a request has not ended, or a worker holds a block."""
        if self.finished != len(self.records) or self._handoffs:
            waiting = [n for n, record in enumerate(self.records) if record.end_s < 0]
            raise RuntimeError(
                f"nothing can happen any more, and {len(waiting)} requests wait: {waiting[:5]}"
            )
        for stage in self.stages():
            stage.pool.check()
            if stage.pool.available != stage.pool.total:
                raise RuntimeError(f"{stage.worker_id} holds blocks at the end")


def _held(holders: Holders) -> Callable[[KvFormat], Holders]:
    return lambda kv_format: holders


def _request(
    number: int, asked: TraceRequest, names: list[bytes], now_s: float, *, local: bool
) -> Request:
    request = Request(
        request_id=str(number),
        attempt=0,
        prompt=BlockTokens(names, asked.prompt_tokens, 0, number),
        sampling=GREEDY,
        wire_sampling=WIRE_SAMPLING,
        max_tokens=asked.output_tokens,
        stop_token_ids=frozenset(),
        local=local,
        candidates=[],
        cache_salt=b"",
        root=ROOT,
        trace=NO_TRACE,
        arrived_s=now_s,
        arrived_wall_s=now_s,
        emit=lambda update: None,
    )
    request.sequences = [TokenSequence(request, 0, [])]
    return request


def _prompt(group: Group) -> Prompt:
    return Prompt(
        request_id=group.request.request_id,
        tokens=group.tokens,
        prompt_tokens=len(group.request.prompt),
        held_blocks=group.held,
        params=GREEDY,
        choices=[sequence.choice for sequence in group.sequences],
        identities=group.identities,
        tenant=NO_TENANT,
        trace=NO_TRACE,
        arrived_wall_s=0.0,
        on_end=lambda prompt: None,
    )


def _view(stage: DecodeStage | PrefillStage, bit: int) -> WorkerView:
    """Return what a load report would say of the worker now."""
    name, scheduler = stage.worker_id, stage.scheduler
    decodes = isinstance(stage, DecodeStage)
    return WorkerView(
        worker_id=name,
        boot_id=name.encode(),
        role="decode" if decodes else "prefill",
        address="",
        kv_format=KV_FORMAT,
        running=stage.scheduler.running if isinstance(stage, DecodeStage) else 0,
        waiting=scheduler.waiting,
        free_blocks=stage.pool.available,
        total_blocks=stage.pool.total,
        promised_blocks=stage.scheduler.promised_blocks if isinstance(stage, DecodeStage) else 0,
        queued_tokens=scheduler.queued_tokens,
        bit=bit,
    )
