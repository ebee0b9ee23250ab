"""A fleet on virtual time: production's placement, index, schedulers and pools, without messages.

    arrival ─ host ─▶ place ─▶ decode worker: credit ─▶ handoff ─▶ prefill worker: chunks
                                    ▲                      │  offers, one READ after the other
                                    └───── all is here ◀───┘

What is simplified: a READ has the whole link of both its workers. What the router knows, and when,
is router_knowledge.py's.
No worker fails, so no lease ends: the fault lab simulates those. Workers drain and leave as
role_changes.py orders; a prompt whose prefill workers have all left gets others, on the same decode
worker.
"""

from __future__ import annotations

from asyncio import QueueEmpty
from dataclasses import dataclass
from functools import partial

from baton.decode_worker.sequences import Group, Phase, Request
from baton.decode_worker.sequences import Sequence as TokenSequence
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.kv_transfer.granter import Computed
from baton.planner.timing_model import TimingModel
from baton.planner.traces import TraceRequest
from baton.prefill_worker.prompts import Prompt
from baton.proto import handoff_pb2
from baton.router.fleet.placement import Placer, place
from baton.router.fleet.request_need import Need, Source
from baton.runtime.errors import BatonError, Overloaded
from baton.simulation.capacity.decode_stage import DecodeStage
from baton.simulation.capacity.layout import CapacityScenario
from baton.simulation.capacity.prefill_stage import PrefillStage
from baton.simulation.capacity.request_record import GapLog, RequestRecord
from baton.simulation.capacity.router_knowledge import RouterKnowledge
from baton.simulation.capacity.stage_values import prompt_of, request_of
from baton.simulation.capacity.timeline import EventQueue
from baton.simulation.capacity.trace_tokens import block_names

BUSY_PAUSE_S = 0.05  # before refused handoffs are tried again
MAX_NEW_CANDIDATES = 8


@dataclass(slots=True, eq=False)
class _Handoff:
    group: Group
    reader: DecodeStage
    candidates: tuple[str, ...]  # prefill workers, best first
    granter: PrefillStage | None = None
    prompt: Prompt | None = None
    read_s: float = 0.0  # all that was offered is read then
    complete: bool = False  # all is offered
    over: bool = False


@dataclass(slots=True)
class _Active:
    """A placed request that has not ended."""

    request: Request
    stage: DecodeStage
    candidates: tuple[str, ...]
    source: Source | None  # of leading blocks that a prefill worker may READ


class CapacityFleet:
    """Implements `DecodeOwner`. `records` are in the order of the trace."""

    def __init__(
        self,
        timeline: EventQueue,
        timing: TimingModel,
        scenario: CapacityScenario,
        trace: list[TraceRequest],
        placer: Placer = place,
    ) -> None:
        layout = scenario.layout
        self.records = [RequestRecord(each) for each in trace]
        self.gaps = GapLog()
        self.finished = 0
        self._timeline = timeline
        self._timing = timing
        mode = scenario.placement if layout.prefill else "local"
        itl_s = scenario.objectives.itl_s
        self._router = RouterKnowledge(timeline, mode, timing, layout.steps(), placer, itl_s)
        self._growth = layout.steps().expected_growth_tokens
        self._handoffs: dict[Group, _Handoff] = {}
        self._by_prompt: dict[Prompt, _Handoff] = {}
        self._active: dict[str, _Active] = {}  # by request id
        self._scenario = scenario
        self.prefill: dict[str, PrefillStage] = {}
        self.decode: dict[str, DecodeStage] = {}
        self.draining: set[str] = set()  # workers that take nothing new
        self.retired: list[DecodeStage | PrefillStage] = []
        for number in range(layout.prefill):
            self.add_prefill(f"p{number:05}")
        for number in range(layout.decode + layout.colocated):
            self.add_decode(f"d{number:05}")
        for number, each in enumerate(trace):
            placed_s = each.arrived_s + timing.host_s(each.prompt_tokens)
            timeline.at(placed_s, partial(self._submit, number))

    def stages(self) -> list[DecodeStage | PrefillStage]:
        """Return all workers, prefill workers first."""
        return [*self.prefill.values(), *self.decode.values()]

    # -- workers ------------------------------------------------------------------------------

    def add_prefill(self, name: str) -> None:
        """Add a worker with an empty pool."""
        layout = self._scenario.layout
        self.prefill[name] = PrefillStage(
            name,
            self._timeline,
            self._timing,
            layout.steps(),
            BlockPool(layout.blocks, layout.block_tokens),
            offered=self._offered,
            changed=self.changed,
            read=self._read_cached,
        )
        self._router.add(self.prefill[name])

    def add_decode(self, name: str) -> None:
        """Add a worker with an empty pool."""
        layout = self._scenario.layout
        self.decode[name] = DecodeStage(
            name,
            self._timeline,
            self._timing,
            layout.steps(),
            BlockPool(layout.blocks, layout.block_tokens),
            self,
            every_token=self._scenario.every_token,
        )
        self._router.add(self.decode[name])

    def drain(self, stage: DecodeStage | PrefillStage) -> None:
        """Place nothing more on a worker."""
        self.draining.add(stage.worker_id)
        self._router.drain(stage.worker_id)

    def busy(self, stage: DecodeStage | PrefillStage) -> bool:
        """Return whether a request needs the worker."""
        if isinstance(stage, DecodeStage):
            return any(each.stage is stage for each in self._active.values())
        return any(each.granter is stage for each in self._handoffs.values())

    def remove(self, stage: DecodeStage | PrefillStage) -> None:
        """Remove a worker that no request needs; its cached blocks are lost."""
        name = stage.worker_id
        self.prefill.pop(name, None)
        self.decode.pop(name, None)
        self._router.remove(name)
        self.draining.discard(name)
        self.retired.append(stage)

    def move_prompts(self, stage: PrefillStage) -> None:
        """Let other workers compute the prompts that this one has not completed."""
        for handoff in [each for each in self._handoffs.values() if each.granter is stage]:
            if not handoff.complete and handoff.prompt is not None:
                del self._by_prompt[handoff.prompt]
                stage.end(handoff.prompt)
                handoff.granter = handoff.prompt = None
                self._open(handoff)

    def move_requests(self, stage: DecodeStage) -> None:
        """Migrate the requests of a worker that plans no more, with the tokens that they have."""
        handoffs = {each.group.request.request_id: each for each in self._handoffs.values()}
        for name, active in [item for item in self._active.items() if item[1].stage is stage]:
            (sequence,) = active.request.sequences
            stage.scheduler.end(sequence)
            if (handoff := handoffs.get(name)) is not None:
                self._close(handoff)
                stage.scheduler.requeue(handoff.group)
            self._submit(int(name))

    # -- the router ---------------------------------------------------------------------------

    def changed(self, stage: DecodeStage | PrefillStage) -> None:
        self._router.changed(stage)

    def _submit(self, number: int) -> None:
        """Place a request, with the tokens that it has, or refuse it."""
        record = self.records[number]
        asked = record.request
        size = self._scenario.layout.block_tokens
        names = block_names(asked, number, size)
        need = Need(
            asked.prompt_tokens + record.tokens,
            min(self._growth, asked.output_tokens - record.tokens),
            asked.prompt_tokens + asked.output_tokens,
        )
        try:
            placement = self._router.place(need, names[: asked.prompt_tokens // size])
            request = request_of(
                number,
                record,
                names,
                self._timeline.now_s,
                block_tokens=size,
                local=placement.local,
            )
            stage = self.decode[placement.decode.worker_id]
            candidates = tuple(each.worker_id for each in placement.candidates)
            self._active[request.request_id] = _Active(request, stage, candidates, placement.source)
            stage.submit(request)
        except BatonError as error:
            self._active.pop(str(number), None)
            record.refused = error.code
            record.end_s = self._timeline.now_s
            self.finished += 1

    # -- handoffs -----------------------------------------------------------------------------

    def granted(self, stage: DecodeStage, group: Group) -> None:
        if group.phase is not Phase.FETCHING:
            if group.local != "recompute":  # what is matched then, the request computed itself
                self._record(group.request).cached_tokens = group.held * stage.pool.block_size
            return
        candidates = self._active[group.request.request_id].candidates
        handoff = self._handoffs[group] = _Handoff(group, stage, candidates)
        # the decode worker goes on first: its scheduler is in the middle of a grant
        self._timeline.at(self._timeline.now_s, lambda: self._open(handoff))

    def _open(self, handoff: _Handoff) -> None:
        if handoff.over:
            return
        for granter in self._granters(handoff):
            source = self._active[handoff.group.request.request_id].source
            prompt = handoff.prompt = prompt_of(handoff.group, source)
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

    def _granters(self, handoff: _Handoff) -> list[PrefillStage]:
        """Return the candidates that take prompts; if all have left, the least busy others."""
        takes = {name: each for name, each in self.prefill.items() if name not in self.draining}
        found = [takes[name] for name in handoff.candidates if name in takes]
        if not found:
            found = sorted(takes.values(), key=lambda each: each.scheduler.queued_tokens)
        return found[:MAX_NEW_CANDIDATES]

    def _offered(self, prompt: Prompt) -> None:
        """Begin the READs of what a prefill worker has offered since the last call."""
        handoff = self._by_prompt.get(prompt)
        while handoff is not None and not handoff.over:
            try:
                event = prompt.events.get_nowait()
            except QueueEmpty:
                return
            if isinstance(event, Computed):
                self._read(
                    handoff,
                    event.partial_tokens or len(event.blocks) * handoff.reader.pool.block_size,
                )
            elif isinstance(event, handoff_pb2.FirstTokens):
                self._first(handoff, event)
            elif event is None:
                handoff.complete = True
                self._timeline.at(handoff.read_s, lambda: self._fetched(handoff))
            else:
                raise event

    def _read(self, handoff: _Handoff, tokens: int) -> None:
        reader, granter = handoff.reader, handoff.granter
        assert granter is not None
        start_s = max(self._timeline.now_s, reader.link_free_s, granter.link_free_s)
        handoff.read_s = start_s + self._timing.transfer_s(tokens)
        reader.link_free_s = granter.link_free_s = handoff.read_s

    def _read_cached(self, stage: PrefillStage, prompt: Prompt) -> None:
        """READ what a prompt lacks of its source's blocks, which are pinned until then."""
        assert prompt.source is not None
        name, now_s = prompt.source.worker.worker_id, self._timeline.now_s
        source = self.prefill.get(name) or self.decode.get(name)
        if source is None:  # it has left
            self._timeline.at(now_s, lambda: stage.read_ended(prompt, 0))
            return
        pinned = source.pool.match(prompt.identities, prompt.tokens, Hold.PINNED, prompt.reading_to)
        verified = max(0, len(pinned) - prompt.cached)
        size = stage.pool.block_size
        start_s = max(now_s, source.link_free_s, stage.link_free_s)
        end_s = start_s + self._timing.transfer_s(verified * size) if verified else now_s
        if verified:
            source.link_free_s = stage.link_free_s = end_s

        def ended() -> None:
            source.pool.release(pinned, Hold.PINNED)
            self.changed(source)
            stage.read_ended(prompt, verified)

        self._timeline.at(end_s, ended)

    def _first(self, handoff: _Handoff, first: handoff_pb2.FirstTokens) -> None:
        for sequence in handoff.group.undrawn():
            record = self._record(sequence.request)
            record.cached_tokens = first.cached_tokens
            sequence.output.append(int(sequence.request.request_id))
            self.drew(sequence, 1, 0.0, self._timeline.now_s)
            if not sequence.growth_left:
                handoff.reader.end(sequence)
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

    def drew(self, sequence: TokenSequence, steps: int, gap_s: float, last_s: float) -> None:
        record = self._record(sequence.request)
        self.gaps.token(record, last_s, gap_s, steps - 1)
        if not sequence.growth_left:
            record.end_s = last_s
            self.finished += 1
            del self._active[sequence.request.request_id]

    def _record(self, request: Request) -> RequestRecord:
        return self.records[int(request.request_id)]

    def check(self) -> None:
        """Raise RuntimeError if a request has not ended, or a worker holds a block."""
        if self.finished != len(self.records) or self._handoffs:
            waiting = [n for n, record in enumerate(self.records) if record.end_s < 0]
            raise RuntimeError(
                f"nothing can happen any more, and {len(waiting)} requests wait: {waiting[:5]}"
            )
        for stage in [*self.stages(), *self.retired]:
            stage.pool.check()
            if stage.pool.available != stage.pool.total:
                raise RuntimeError(f"{stage.worker_id} holds blocks at the end")
