"""Chats replayed over simulated workers, by the product's own placement and radix index.

    turn ─ arrives ─▶ place ─▶ prefill worker: READ what the source holds, compute ─▶ decode worker
                                                                    answer ─▶ next turn ◀─┘

A worker is a set of blocks and a queue on virtual time; links, engines and movers are left out.
Memory is endless: nothing is evicted, so what is computed twice is due to placement, to whole
blocks and to prompts that come at the same time. Counts what is computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from baton.planner.timing_model import ChunkTiming, StepTiming, TimingModel, TransferTiming
from baton.proto import worker_pb2
from baton.router.fleet.placement import (
    FleetView,
    Placement,
    PlacementInput,
    open_groups,
    place,
)
from baton.router.fleet.radix_index import RadixIndex
from baton.router.fleet.request_need import Need
from baton.router.fleet.roster import Roster
from baton.router.fleet.worker_costs import WorkerCosts
from baton.router.fleet.worker_view import KvFormat, WorkerView
from benchmarks.inputs.chats import Chat, Turn

BLOCK_TOKENS = 16
KV_FORMAT = KvFormat("model", "bfloat16", BLOCK_TOKENS)
PREFILL_TOKENS_PER_S = 20_000.0
LOCAL_TOKENS_PER_S = 5_000.0
TOKENS_PER_S = 80.0  # of one sequence
READ_TOKENS_PER_S = 200_000.0
GROWTH_TOKENS = 256
POOL_BLOCKS = 1 << 30
TIMING = TimingModel(
    "replay",
    1.0,
    ChunkTiming(per_token_s=1 / PREFILL_TOKENS_PER_S),
    StepTiming(1 / TOKENS_PER_S, 1e-5),
    transfer=TransferTiming(1e-3, 1 / READ_TOKENS_PER_S),
)
COSTS = {
    "prefill": WorkerCosts(TIMING, growth_tokens=GROWTH_TOKENS),
    "decode": WorkerCosts(
        TIMING, PREFILL_TOKENS_PER_S / LOCAL_TOKENS_PER_S, growth_tokens=GROWTH_TOKENS
    ),
}


class SimulatedWorker:
    def __init__(self, name: str, bit: int) -> None:
        self.blocks: set[bytes] = set()
        self.free_at_s = 0.0  # of a prefill worker's queue
        self.running = 0
        self.sequence = 0  # of its block events
        role = name.split("-")[0]
        self.view = WorkerView(
            name,
            name.encode(),
            role,
            name,
            KV_FORMAT,
            free_blocks=POOL_BLOCKS,
            total_blocks=POOL_BLOCKS,
            bit=bit,
            costs=COSTS[role],
        )

    def matched(self, names: Sequence[bytes]) -> int:
        """Return how many leading blocks it holds."""
        return next((n for n, name in enumerate(names) if name not in self.blocks), len(names))

    def store(self, names: Sequence[bytes]) -> bytes:
        """Hold these blocks; return those that are new, concatenated."""
        fresh = [name for name in names if name not in self.blocks]
        self.blocks.update(fresh)
        return b"".join(fresh)


@dataclass(slots=True)
class Counts:
    """The tokens of prompts that the replay computed, read and moved."""

    prompt: int = 0
    computed: int = 0
    read: int = 0  # by prefill workers, from any other
    moved: int = 0  # to decode workers
    local: int = 0  # turns whose prompt a decode worker computed
    turns: int = 0


@dataclass(order=True, slots=True)
class _Event:
    at_s: float
    number: int
    act: Callable[[], None] = field(compare=False)


class ChatReplay:
    """`prefill` and `decode` are numbers of workers."""

    def __init__(self, chats: Sequence[Chat], prefill: int, decode: int) -> None:
        self._chats = chats
        self._events: list[_Event] = []
        self._count = 0
        self._now_s = 0.0
        self._roster = Roster()
        self._index = RadixIndex()
        self.counts = Counts()
        self._workers: dict[str, SimulatedWorker] = {}
        names = [*(f"prefill-{n}" for n in range(prefill)), *(f"decode-{n}" for n in range(decode))]
        for name in names:
            snapshot = worker_pb2.BlockEvents(
                boot_id=name.encode(), snapshot=True, snapshot_end=True
            )
            self._index.apply(name, snapshot)
            self._workers[name] = SimulatedWorker(name, self._index.bit(name))

    def run(self, *, read_cached: bool = True) -> Counts:
        self._read_cached = read_cached
        for number, chat in enumerate(self._chats):
            self._later(chat.turns[0].at_s, partial(self._arrive, number, 0))
        while self._events:
            event = heapq.heappop(self._events)
            self._now_s = event.at_s
            event.act()
        return self.counts

    def _later(self, at_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, _Event(max(at_s, self._now_s), self._count, act))

    def _arrive(self, number: int, turn_index: int) -> None:
        chat = self._chats[number]
        turn = chat.turns[turn_index]
        names = chat.identities(turn_index, turn.input_tokens, BLOCK_TOKENS, number)
        names = names[: (turn.input_tokens - 1) // BLOCK_TOKENS]  # the last token is computed
        placement = self._place(turn, names)
        decode = self._workers[placement.decode.worker_id]
        here = turn.input_tokens - decode.matched(names) * BLOCK_TOKENS
        self.counts.turns += 1
        self.counts.prompt += turn.input_tokens
        if placement.local:
            self.counts.local += 1
            self.counts.computed += here
            ready_s = self._now_s + here / LOCAL_TOKENS_PER_S
        else:
            self.counts.moved += here
            ready_s = self._prefill(turn, names, placement)
        decode.running += 1
        ended_s = ready_s + turn.output_tokens / TOKENS_PER_S

        def answered() -> None:
            decode.running -= 1
            computed = turn.input_tokens + turn.output_tokens - 1
            self._store(decode, chat.identities(turn_index, computed, BLOCK_TOKENS, number))
            if turn_index + 1 < len(chat.turns):
                following = chat.turns[turn_index + 1]
                self._later(following.at_s, lambda: self._arrive(number, turn_index + 1))

        self._later(ready_s, lambda: self._store(decode, names))
        self._later(ended_s, answered)

    def _place(self, turn: Turn, names: Sequence[bytes]) -> Placement:
        for worker in self._workers.values():
            self._roster.put(self._seen(worker))
        need = Need(
            tokens=turn.input_tokens,
            output_tokens=min(turn.output_tokens, GROWTH_TOKENS),
            most_tokens=turn.input_tokens + turn.output_tokens,
        )
        fleet, holders = FleetView(self._roster), self._index.holders(names)
        groups = open_groups(need, fleet)
        return place(
            PlacementInput(
                need, fleet, groups, lambda kv_format: holders, "auto", self._read_cached
            )
        )

    def _seen(self, worker: SimulatedWorker) -> WorkerView:
        queued = max(0.0, worker.free_at_s - self._now_s) * PREFILL_TOKENS_PER_S
        return replace(
            worker.view,
            running=worker.running,
            queued_tokens=int(queued),
        )

    def _prefill(self, turn: Turn, names: Sequence[bytes], placement: Placement) -> float:
        """Compute a prompt on the first candidate; return when the decode worker has it."""
        worker = self._workers[placement.candidates[0].worker_id]
        held = read_to = worker.matched(names)
        if placement.source is not None:
            source = self._workers[placement.source.worker.worker_id]
            read_to = max(held, min(placement.source.blocks, source.matched(names)))
        read = (read_to - held) * BLOCK_TOKENS
        computed = turn.input_tokens - read_to * BLOCK_TOKENS
        self.counts.read += read
        self.counts.computed += computed
        begun_s = max(worker.free_at_s, self._now_s + read / READ_TOKENS_PER_S)
        worker.free_at_s = begun_s + computed / PREFILL_TOKENS_PER_S
        self._later(worker.free_at_s, lambda: self._store(worker, names))
        return worker.free_at_s

    def _store(self, worker: SimulatedWorker, names: Sequence[bytes]) -> None:
        """Store blocks, and report them to the index."""
        stored = worker.store(names)
        worker.sequence += 1
        self._index.apply(
            worker.view.worker_id,
            worker_pb2.BlockEvents(
                boot_id=worker.view.boot_id, sequence=worker.sequence, stored=stored
            ),
        )
